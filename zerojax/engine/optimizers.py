"""The optimizer of an engine, and what can be told of its groups of parameters."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import optax

from zerojax import optim
from zerojax.config import deepspeed
from zerojax.config.deepspeed.resolved import Named
from zerojax.errors import UserError, shown
from zerojax.optim import names


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A transformation, with what each of its groups of parameters goes by.

    Attributes:
      transformation: of optax.
      types: the groups' names in the configuration; empty for an optimizer that was given.
      rates: their learning rates as functions of the number of updates applied; empty where they are not known.
      momenta: their momenta, or pairs of betas, likewise.
    """

    transformation: optax.GradientTransformation
    types: tuple[str, ...] = ()
    rates: tuple[optax.Schedule, ...] = ()
    momenta: tuple[Callable[[int], Any], ...] = ()


def optimizer_of(config: deepspeed.DeepSpeedConfig, given: Any, schedule: Any) -> Optimizer:
    """The optimizer that was given or that the configuration names.

    Args:
      config: the configuration.
      given: a transformation, a function that makes one, or `None`.
      schedule: the schedule that `given` was made with, or the one in place of the configuration's, or `None`.

    Raises:
      UserError: if there is no optimizer, or two, or two schedules.
    """
    if schedule is not None and not callable(schedule):
        raise UserError(f"lr_scheduler is {shown(schedule)}; accepted: a function of the number of updates applied")
    if given is not None:
        return _given(config, given, schedule)
    if config.optimizer is None:
        raise UserError(
            f"{config.source} has no optimizer, and none was given; accepted: an optimizer section, or optimizer=..."
        )
    named, scheduler = config.optimizer, config.scheduler
    if schedule is not None and scheduler is not None:
        raise UserError(f"lr_scheduler was given beside {config.source}'s scheduler; accepted: one")
    constant = optim.learning_rates(named.type, named.params).values()
    rates: list[optax.Schedule]
    if schedule is not None:
        transformation = optim.by_name(named.type, named.params, schedule=lambda rate: schedule)
        rates = [schedule for _ in constant]
    else:
        transformation = deepspeed.make_optimizer(config.source, named, scheduler)
        rates = [
            functools.partial(_constant, rate)
            if scheduler is None
            else deepspeed.make_schedule(config.source, scheduler, rate)
            for rate in constant
        ]
    return Optimizer(transformation, (named.type,) * len(rates), tuple(rates), _momenta(named, scheduler))


def _given(config: deepspeed.DeepSpeedConfig, given: Any, schedule: optax.Schedule | None) -> Optimizer:
    if config.optimizer is not None:
        raise UserError(
            f"optimizer was given beside {config.source}'s optimizer.type {config.optimizer.type!r}; accepted: one"
        )
    if config.scheduler is not None:
        raise UserError(
            f"optimizer was given beside {config.source}'s scheduler.type {config.scheduler.type!r}; accepted: an "
            "optimizer made with its schedule, and lr_scheduler=that schedule"
        )
    is_transformation = hasattr(given, "init") and hasattr(given, "update")
    if not is_transformation and not callable(given):
        raise UserError(
            f"optimizer is {shown(given)}; accepted: an optax.GradientTransformation, or a function that makes one"
        )
    return Optimizer(given if is_transformation else given(), rates=() if schedule is None else (schedule,))


def _momenta(named: Named, scheduler: Named | None) -> tuple[Callable[[int], Any], ...]:
    """The momentum or the betas of each group, as DeepSpeed's `get_mom` tells them: 0 where there is none."""
    settings = {**names.OPTIMIZERS[named.type.lower()].params, **named.params}
    betas = functools.partial(_constant, tuple(settings["betas"])) if "betas" in settings else None
    momentum = functools.partial(_constant, settings.get("momentum", 0.0))
    if betas is None:
        return (momentum,)
    if "momentum" in settings:  # Muon, whose second group is Adam's
        return momentum, betas
    cycle = optim.momentum_by_name(scheduler.type, scheduler.params) if scheduler is not None else None
    return (betas if cycle is None else lambda count: (float(cycle(count)), optim.CYCLE_B2),)


def _constant(value: Any, count: int) -> Any:
    del count
    return value
