"""The functions of `zerojax.optim` behind DeepSpeed's names, for a text that calls them itself."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from zerojax import optim
from zerojax.config.deepspeed.resolved import Named
from zerojax.optim import names

RATES = ("lr", "muon_lr", "adam_lr")


@dataclasses.dataclass(frozen=True)
class Call:
    """A function and the arguments that are not its defaults: values, calls, or tuples of both."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


def optimizer_call(optimizer: Named, scheduler: Named | None) -> Call:
    """What `make_optimizer` makes, as a call.

    >>> call = optimizer_call(Named("AdamW", {"lr": 0.1, "fused": True}), None)
    >>> call.function.__name__, call.arguments
    ('adamw', {'learning_rate': 0.1})
    """
    entry = names.OPTIMIZERS[optimizer.type.lower()]
    function = entry.make
    given = {name: value for name, value in optimizer.params.items() if name in entry.params}
    settings = {name: value for name, value in given.items() if name not in RATES}
    if function is optim.adam:
        decoupled = settings.pop("adam_w_mode", True) or entry.name == "AdamW"
        if settings.pop("torch_adam", False) and decoupled:
            settings.setdefault("weight_decay", names.TORCH_ADAMW_DECAY)
        if decoupled:
            function = optim.adamw
        else:
            settings["adam_w_mode"] = False
    scheduled = lambda rate: rate if scheduler is None else schedule_call(scheduler, rate)
    rates = {
        "adam_lr" if name == "adam_lr" else "learning_rate": scheduled(rate)
        for name, rate in optim.learning_rates(optimizer.type, optimizer.params).items()
    }
    if scheduler is not None and "betas" in entry.params and function is not optim.muon:
        if optim.momentum_by_name(scheduler.type, scheduler.params) is not None:
            settings["betas"] = (_call(optim.one_cycle_momentum, scheduler), optim.CYCLE_B2)
    return Call(function, {**rates, **settings})


def schedule_call(scheduler: Named, optimizer_lr: float | None) -> Call:
    """What `make_schedule` makes, as a call."""
    call = _call(names.SCHEDULES[scheduler.type.lower()].make, scheduler)
    needs_rate = "optimizer_lr" in inspect.signature(call.function).parameters
    if optimizer_lr is None or not needs_rate or call.arguments.get("warmup_max_lr") is not None:
        return call
    return Call(call.function, {**call.arguments, "optimizer_lr": optimizer_lr})


def _call(function: Callable[..., Any], scheduler: Named) -> Call:
    """The function with those of the scheduler's parameters that it takes."""
    accepted = inspect.signature(function).parameters
    return Call(function, {name: value for name, value in scheduler.params.items() if name in accepted})
