"""The gin configuration that trains as a DeepSpeed configuration says."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zerojax.config.bindings import literal
from zerojax.config.deepspeed.calls import Call, optimizer_call, schedule_call
from zerojax.config.deepspeed.resolve import resolve
from zerojax.config.deepspeed.resolved import DeepSpeedConfig
from zerojax.errors import shown
from zerojax.precision import NAMED, LossScale, Precision

MODULE = "zerojax.optim"  # complete names: optax has functions of the same


def to_gin(config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int) -> str:
    """The text of a gin file that binds what the configuration says; the model, the data and the steps are not in it.

    Args:
      config: a dict, the path of a JSON file, or a JSON text in URL-safe base64.
      world_size: number of data-parallel devices.

    Raises:
      UserError: as `resolve`; what zerojax does not do is refused.

    >>> text = to_gin({"train_batch_size": 32, "zero_optimization": {"stage": 2}}, world_size=8)
    >>> "Zero.stage = 2" in text.splitlines(), "train.batch_size = 32" in text.splitlines()
    (True, True)
    """
    resolved = resolve(config, world_size=world_size)
    parts = (_heading, _train, _zero, _precision, _optimizer, _told)
    paragraphs = ("\n".join(part(resolved)) for part in parts)
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _heading(config: DeepSpeedConfig) -> Iterator[str]:
    batch = config.batch
    sizes = f"{batch.micro} (micro-batch) x {batch.steps} (accumulation) x {config.world_size} (devices)"
    yield f"# From {shown(config.source)}. The batch of {batch.train} is {sizes}."
    yield "# Include it in a file that binds the rest of train: its model, loss_fn, dataset, steps and run_dir."


def _train(config: DeepSpeedConfig) -> Iterator[str]:
    yield f"train.batch_size = {config.batch.train}"
    yield "train.zero = @Zero()"
    if config.optimizer is not None:
        yield f"train.optimizer = {_reference(optimizer_call(config.optimizer, config.scheduler), '')}"


def _zero(config: DeepSpeedConfig) -> Iterator[str]:
    for name, value in config.zero_settings.items():
        if name != "precision":
            yield f"Zero.{name} = {literal(value)}"
        elif word := _word(value):
            yield f"Zero.precision = {word!r}"
        else:
            yield "Zero.precision = @Precision()"
    if config.mesh_axes is not None:
        yield "Zero.mesh = @make_mesh()"
        yield from (f"make_mesh.{axis} = {size}" for axis, size in config.mesh_axes.items())


def _precision(config: DeepSpeedConfig) -> Iterator[str]:
    """What differs from the defaults, where no name says it all."""
    if _word(config.precision) is not None:
        return
    for name, value in _changes(config.precision):
        if isinstance(value, LossScale):
            yield "Precision.loss_scale = @LossScale()"
            yield from (f"LossScale.{inner} = {literal(change)}" for inner, change in _changes(value))
        else:
            yield f"Precision.{name} = {literal(value.name if isinstance(value, np.dtype) else value)}"


def _optimizer(config: DeepSpeedConfig) -> Iterator[str]:
    if config.optimizer is not None:
        yield from _bindings(optimizer_call(config.optimizer, config.scheduler), "")
    elif config.scheduler is not None:
        call = schedule_call(config.scheduler, None)
        yield f"# The learning rate of the optimizer that train.optimizer names is to be {_reference(call, '')}."
        yield from _bindings(call, "")


def _told(config: DeepSpeedConfig) -> Iterator[str]:
    """Comments on the keys that bind nothing."""
    if config.tensorboard.enabled or config.csv_monitor.enabled:
        yield "# tensorboard, csv_monitor: train writes CSV, and TensorBoard events if it is installed, to its run_dir."
    if config.steps_per_print is not None or config.wall_clock_breakdown:
        yield "# steps_per_print, wall_clock_breakdown: train shows its progress and speed as it runs."
    if config.dataloader_drop_last:
        yield "# dataloader_drop_last: every batch of train is full."
    yield from (f"# {note}" for note in config.notes)


def _bindings(call: Call, scope: str) -> Iterator[str]:
    """The arguments of a call, then those of the calls in them."""
    for name, value in call.arguments.items():
        yield f"{scope}{_name(call)}.{name} = {_written(value, _scope(call, name))}"
    for name, value in call.arguments.items():
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Call):
                yield from ("", *_bindings(inner, _scope(call, name)))


def _scope(call: Call, name: str) -> str:
    """Keeps two calls of one function apart."""
    value, others = call.arguments[name], [other for key, other in call.arguments.items() if key != name]
    twice = isinstance(value, Call) and any(
        isinstance(other, Call) and other.function is value.function for other in others
    )
    return f"{name}/" if twice else ""


def _written(value: Any, scope: str) -> str | None:
    if isinstance(value, Call):
        return _reference(value, scope)
    if isinstance(value, tuple):
        return f"({', '.join(str(_written(item, scope)) for item in value)})"
    return literal(value)


def _reference(call: Call, scope: str) -> str:
    return f"@{scope}{_name(call)}()"


def _name(call: Call) -> str:
    return f"{MODULE}.{call.function.__name__}"


def _word(precision: Precision) -> str | None:
    """The name of a precision that has one."""
    return next((word for word in NAMED if Precision.of(word) == precision), None)


def _changes(settings: Any) -> Iterator[tuple[str, Any]]:
    """The fields that are not the default, and their values."""
    plain = type(settings)()
    values = ((field.name, getattr(settings, field.name)) for field in dataclasses.fields(settings))
    return ((name, value) for name, value in values if value != getattr(plain, name))
