"""Every key of a DeepSpeed configuration: its values, its default, and what zerojax does about it."""

from collections.abc import Mapping
from types import MappingProxyType

from zerojax.config.deepspeed.keys import features, precision, running, training, zero
from zerojax.config.deepspeed.keys.key import Key, Status

__all__ = ["BY_PATH", "KEYS", "Key", "Status", "names_in"]

# In the order of the documentation.
KEYS: tuple[Key, ...] = (
    *training.BATCH,
    *zero.ZERO,
    *precision.PRECISION,
    *training.OPTIMIZER,
    *training.GRADIENTS,
    *running.DIAGNOSTICS,
    *running.MONITORS,
    *running.CHECKPOINTS,
    *running.ACTIVATIONS,
    *features.PARALLELISM,
    *features.METHODS,
    *zero.AIO,
)

BY_PATH: Mapping[str, Key] = MappingProxyType({key.path: key for key in KEYS})


def names_in(section: str) -> tuple[str, ...]:
    """The names that a section takes, "" for the top.

    >>> names_in("checkpoint.parallel_write")
    ('pipeline_stage',)
    """
    return tuple(key.name for key in KEYS if key.parent == section)
