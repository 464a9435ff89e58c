"""The values that "auto" leaves to the framework around the configuration."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zerojax.config.deepspeed.batch import NAMES
from zerojax.config.deepspeed.keys import BY_PATH, Status
from zerojax.config.deepspeed.reader import AUTO, RawConfig, check_contradictions
from zerojax.errors import shown

# What to pass where a key has no default that would do.
_NEEDED = {
    "optimizer.params.lr": "learning_rate",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "total_steps",
}


def fill(raw: RawConfig, given: Mapping[str, Any]) -> RawConfig:
    """The configuration with each "auto" replaced by the value given for its key, or else by the key's default.

    The batch sizes are left for `resolve_batch`, and keys that need nothing as they are.

    Args:
      raw: the configuration.
      given: values by complete key; None where there is none.

    Raises:
      UserError: if a key without a default is "auto" and no value is given for it, or the value is of a wrong kind.

    >>> from zerojax.config.deepspeed.reader import read
    >>> raw = read({"optimizer": {"type": "Adam", "params": {"lr": "auto", "eps": "auto"}}})
    >>> dict(fill(raw, {"optimizer.params.lr": 0.1}).values)
    {'optimizer.type': 'Adam', 'optimizer.params.lr': 0.1}
    """
    values = {}
    for path, value in raw.values.items():
        if value != AUTO or path in NAMES or _needs_nothing(path):
            values[path] = value
        elif given.get(path) is not None:
            values[path] = _checked(raw, path, given[path])
        elif path in _NEEDED:
            raise raw.error(path, f" is {AUTO!r}; pass {_NEEDED[path]}=, or give it in the configuration")
    filled = dataclasses.replace(raw, values=MappingProxyType(values))
    check_contradictions(filled)
    return filled


def _needs_nothing(path: str) -> bool:
    return path in BY_PATH and BY_PATH[path].status is Status.NEEDLESS


def _checked(raw: RawConfig, path: str, value: Any) -> Any:
    kind = BY_PATH[path].kind
    if not kind.accepts(value):
        raise raw.error(path, f" is {AUTO!r}, for which {shown(value)} is given; accepted: {kind.words}")
    return kind.normal(value)
