"""Agreement between the processes of a run that write or read one checkpoint together."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoint.errors import CheckpointError

T = TypeVar("T")

# Long enough for the slowest process to write its share; a process that died is noticed sooner, by its heartbeat.
_BARRIER_SECONDS = 1800


def is_primary() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def barrier(key: str) -> None:
    """Waits until every process has come here; `key` serves once. Sends nothing through devices: safe in a thread."""
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost

        multihost.get_barrier_sync_fn()(key=key, timeout_ms=_BARRIER_SECONDS * 1000)


def agreed(what: str, action: Callable[[], T]) -> T:
    """The result of `action`, which every process calls; if it fails on one, every process raises CheckpointError."""
    fault = None
    try:
        result = action()
    except CheckpointError as error:
        fault = error
    if jax.process_count() > 1:
        sound = multihost_utils.process_allgather(np.array(fault is None))
        if fault is None and not sound.all():
            fault = CheckpointError(f"{what}: process {int(np.argmin(sound))} failed on it, see its message")
    if fault is not None:
        raise fault
    return result


def from_primary(value: Callable[[], Any]) -> Any:
    """The JSON-able result of `value`, called by the primary process, on every process."""
    if jax.process_count() == 1:
        return value()
    data = np.frombuffer(json.dumps(value()).encode(), np.uint8) if is_primary() else np.zeros(0, np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(data.size)))
    padded = np.zeros(size, np.uint8)
    padded[: data.size] = data
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes())
