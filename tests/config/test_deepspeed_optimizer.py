"""Optimizers and schedules of DeepSpeed's configuration: their complaints, and the same as calls of functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.config.deepspeed import make_optimizer, make_schedule, resolve
from zerojax.config.deepspeed.calls import Call, optimizer_call
from zerojax.config.deepspeed.resolved import Named
from zerojax.errors import UserError

ADAM = {"type": "Adam", "params": {"lr": 0.1}}


def complaint(**config) -> str:
    with pytest.raises(UserError) as error:
        resolve({"train_batch_size": 1, **config}, world_size=1)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "config, told",
    [
        ({"optimizer": {"type": "Adamm"}}, "config: optimizer.type is 'Adamm'"),
        ({"optimizer": {"type": "Adam", "params": {"beta": 0.9}}}, "config: optimizer.params of Adam has 'beta'"),
        ({"optimizer": {"type": "Adam", "params": {"eps": -1}}}, "config: optimizer.params.eps is -1"),
        ({"optimizer": {"type": "Lamb", "params": {"betas": [0.9]}}}, "config: optimizer.params.betas is [0.9]"),
        ({"scheduler": {"type": "WarmUp"}}, "config: scheduler.type is 'WarmUp'"),
        (
            {"optimizer": ADAM, "scheduler": {"type": "WarmupDecayLR"}},
            "config: scheduler.params of WarmupDecayLR lac",
        ),
        (
            {"optimizer": ADAM, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            "config: scheduler.params.warmup_num_steps is 0",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_min_mom": 2}}},
            "config: scheduler.params.cycle_min_mom is 2",
        ),
    ],
)
def test_complaints_name_the_section_and_the_parameter(config, told):
    assert complaint(**config).startswith(told)


def test_the_configuration_of_the_golden_runs_resolves():
    optimizer = {"lr": 0.005, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.01, "torch_adam": True}
    schedule = {"warmup_min_lr": 0.0001, "warmup_max_lr": 0.005, "warmup_num_steps": 5, "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupLR", "params": schedule},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 1000000000,
        "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 5, "hysteresis": 1},
    }
    resolved = resolve(config, world_size=2)
    assert (resolved.train_batch_size, resolved.steps_per_print, resolved.notes) == (16, 1_000_000_000, ())
    assert (resolved.optimizer.params, resolved.scheduler.params) == (optimizer, schedule)
    # The first two updates of DeepSpeed's run have the smaller rate, the next is at 2/5 - 1/5 of the way.
    rates = [float(make_schedule("", resolved.scheduler, 0.005)(count)) for count in (0, 1, 2, 6)]
    np.testing.assert_allclose(rates, [0.0001, 0.0001, 0.0001 + 0.2 * 0.0049, 0.005], rtol=1e-6)


ONE_CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "cycle_max_mom": 0.85}
CASES = {
    "adam": ("Adam", {"lr": 0.1, "weight_decay": 0.1, "fused": True}, None, {}),
    "adam default": ("adam", {}, None, {}),
    "adam l2": ("Adam", {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": False}, None, {}),
    "adamw overrules": ("AdamW", {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": False}, None, {}),
    "torch adamw": ("AdamW", {"lr": 0.1, "torch_adam": True}, None, {}),
    "torch adam": ("Adam", {"lr": 0.1, "torch_adam": True, "adam_w_mode": False}, None, {}),
    "lamb": ("Lamb", {"lr": 0.1, "max_coeff": 0.3, "min_coeff": 0.2}, None, {}),
    "lion": ("Lion", {"lr": 0.1, "betas": [0.5, 0.6]}, None, {}),
    "adagrad": ("Adagrad", {"lr": 0.1}, None, {}),
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, None, {}),
    "muon": ("Muon", {"lr": 0.1, "weight_decay": 0.1}, None, {}),
    "muon two rates": ("Muon", {"muon_lr": 0.1, "adam_lr": 0.01}, "WarmupLR", {"warmup_num_steps": 3}),
    "muon one maximum": ("Muon", {}, "WarmupLR", {"warmup_num_steps": 3, "warmup_max_lr": 0.1}),
    "warmup": ("Adam", {"lr": 0.1}, "WarmupLR", {"warmup_num_steps": 3, "warmup_type": "linear"}),
    "decay": ("Adam", {"lr": 0.1}, "WarmupDecayLR", {"warmup_num_steps": 2, "total_num_steps": 4}),
    "cosine": ("Lion", {"lr": 0.1}, "WarmupCosineLR", {"warmup_num_steps": 2, "total_num_steps": 4}),
    "cycle": ("Adam", {"lr": 0.1, "betas": [0.1, 0.2]}, "OneCycle", ONE_CYCLE),
    "cycle without momentum": ("Adam", {"betas": [0.1, 0.2]}, "OneCycle", {**ONE_CYCLE, "cycle_momentum": False}),
    "cycle of no momentum": ("SGD", {"lr": 0.1, "momentum": 0.5}, "OneCycle", ONE_CYCLE),
    "range": ("SGD", {"lr": 0.1}, "LRRangeTest", {"lr_range_test_step_size": 2, "last_batch_iteration": -1}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_functions_behind_the_names_make_the_same_updates(case):
    optimizer_type, params, scheduler_type, schedule = CASES[case]
    optimizer = Named(optimizer_type, params)
    scheduler = None if scheduler_type is None else Named(scheduler_type, schedule)
    called = evaluated(optimizer_call(optimizer, scheduler))
    for ours, theirs in zip(path_of(called), path_of(make_optimizer("", optimizer, scheduler)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def evaluated(value):
    if isinstance(value, Call):
        return value.function(**{name: evaluated(argument) for name, argument in value.arguments.items()})
    return tuple(map(evaluated, value)) if isinstance(value, tuple) else value


def path_of(optimizer: optax.GradientTransformation, steps: int = 5):
    """The parameters after each step down one and the same sequence of gradients."""
    keys = jax.random.split(jax.random.key(0), steps + 1)
    params = {"kernel": jax.random.normal(keys[0], (4, 3)), "bias": jnp.ones(3)}
    state = optimizer.init(params)
    for key in keys[1:]:
        gradients = jax.tree.map(lambda p, key=key: jax.random.normal(key, p.shape), params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        yield np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])
