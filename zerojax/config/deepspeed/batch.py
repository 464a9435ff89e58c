"""The three batch sizes: two of them give the third."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerojax.config.deepspeed.reader import AUTO, RawConfig
from zerojax.errors import UserError

TRAIN, MICRO, STEPS = NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of a step on all devices, rows that a device computes at once, and how often it does in a step."""

    train: int
    micro: int
    steps: int


def resolve_batch(raw: RawConfig, world_size: int, given: Mapping[str, int | None]) -> Batch:
    """The batch sizes, completed as DeepSpeed does it: by floor division, and then checked.

    Args:
      raw: the configuration.
      world_size: number of data-parallel devices.
      given: values for those that are "auto", by key; "auto" without a value is left to the other two sizes.

    Raises:
      UserError: if too little is given, a size is not positive, or they do not multiply to the train batch size.

    >>> from zerojax.config.deepspeed.reader import read
    >>> resolve_batch(read({"train_batch_size": 32, "gradient_accumulation_steps": 2}), 4, {})
    Batch(train=32, micro=4, steps=2)
    """
    written: dict[str, Any] = {name: given.get(name) if raw.get(name) == AUTO else raw.get(name) for name in NAMES}
    train, micro, steps = written.values()
    _check_auto(raw, written)
    if train is None and micro is None:
        raise raw.error(
            f"{TRAIN} and {MICRO}",
            f" are not given ({_words((train, micro, steps), world_size)}); accepted: one of them",
        )
    if train is None:
        steps = 1 if steps is None else steps
        train = micro * steps * world_size
    elif micro is None:
        micro = train // world_size // (1 if steps is None else _divisor(raw, STEPS, steps, written, world_size))
        steps = 1 if steps is None else steps
    elif steps is None:
        steps = train // _divisor(raw, MICRO, micro, written, world_size) // world_size
    for name, size in zip(NAMES, (train, micro, steps), strict=True):
        if size <= 0:
            raise _not_positive(raw, name, size, (train, micro, steps), world_size)
    if train != micro * steps * world_size:
        raise raw.error(
            TRAIN,
            f" is {train}, which is not {MICRO} {micro} x {STEPS} {steps} x {_devices(world_size)} "
            f"= {micro * steps * world_size}; accepted: sizes that multiply to {TRAIN}",
        )
    return Batch(train, micro, steps)


def _check_auto(raw: RawConfig, written: Mapping[str, Any]) -> None:
    """Raises a UserError for an "auto" that neither a value nor the other sizes replace."""
    for name in NAMES:
        others = [other for other in NAMES if other != name]
        # The train batch size follows from the micro-batch alone: one of it, unless there are more, makes a step.
        known = written[MICRO] is not None if name == TRAIN else all(written[other] is not None for other in others)
        if raw.get(name) == AUTO and written[name] is None and not known:
            raise raw.error(name, f" is {AUTO!r}; pass {KEYWORDS[name]}=, or give {' and '.join(others)}")


KEYWORDS = {TRAIN: "train_batch_size", MICRO: "micro_batch_size", STEPS: "gradient_accumulation_steps"}


def _divisor(raw: RawConfig, name: str, size: int, written: Mapping[str, Any], world_size: int) -> int:
    if size == 0:
        raise _not_positive(raw, name, size, tuple(written.values()), world_size)
    return size


def _not_positive(raw: RawConfig, name: str, size: int, sizes: tuple[Any, ...], world_size: int) -> UserError:
    return raw.error(name, f" is {size}; accepted: a positive integer ({_words(sizes, world_size)})")


def _words(sizes: tuple[Any, ...], world_size: int) -> str:
    named = zip(NAMES, sizes, strict=True)
    given = ", ".join(f"{name} {'not given' if size is None else size}" for name, size in named)
    return f"{given}, {_devices(world_size)}"


def _devices(world_size: int) -> str:
    return f"{world_size} device{'s' if world_size > 1 else ''}"
