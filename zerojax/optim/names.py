"""DeepSpeed's names: `optimizer.type`, `scheduler.type` and their `params`, with DeepSpeed's defaults."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from zerojax.errors import UserError, shown
from zerojax.optim import checks, schedules
from zerojax.optim.adaptive import adagrad, adam
from zerojax.optim.layerwise import lamb
from zerojax.optim.momentum import lion, sgd
from zerojax.optim.orthogonal import muon

TORCH_ADAMW_DECAY = 0.01  # torch's default, which "torch_adam" asks for


@dataclasses.dataclass(frozen=True)
class Named:
    """What stands behind a name of a configuration.

    Attributes:
        name: as DeepSpeed spells it; a configuration may use any case.
        make: the function that the parameters are for.
        params: the accepted parameters with their defaults. `REQUIRED` has none.
        ignored: accepted parameters that choose an implementation, which changes no result.
    """

    name: str
    make: Callable[..., Any]
    params: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


class Required:
    """The default of a parameter that has none."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = Required()

_TORCH = ("capturable", "differentiable", "foreach", "fused")
_DEEPSPEED = ("fp32_optimizer_states", "set_grad_none")
_ADAM = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,  # 0.01 for AdamW with "torch_adam"
    "bias_correction": True,
    "amsgrad": False,
    "adam_w_mode": True,  # which "AdamW" overrules
    "torch_adam": False,
}
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
_CYCLE_LR = {"cycle_min_lr": REQUIRED, "cycle_max_lr": REQUIRED, "decay_lr_rate": 0.0}
_CYCLE_MOMENTUM = {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0}
_CYCLE = {
    "cycle_first_step_size": 2000,
    "cycle_second_step_size": None,  # as the first
    "cycle_first_stair_count": 0,
    "cycle_second_stair_count": None,  # as the first
    "decay_step_size": 0,
}


def _table(*entries: Named) -> dict[str, Named]:
    return {entry.name.lower(): entry for entry in entries}


OPTIMIZERS: Mapping[str, Named] = _table(
    Named("Adam", adam, _ADAM, _TORCH + _DEEPSPEED),
    Named("AdamW", adam, _ADAM, _TORCH + _DEEPSPEED),
    Named(
        "Lamb",
        lamb,
        {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "bias_correction": True,
            "eps_inside_sqrt": False,
            "max_coeff": 10.0,
            "min_coeff": 0.01,
        },
    ),
    Named("Lion", lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}, _DEEPSPEED),
    Named(
        "Adagrad",
        adagrad,
        {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "lr_decay": 0.0, "initial_accumulator_value": 0.0},
        _TORCH + _DEEPSPEED,
    ),
    Named(
        "SGD",
        sgd,
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        _TORCH,
    ),
    Named(
        "Muon",
        muon,
        {
            "lr": None,  # both of the next two, where they are not given
            "muon_lr": 0.02,
            "adam_lr": 3e-4,
            "momentum": 0.95,
            "betas": (0.9, 0.95),
            "eps": 1e-10,
            "weight_decay": 0.0,
            "ns_method": "gram",
        },
    ),
)

_COMPRESSED = "it compresses what replicas send each other, not what ZeRO's partitions do; use {}"
_MUP = "its learning rates follow the width of each layer; use {} with groups of parameters (zerojax.optim.grouped)"
REFUSED: Mapping[str, str] = {
    "onebitadam": _COMPRESSED.format("Adam"),
    "onebitlamb": _COMPRESSED.format("Lamb"),
    "zerooneadam": _COMPRESSED.format("Adam"),
    "muadam": _MUP.format("Adam"),
    "muadamw": _MUP.format("AdamW"),
    "musgd": _MUP.format("SGD"),
}

SCHEDULES: Mapping[str, Named] = _table(
    Named("WarmupLR", schedules.warmup_lr, {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP}),
    Named(
        "WarmupDecayLR",
        schedules.warmup_decay_lr,
        {"total_num_steps": REQUIRED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARMUP},
    ),
    Named(
        "WarmupCosineLR",
        schedules.warmup_cosine_lr,
        {"total_num_steps": REQUIRED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_WARMUP},
    ),
    Named("OneCycle", schedules.one_cycle, {**_CYCLE_LR, **_CYCLE, "cycle_momentum": True, **_CYCLE_MOMENTUM}),
    Named(
        "LRRangeTest",
        schedules.lr_range_test,
        {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 2000,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        },
    ),
)


