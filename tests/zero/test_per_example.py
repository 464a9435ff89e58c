"""What a recurrent model remembers of each row from step to step is split with the batch."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.adapters.one_device import assert_equal_runs
from zerojax import UserError, Zero

ROWS, LENGTH, WIDTH = 32, 5, 16
WINDOWS = [np.random.default_rng(i).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32) for i in range(4)]


class Memory(nnx.Variable):
    """What is known of each row."""


class NnxRecurrent(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.SimpleCell(WIDTH, WIDTH, rngs=rngs)
        self.memory = Memory(jnp.zeros((ROWS, WIDTH)))

    def __call__(self, x):
        h, outputs = self.memory[...], []
        for t in range(x.shape[1]):
            h, y = self.cell(h, x[:, t])
            outputs.append(y)
        self.memory[...] = jax.lax.stop_gradient(h)
        return jnp.stack(outputs, 1)


class LinenRecurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        memory = self.variable("memory", "h", jnp.zeros, (x.shape[0], WIDTH))
        cell = nn.SimpleCell(WIDTH)
        outputs, h = [], memory.value
        for t in range(x.shape[1]):
            h, y = cell(h, x[:, t])
            outputs.append(y)
        memory.value = jax.lax.stop_gradient(h)
        return jnp.stack(outputs, 1)


def error(y, x):
    return jnp.mean(jnp.square(y[:, :-1] - x[:, 1:]))


def linen_loss(variables, x, rng):
    y, updates = LinenRecurrent().apply(variables, x, mutable=["memory"])
    return error(y, x), updates


CASES = {
    "nnx": (lambda key: NnxRecurrent(nnx.Rngs(key)), lambda model, x, rng: error(model(x), x), Memory),
    "linen": (
        lambda key: LinenRecurrent().init(key, WINDOWS[0]),
        linen_loss,
        lambda path, x: path.startswith("memory"),
    ),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", CASES)
def test_in_shards_as_on_one_device(kind, micro_batches):
    make, loss, chosen = CASES[kind]
    state, _ = assert_equal_runs(make, loss, WINDOWS, micro_batches=micro_batches, per_example=chosen)
    (memory,) = jax.tree.leaves(state.variables)
    assert memory.shape == (ROWS, WIDTH) and memory.sharding.shard_shape(memory.shape) == (ROWS // 8, WIDTH)


def test_every_row_is_its_own(tmp_path):
    """A plain loop over all rows remembers the same, and so does a run that is resumed on other devices."""
    make, loss, chosen = CASES["nnx"]
    zero = Zero(stage=3, min_shard_size=8, micro_batches=2, per_example=chosen)
    state, step = zero.init(make, optax.sgd(0.0)), zero.train_step(loss)
    model = make(jax.random.key(0))
    for window in WINDOWS[:3]:
        state, _ = step(state, window)
        model(window)
    np.testing.assert_allclose(state.variables["memory"], model.memory[...], rtol=1e-5, atol=1e-6)
    zerojax.save(tmp_path / "checkpoint", state)
    other = Zero(stage=1, mesh=zerojax.make_mesh(data=4, devices=jax.devices()[:4]), per_example=chosen)
    state = zerojax.restore(tmp_path / "checkpoint", other, make, optax.sgd(0.0))
    state, _ = other.train_step(loss)(state, WINDOWS[3])
    model(WINDOWS[3])
    np.testing.assert_allclose(state.variables["memory"], model.memory[...], rtol=1e-5, atol=1e-6)


def test_rows_that_do_not_divide_are_refused():
    make, loss, _ = CASES["nnx"]
    with pytest.raises(
        UserError, match=r"per_example chooses 'variables/memory' of shape \(32, 16\); .* 24 \(devices x"
    ):
        Zero(micro_batches=3, per_example=Memory).init(make, optax.sgd(0.1))
