"""Dynamic loss scaling, sequence by sequence as DeepSpeed's ZeRO scaler, and what a skipped step leaves."""

import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import LossScale, Precision, UserError, Zero
from zerojax.errors import RunError
from zerojax.zero.loss_scale import after_step, check_not_exhausted, initial_state, scale_of

CASES = json.loads((Path(__file__).parents[1] / "golden" / "loss_scaler.json").read_text())["cases"]
PLANTED = np.float32(3e38)  # infinite in float16


def policy_of(settings):
    return LossScale(
        window=settings["scale_window"],
        hysteresis=settings["delayed_shift"],
        consecutive_hysteresis=settings["consecutive_hysteresis"],
        minimum=float(settings["min_scale"]),
    )


name_of = lambda case: case["pattern"]
stepped = jax.jit(after_step, static_argnums=0)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_sequence_of_overflows(case):
    policy = policy_of(case["settings"])
    state = initial_state()._replace(scale=jnp.float32(case["settings"]["init_scale"]))
    run = jax.jit(lambda state, overflows: jax.lax.scan(lambda s, o: (after_step(policy, s, o),) * 2, state, overflows))
    steps = len(case["scale_after"])  # up to the call that raised, if one did
    _, history = run(state, np.array(case["overflow"][:steps], bool))
    np.testing.assert_array_equal(history.scale, case["scale_after"])
    np.testing.assert_array_equal(history.hysteresis, case["hysteresis_after"])
    np.testing.assert_array_equal(history.skipped, np.cumsum(case["overflow"][:steps]))


@pytest.mark.parametrize("case", [case for case in CASES if case["settings"]["raise_error_at_min_scale"]], ids=name_of)
def test_the_overflow_that_ends_a_run(case):
    policy = policy_of(case["settings"])
    states = [initial_state()._replace(scale=jnp.float32(case["settings"]["init_scale"]))]
    calls = len(case["scale_after"]) + bool(case["raised"])
    for overflow in case["overflow"][:calls]:
        states.append(stepped(policy, states[-1], np.array(overflow, bool)))
    ended = []
    for call, (before, after) in enumerate(itertools.pairwise(jax.device_get(states))):
        try:
            check_not_exhausted(policy, before, after)
        except RunError as error:
            assert f"step {call + 1} overflowed at the smallest loss scale" in str(error)
            ended.append(call)
    assert ended == ([case["raised"]["at_call"]] if case["raised"] else [])


def test_a_static_scale_ends_no_run():
    state = initial_state()
    after = after_step(LossScale(static=1.0), state, jnp.array(True))
    check_not_exhausted(LossScale(static=1.0), state, after)
    check_not_exhausted(None, state, after)


def test_a_static_scale_stays_and_no_policy_is_one():
    state = initial_state()
    for overflow in (True, False, True):
        state = after_step(LossScale(static=138.0), state, jnp.array(overflow))
        assert float(scale_of(LossScale(static=138.0), state)) == 138.0
    assert int(state.skipped) == 2 and float(scale_of(None, state)) == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("static", 0.0),
        ("static", float("inf")),
        ("static", True),
        ("initial_power", -1),
        ("window", 0),
        ("minimum", 0.0),
    ],
)
def test_scales_that_are_refused(field, value):
    with pytest.raises(UserError, match=f"LossScale.{field} is {value!r}; accepted: "):
        LossScale(**{field: value})


def test_a_minimum_above_the_beginning_is_refused():
    """An overflow would raise the scale to it."""
    with pytest.raises(UserError, match=r"LossScale.minimum is 1024, and the scale begins at 2\*\*1; accepted"):
        LossScale(initial_power=1, minimum=1024)
    assert LossScale(static=2.0, minimum=1024).initial == 2.0


def make_model(key):
    return {"up": jax.random.normal(key, (16, 32)) / 4, "down": jax.random.normal(key, (32, 16)) / 6}