def by_name(
    type: str,
    params: Mapping[str, Any],
    *,
    schedule: Callable[[float], optax.Schedule] | None = None,
    b1: optax.Schedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a DeepSpeed configuration.

    Args:
        type: `optimizer.type`, in any case.
        params: `optimizer.params`; what is not there has DeepSpeed's default.
        schedule: from a learning rate of ``params`` to its schedule, as `schedule_by_name` makes it; None for constant
            rates. It is asked for each rate: Muon has two.
        b1: the schedule of the momentum, `momentum_by_name`'s. It takes the place of the first of the betas, and
            `CYCLE_B2` that of the second; an optimizer that DeepSpeed cycles no momentum of (SGD, Adagrad, Muon) keeps
            its own.

    Raises:
        UserError: a type or a parameter that is not offered, a value out of its range.

    >>> import functools
    >>> optimizer = by_name("AdamW", {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True})
    >>> warmup = functools.partial(schedule_by_name, "WarmupLR", {"warmup_num_steps": 100})
    >>> optimizer = by_name("Muon", {"lr": 1e-3, "muon_lr": 0.02}, schedule=warmup)
    >>> by_name("Adamm", {})
    Traceback (most recent call last):
        ...
    zerojax.errors.UserError: optimizer.type is 'Adamm'; nearest: 'Adam'; accepted: Adam, AdamW, Lamb, Lion, Adagrad,
    SGD, Muon
    """
    entry = _named("optimizer.type", type, OPTIMIZERS, REFUSED)
    given = _given("optimizer.params", params, entry)
    settings = {**entry.params, **given}
    rates = {name: lr if schedule is None else schedule(lr) for name, lr in _rates(given, entry).items()}
    for name in "lr", "muon_lr", "adam_lr":
        settings.pop(name, None)
    if entry.make is adam:
        if entry.name == "AdamW":
            settings["adam_w_mode"] = True
        if settings.pop("torch_adam") and settings["adam_w_mode"] and "weight_decay" not in given:
            settings["weight_decay"] = TORCH_ADAMW_DECAY
    if entry.make is muon:
        return muon(rates["muon_lr"], adam_lr=rates["adam_lr"], **settings)
    if b1 is not None and "betas" in settings:
        settings["betas"] = (b1, schedules.CYCLE_B2)
    return entry.make(rates["lr"], **settings)


def learning_rates(type: str, params: Mapping[str, Any]) -> dict[str, float]:
    """The learning rates of a DeepSpeed optimizer by the names of their parameters, defaults filled in.

    Raises:
        UserError: as `by_name`.

    >>> learning_rates("Adam", {}), learning_rates("Muon", {"lr": 0.1, "adam_lr": 1e-4})
    ({'lr': 0.001}, {'muon_lr': 0.1, 'adam_lr': 0.0001})
    """
    entry = _named("optimizer.type", type, OPTIMIZERS, REFUSED)
    return _rates(_given("optimizer.params", params, entry), entry)


def schedule_by_name(type: str, params: Mapping[str, Any], optimizer_lr: float) -> optax.Schedule:
    """The learning rate of a DeepSpeed scheduler.

    Args:
        type: `scheduler.type`, in any case.
        params: `scheduler.params`; what is not there has DeepSpeed's default.
        optimizer_lr: the optimizer's own learning rate, which WarmupLR without a maximum and WarmupCosineLR go up to.

    Raises:
        UserError: a type or a parameter that is not offered, a value out of its range.

    >>> schedule = schedule_by_name("WarmupLR", {"warmup_num_steps": 10}, optimizer_lr=0.5)
    >>> float(schedule(11))
    0.5
    """
    entry, settings = _scheduler(type, params)
    if entry.make is schedules.one_cycle:
        return schedules.one_cycle(**{name: settings[name] for name in (*_CYCLE_LR, *_CYCLE)})
    if "warmup_type" in settings and entry.make is not schedules.warmup_decay_lr:
        settings["optimizer_lr"] = optimizer_lr
    return entry.make(**settings)


def momentum_by_name(type: str, params: Mapping[str, Any]) -> optax.Schedule | None:
    """The momentum of a DeepSpeed scheduler: OneCycle's, unless "cycle_momentum" is false; None for all others.

    Raises:
        UserError: as `schedule_by_name`.

    >>> momentum = momentum_by_name("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 10})
    >>> round(float(momentum(10)), 3)
    0.8
    """
    entry, settings = _scheduler(type, params)
    if entry.make is not schedules.one_cycle or not settings["cycle_momentum"]:
        return None
    return schedules.one_cycle_momentum(**{name: settings[name] for name in (*_CYCLE_MOMENTUM, *_CYCLE)})


def _scheduler(type: str, params: Any) -> tuple[Named, dict[str, Any]]:
    entry = _named("scheduler.type", type, SCHEDULES, {})
    given = _given("scheduler.params", params, entry, start="last_batch_iteration")
    settings = {**entry.params, **given}
    for name, value in settings.items():
        if value is REQUIRED:
            raise UserError(f"scheduler.params of {entry.name} lacks {name!r}, which has no default")
    if "cycle_momentum" in settings:
        checks.flag("cycle_momentum", settings["cycle_momentum"])
    return entry, settings


def _rates(given: Mapping[str, Any], entry: Named) -> dict[str, float]:
    names = ("muon_lr", "adam_lr") if entry.make is muon else ("lr",)
    rates = {name: given.get(name, given.get("lr", entry.params[name])) for name in names}
    for name, lr in rates.items():
        checks.real(name if name in given else "lr", lr)
    return rates


def _named(what: str, type: Any, table: Mapping[str, Named], refused: Mapping[str, str]) -> Named:
    name = type.lower() if isinstance(type, str) else ""
    if name in refused:
        raise UserError(f"{what} is {shown(type)}: {refused[name]}")
    if name not in table:
        names = [entry.name for entry in table.values()]
        raise UserError(f"{what} is {shown(type)}{_nearest(name, names)}; accepted: {', '.join(names)}")
    return table[name]


def _given(what: str, params: Any, entry: Named, start: str | None = None) -> dict[str, Any]:
    """The given parameters that have an effect."""
    if not isinstance(params, Mapping):
        raise UserError(f"{what} is {shown(params)}; accepted: a mapping")
    given = dict(params)
    if start is not None and given.pop(start, -1) != -1:
        raise UserError(f"{what}.{start} is {shown(params[start])}; accepted: -1 (a checkpoint knows where it was)")
    for name in given:
        if name == "max_grad_norm":
            raise UserError(f"{what} has {name!r}; accepted: 'gradient_clipping' at the top of the configuration")
        if name not in entry.params and name not in entry.ignored:
            accepted = ", ".join(entry.params)
            raise UserError(f"{what} of {entry.name} has {name!r}{_nearest(name, entry.params)}; accepted: {accepted}")
    return {name: value for name, value in given.items() if name not in entry.ignored}


def _nearest(name: Any, names: Iterable[str]) -> str:
    lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1)
    return f"; nearest: {lower[near[0]]!r}" if near else ""
