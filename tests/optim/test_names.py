"""Optimizers and schedulers by the names of a DeepSpeed configuration."""

import functools
import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optim import trees
from zerojax import optim
from zerojax.errors import UserError
from zerojax.optim import names

PARAMS = {"out": {"kernel": jnp.arange(32.0).reshape(4, 8) / 10}, "embed": jnp.ones(3)}
STEPS = trees.gradients(PARAMS, 3)


def same(optimizer: optax.GradientTransformation, other: optax.GradientTransformation) -> None:
    trees.assert_close(trees.trained(optimizer, PARAMS, STEPS), trees.trained(other, PARAMS, STEPS))


def constant(value: float) -> optax.Schedule:
    return optax.constant_schedule(value)


BY_NAME: dict[str, tuple[str, dict[str, Any], Any]] = {
    "Adam is AdamW": ("Adam", {"lr": 0.01, "weight_decay": 0.5}, lambda: optax.adamw(0.01, weight_decay=0.5)),
    "Adam with L2": (
        "Adam",
        {"lr": 0.01, "weight_decay": 0.5, "adam_w_mode": False},
        lambda: optax.chain(optax.add_decayed_weights(0.5), optax.adam(0.01)),
    ),
    "AdamW is AdamW": (
        "AdamW",
        {"adam_w_mode": False, "weight_decay": 0.5},
        lambda: optax.adamw(1e-3, weight_decay=0.5),
    ),
    "in any case": ("ADAMw", {"betas": [0.8, 0.9]}, lambda: optax.adam(1e-3, 0.8, 0.9)),
    "torch's AdamW decays": ("AdamW", {"torch_adam": True}, lambda: optax.adamw(1e-3, weight_decay=0.01)),
    "torch's Adam does not": ("Adam", {"torch_adam": True, "adam_w_mode": False}, lambda: optax.adam(1e-3)),
    "implementations": ("adam", {"fused": True, "foreach": False, "set_grad_none": True}, lambda: optax.adam(1e-3)),
    "Lion": ("Lion", {"weight_decay": 0.5}, lambda: optax.lion(1e-3, 0.9, 0.999, weight_decay=0.5)),
    "SGD": ("SGD", {"momentum": 0.9, "nesterov": True}, lambda: optax.sgd(1e-3, 0.9, nesterov=True)),
    "Lamb": ("lamb", {"max_coeff": 0.5}, lambda: optim.lamb(1e-3, max_coeff=0.5)),
    "Adagrad": ("Adagrad", {"lr_decay": 0.1}, lambda: optim.adagrad(1e-2, lr_decay=0.1)),
    "Muon": ("Muon", {}, lambda: optim.muon(0.02, adam_lr=3e-4)),
    "Muon's lr is that of both": (
        "Muon",
        {"lr": 0.1, "ns_method": "standard"},
        lambda: optim.muon(0.1, ns_method="standard"),
    ),
    "Muon's own rates win": ("Muon", {"lr": 0.1, "adam_lr": 0.2}, lambda: optim.muon(0.1, adam_lr=0.2)),
}


@pytest.mark.parametrize("case", BY_NAME)
def test_optimizer(case: str) -> None:
    type, params, other = BY_NAME[case]
    same(optim.by_name(type, params), other())


@pytest.mark.parametrize("type", [entry.name for entry in names.OPTIMIZERS.values()])
def test_a_schedule_starts_from_the_optimizers_own_rates(type: str) -> None:
    asked = []

    def schedule(lr: float) -> optax.Schedule:
        asked.append(lr)
        return constant(0.5 * lr)

    params = {"muon_lr": 0.1, "adam_lr": 0.02} if type == "Muon" else {"lr": 0.1}
    scheduled = optim.by_name(type, params, schedule=schedule)
    assert asked == list(params.values()) == list(optim.learning_rates(type, params).values())
    same(scheduled, optim.by_name(type, {name: 0.5 * lr for name, lr in params.items()}))


@pytest.mark.parametrize("type", ["Adam", "AdamW", "Lamb", "Lion"])
def test_cycled_momentum_takes_the_place_of_both_betas(type: str) -> None:
    cycled = optim.by_name(type, {"betas": [0.5, 0.6]}, b1=constant(0.8))
    same(cycled, optim.by_name(type, {"betas": [0.8, 0.99]}))


@pytest.mark.parametrize("type", ["SGD", "Adagrad", "Muon"])
def test_what_deepspeed_cycles_no_momentum_of_keeps_its_own(type: str) -> None:
    same(optim.by_name(type, {}, b1=constant(0.8)), optim.by_name(type, {}))


def test_one_cycle_as_a_configuration_has_it() -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2, "last_batch_iteration": -1}
    schedule = functools.partial(optim.schedule_by_name, "onecycle", params)
    optimizer = optim.by_name("Adam", {}, schedule=schedule, b1=optim.momentum_by_name("OneCycle", params))
    rate = optim.one_cycle(0.01, 0.1, cycle_first_step_size=2)
    momentum = optim.one_cycle_momentum(cycle_first_step_size=2)
    same(optimizer, optim.adamw(rate, (momentum, 0.99)))


def test_only_one_cycle_has_a_momentum() -> None:
    cycle = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}
    assert optim.momentum_by_name("OneCycle", cycle) is not None
    assert optim.momentum_by_name("OneCycle", {**cycle, "cycle_momentum": False}) is None
    assert optim.momentum_by_name("WarmupLR", {}) is None