def loss_fn(model, batch, rng):
    x = batch.astype(model["up"].dtype)
    return jnp.mean(jnp.square(jnp.tanh(x @ model["up"]) @ model["down"] - x).astype(jnp.float32))


def weighted(model, batch, rng):
    """Sums over tokens are far beyond fp16: the scale has to be of the mean."""
    return zerojax.Weighted(loss_fn(model, batch, rng) * 1e4, jnp.float32(1e4))


@functools.cache
def trained(stage, precision, loss, micro_batches=4, poisoned=()):
    scaled = Precision(compute="float16", loss_scale=LossScale(initial_power=10, window=2, hysteresis=1))
    precision = scaled if precision == "fp16" else precision
    zero = Zero(stage=stage, micro_batches=micro_batches, precision=precision, min_shard_size=8)
    optimizer = optax.adamw(optax.linear_schedule(0.0, 1e-2, 10), eps=1e-5)
    state = zero.init(make_model, optimizer)
    step, states, history = zero.train_step(loss), [jax.device_get(state)], []
    for i in range(6):
        batch = np.random.default_rng(i).normal(size=(64, 16)).astype(np.float32)
        if i in poisoned:
            batch[8 * 5 + 2] = PLANTED  # on device 5 of 8, in micro-batch 2 of 4
        state, metrics = step(state, batch)
        states.append(jax.device_get(state))
        history.append(jax.device_get(metrics))
    return states, history


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_on_one_device_in_one_micro_batch_changes_nothing(stage):
    states, history = trained(stage, "fp16", loss_fn, poisoned=(1, 2))
    for i in (1, 2):
        before, after = states[i], states[i + 1]
        for field in ("step", "params", "opt_state", "variables", "rng"):
            jax.tree.map(np.testing.assert_array_equal, getattr(before, field), getattr(after, field))
    assert [int(m["skipped"]) for m in history] == [0, 1, 2, 2, 2, 2]
    assert [float(m["loss_scale"]) for m in history] == [1024, 1024, 512, 256, 256, 256]
    assert [int(m["step"]) for m in history] == [1, 1, 1, 2, 3, 4]
    assert np.isfinite([float(m["grad_norm"]) for m in history])[[0, 3, 4, 5]].all()
    assert not np.isfinite(history[1]["grad_norm"])


@pytest.mark.parametrize("loss", [loss_fn, weighted])
@pytest.mark.parametrize("stage", [1, 3])
def test_scaled_gradients_are_those_of_the_loss(stage, loss):
    _, got = trained(stage, "fp16", loss)
    _, want = trained(stage, "fp32", loss)
    for a, b in zip(got, want, strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=5e-3)
        assert float(a["grad_norm"]) == pytest.approx(float(b["grad_norm"]), rel=5e-3)


def test_bf16_steps_are_skipped_where_asked_for():
    skipping = Precision(compute="bfloat16", skip_nonfinite=True)
    poison = lambda model, batch, rng: loss_fn(model, batch, rng) * jnp.where(batch.max() > 1e30, jnp.nan, 1.0)
    states, history = trained(3, skipping, poison, poisoned=(1,))
    assert int(history[-1]["skipped"]) == 1 and float(history[-1]["loss_scale"]) == 1.0
    jax.tree.map(np.testing.assert_array_equal, states[1].params, states[2].params)


def test_a_checkpoint_knows_of_no_policy(tmp_path):
    fp32, fp16 = Zero(stage=3, min_shard_size=8), Zero(stage=1, precision="fp16", min_shard_size=8)
    state = fp32.init(make_model, optax.sgd(0.1))
    state, _ = fp32.train_step(loss_fn)(state, np.ones((8, 16), np.float32))
    zerojax.save(tmp_path / "checkpoint", state)
    state = zerojax.restore(tmp_path / "checkpoint", fp16, make_model, optax.sgd(0.1))
    _, metrics = fp16.train_step(loss_fn)(state, np.ones((8, 16), np.float32))
    assert float(metrics["loss_scale"]) == 2.0**16 and int(metrics["step"]) == 2
