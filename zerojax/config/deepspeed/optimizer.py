"""The optimizer and the schedule of a configuration, made by `zerojax.optim`."""

import functools
from collections.abc import Callable
from typing import TypeVar

import optax

from zerojax import optim
from zerojax.config.deepspeed.resolved import Named
from zerojax.errors import UserError

Made = TypeVar("Made")


def make_optimizer(source: str, optimizer: Named, scheduler: Named | None) -> optax.GradientTransformationExtraArgs:
    """The optimizer, its learning rate and momentum following the schedule if there is one.

    Args:
      source: what a message calls the configuration.
      optimizer: `DeepSpeedConfig.optimizer`.
      scheduler: `DeepSpeedConfig.scheduler`.

    Raises:
      UserError: if a name or a parameter is unknown, or a value is out of its range.

    >>> optimizer = make_optimizer("ds.json", Named("Adam", {"lr": 0.1}), None)
    >>> make_optimizer("ds.json", Named("Adam", {"lr": -0.1}), None)
    Traceback (most recent call last):
        ...
    zerojax.errors.UserError: ds.json: optimizer.params.lr is -0.1; accepted: a number of at least 0
    """
    # Each of the two is made by itself first, so that a complaint is about the section that it is from.
    constant = _located(source, "optimizer", lambda: optim.by_name(optimizer.type, optimizer.params))
    if scheduler is None:
        return constant
    momentum = _located(source, "scheduler", lambda: optim.momentum_by_name(scheduler.type, scheduler.params))
    schedule = functools.partial(make_schedule, source, scheduler)
    return optim.by_name(optimizer.type, optimizer.params, schedule=schedule, b1=momentum)


def make_schedule(source: str, scheduler: Named, optimizer_lr: float) -> optax.Schedule:
    """The learning rate of the scheduler beside an optimizer whose own is `optimizer_lr`.

    Raises:
      UserError: as `make_optimizer`.
    """

    def make() -> optax.Schedule:
        optim.momentum_by_name(scheduler.type, scheduler.params)  # which is checked with it
        return optim.schedule_by_name(scheduler.type, scheduler.params, optimizer_lr)

    return _located(source, "scheduler", make)


def _located(source: str, section: str, make: Callable[[], Made]) -> Made:
    """What `make` makes; its complaint, which names a parameter or the section, with the complete key."""
    try:
        return make()
    except UserError as error:
        told = str(error)
        raise UserError(f"{source}: {'' if told.startswith(section) else f'{section}.params.'}{told}") from None