def test_defaults_of_schedulers_follow_the_optimizer_where_deepspeeds_do() -> None:
    at_the_end = lambda type, **params: float(optim.schedule_by_name(type, params, 0.5)(1001))
    assert at_the_end("WarmupLR") == 0.5
    assert at_the_end("WarmupDecayLR", total_num_steps=2000) == np.float32(0.001)
    assert at_the_end("LRRangeTest") == pytest.approx(0.001 * (1 + 1001 / 2000))
    assert float(optim.schedule_by_name("WarmupCosineLR", {"total_num_steps": 2000}, 0.5)(1000)) == pytest.approx(0.5)


@pytest.mark.parametrize("table", [names.OPTIMIZERS, names.SCHEDULES], ids=["optimizers", "schedulers"])
def test_the_defaults_in_the_tables_are_those_of_the_functions(table: Any) -> None:
    renamed = {"lr": "learning_rate", "muon_lr": "learning_rate"}
    elsewhere = {"torch_adam", "cycle_momentum"}
    for entry in table.values():
        signature = {
            name: p
            for make in (entry.make, optim.one_cycle_momentum if entry.name == "OneCycle" else entry.make)
            for name, p in inspect.signature(make).parameters.items()
        }
        for name, default in entry.params.items():
            if name in elsewhere:
                continue
            parameter = signature[renamed.get(name, name)]
            if parameter.default is inspect.Parameter.empty:
                assert default is names.REQUIRED or name in ("lr", "muon_lr")
            elif name != "adam_lr":
                assert parameter.default == default, (entry.name, name)


OPTIMIZER_ERRORS = {
    "optimizer.type is 'Adamm'; nearest: 'Adam'; accepted: Adam, AdamW, Lamb, Lion, Adagrad, SGD, Muon": ("Adamm", {}),
    "optimizer.type is None; accepted: Adam, ": (None, {}),
    "optimizer.type is 'OneBitAdam': it compresses what replicas send each other, .* use Adam": ("OneBitAdam", {}),
    "optimizer.type is 'ZeroOneAdam': it compresses what replicas send each other, .* use Adam": ("ZeroOneAdam", {}),
    "optimizer.type is 'OneBitLamb': it compresses what replicas send each other, .* use Lamb": ("OneBitLamb", {}),
    "optimizer.type is 'MuSGD': its learning rates follow the width .* use SGD": ("MuSGD", {}),
    "optimizer.params of AdamW has 'weight_deacy'; nearest: 'weight_decay'; accepted: lr, betas, ": (
        "adamw",
        {"weight_deacy": 0.1},
    ),
    "optimizer.params of SGD has 'betas'; .*accepted: lr, momentum": ("SGD", {"betas": [0.9, 0.99]}),
    "optimizer.params has 'max_grad_norm'; accepted: 'gradient_clipping'": ("Lamb", {"max_grad_norm": 1.0}),
    "optimizer.params is None; accepted: a mapping": ("Adam", None),
    "lr is 'auto'; accepted: a number of at least 0": ("Adam", {"lr": "auto"}),
    "muon_lr is -1; accepted: a number of at least 0": ("Muon", {"muon_lr": -1}),
    r"betas is \[0.9\]; accepted: a pair of numbers": ("Adam", {"betas": [0.9]}),
    "bias_correction is 'yes'; accepted: True or False": ("Adam", {"bias_correction": "yes"}),
}


@pytest.mark.parametrize("message", OPTIMIZER_ERRORS)
def test_bad_optimizer(message: str) -> None:
    with pytest.raises(UserError, match=message):
        optim.by_name(*OPTIMIZER_ERRORS[message])


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}
SCHEDULER_ERRORS: dict[str, tuple[Any, Any]] = {
    "scheduler.type is 'WarmupLr2'; nearest: 'WarmupLR'; accepted: WarmupLR, ": ("WarmupLr2", {}),
    "scheduler.type is 'CosineAnnealingLR'.*; accepted: WarmupLR, ": ("CosineAnnealingLR", {}),
    "scheduler.params of WarmupLR has 'warmup_steps'; nearest: 'warmup_num_steps'": ("WarmupLR", {"warmup_steps": 5}),
    "scheduler.params of WarmupDecayLR lacks 'total_num_steps', which has no default": ("WarmupDecayLR", {}),
    "scheduler.params of OneCycle lacks 'cycle_min_lr', which has no default": ("OneCycle", {"cycle_max_lr": 1.0}),
    "scheduler.params.last_batch_iteration is 7; accepted: -1": ("WarmupLR", {"last_batch_iteration": 7}),
    "cycle_momentum is 1; accepted: True or False": ("OneCycle", {**CYCLE, "cycle_momentum": 1}),
    "scheduler.params is \\[\\]; accepted: a mapping": ("WarmupLR", []),
}


@pytest.mark.parametrize("message", SCHEDULER_ERRORS)
def test_bad_scheduler(message: str) -> None:
    with pytest.raises(UserError, match=message):
        optim.schedule_by_name(*SCHEDULER_ERRORS[message], 0.1)
    with pytest.raises(UserError, match=message):
        optim.momentum_by_name(*SCHEDULER_ERRORS[message])
