"""fp16: a step whose gradients overflow changes nothing but the loss scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.engine import tiny


class Net(nnx.Module):
    """A normalisation over the batch, whose statistics an infinity would spoil."""

    def __init__(self, rngs):
        self.up = nnx.Linear(tiny.DIM, tiny.HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(tiny.HIDDEN, rngs=rngs)
        self.down = nnx.Linear(tiny.HIDDEN, 1, rngs=rngs)

    def __call__(self, batch):
        y = self.down(jnp.tanh(self.norm(self.up(batch["x"]))))
        return jnp.mean(jnp.square(y[:, 0].astype(jnp.float32) - batch["y"]))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A function that gives the engine as it was at its start: a scale of 16 that halves at once, down to 4."""
    directory = tmp_path_factory.mktemp("start")
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 4}
    config = tiny.config(2, 4, fp16=fp16)
    engine = tiny.start(config, model=lambda key: Net(nnx.Rngs(key)), loss_fn=None)
    engine.save_checkpoint(directory)

    def fresh():
        engine.load_checkpoint(directory)
        return engine

    return fresh


GOOD = tiny.batches(4)
BAD = [{**batch, "x": batch["x"].copy()} for batch in GOOD]
BAD[1]["x"][5, 0] = np.inf  # on one device of eight, in one micro-batch of four


def kept(engine):
    """What a skipped step leaves as it was."""
    state = engine.state
    return jax.device_get((state.step, state.params, state.opt_state, state.variables, state.rng)), engine.get_lr()


def test_an_overflow_on_one_device_skips_the_step_and_the_run_recovers(fresh):
    engine = fresh()
    tiny.train(engine, GOOD)
    assert engine.was_step_applied() and engine.loss_scale == 16
    before = kept(engine)
    losses = tiny.train(engine, BAD)
    assert not engine.was_step_applied()
    tiny.assert_same(kept(engine), before)
    assert [np.isfinite(loss) for loss in losses] == [True, False, True, True]
    assert (engine.skipped_steps, engine.global_steps, engine.global_samples) == (1, 2, 64)
    assert (engine.loss_scale, engine.lr_scheduler.last_batch_iteration) == (8, 0)
    assert not np.isfinite(engine.get_global_grad_norm())
    for scale in 8, 8, 16:  # doubles after two clean steps, of which that after the overflow is none
        assert all(map(np.isfinite, tiny.train(engine, GOOD)))
        assert engine.was_step_applied() and engine.loss_scale == scale
    assert (engine.skipped_steps, engine.global_steps, int(engine.state.step)) == (1, 5, 4)
    assert engine.get_lr() == [pytest.approx(tiny.RATES[4])]
    assert all(np.isfinite(x).all() for x in engine.module_state_dict().values())


def test_the_norm_is_without_the_scale(fresh):
    engine = fresh()
    tiny.train(engine, GOOD)
    norm, scale = engine.get_global_grad_norm(), engine.loss_scale
    engine = fresh()
    for _ in range(2):
        tiny.train(engine, BAD)
    assert engine.loss_scale == scale / 4
    tiny.train(engine, GOOD)
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=2e-3)


def test_a_run_that_overflows_at_the_smallest_scale_ends(fresh):
    engine = fresh()
    for scale in 8, 4:
        tiny.train(engine, BAD)
        assert engine.loss_scale == scale
    tiny.train(engine, BAD)
    with pytest.raises(zerojax.errors.RunError, match="step 3 overflowed at the smallest loss scale, 4: ") as told:
        engine.train_batch(iter(GOOD))
    assert "\n" not in str(told.value)
    assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (4, 3, 16)


def test_a_16_bit_model_is_in_the_dtype_that_it_computes_in(fresh, tmp_path):
    from safetensors.numpy import load_file

    engine = fresh()
    engine.save_16bit_model(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    kernel = engine.module_state_dict()["up/kernel"]
    np.testing.assert_array_equal(found["up.kernel"], kernel.astype(np.float16))
    assert {name for name in found if name.startswith("norm")} == {"norm.scale", "norm.bias", "norm.mean", "norm.var"}


def test_a_loaded_count_of_skipped_steps_is_no_overflow(fresh, tmp_path):
    engine = fresh()
    for batches in GOOD, BAD:
        tiny.train(engine, batches)
    engine.save_checkpoint(tmp_path)
    assert fresh().skipped_steps == 0
    for batches, applied, skipped in (GOOD, True, 1), (BAD, False, 2):
        engine.load_checkpoint(tmp_path)
        assert (engine.skipped_steps, engine.loss_scale, engine.was_step_applied()) == (1, 8, False)
        tiny.train(engine, batches)
        assert (engine.was_step_applied(), engine.skipped_steps) == (applied, skipped)


def test_an_overflow_that_hysteresis_allows_does_not_end_a_run():
    """At the smallest scale from the start, the first of two overflows is free."""
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 2}
    engine = tiny.start(tiny.config(fp16=fp16), devices=2)
    batch = tiny.batches(1, rows=2)[0]
    bad = {**batch, "x": np.full_like(batch["x"], np.inf)}
    for _ in range(2):
        tiny.train(engine, [bad])
    with pytest.raises(zerojax.errors.RunError, match="step 2 overflowed"):
        tiny.train(engine, [batch])
