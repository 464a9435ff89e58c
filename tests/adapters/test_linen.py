"""Linen modules as their authors wrote them: lifted transformations, collections, boxes of their own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.adapters.one_device import assert_equal_runs, entered
from zerojax import Zero

WIDTH, ROWS, DEPTH = 16, 32, 3
BATCHES = [np.random.default_rng(i).normal(1, 2, size=(ROWS, WIDTH)).astype(np.float32) for i in range(3)]


class Layer(nn.Module):
    normed: bool = False

    @nn.compact
    def __call__(self, h, _=None):
        y = nn.Dense(WIDTH, use_bias=not self.normed)(h)
        y = nn.BatchNorm(use_running_average=False, momentum=0.9)(y) if self.normed else y
        return h + jnp.tanh(y), None


class Normed(nn.Module):
    @nn.compact
    def __call__(self, h):
        return Layer(normed=True)(h)[0]


class Scanned(nn.Module):
    """Layers with statistics of their own, stacked by nn.scan."""

    @nn.compact
    def __call__(self, h):
        axes = {"params": 0, "batch_stats": 0}
        return nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=DEPTH)(normed=True)(h, None)[0]


class Ensemble(nn.Module):
    """Members side by side by nn.vmap, each with its own parameters."""

    @nn.compact
    def __call__(self, h):
        members = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=4)
        return members(WIDTH)(h).mean(0)


class PerRow(nn.Module):
    """One set of parameters for every row, by nn.vmap over the batch."""

    @nn.compact
    def __call__(self, h):
        return nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})(WIDTH)(h)


class Boxed(nn.Module):
    """Parameters in boxes of the author's own."""

    @nn.compact
    def __call__(self, h):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(WIDTH, kernel_init=init)(h)


class Tied(nn.Module):
    """One table at both ends, and a count in a collection of its own."""

    @nn.compact
    def __call__(self, h):
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        embed = nn.Embed(8, WIDTH)
        return h + embed(jnp.argmax(embed.attend(h), -1))


class Raw(nn.Module):
    """Looks a parameter up by itself."""

    @nn.compact
    def __call__(self, h):
        y = nn.Dense(WIDTH, name="dense")(h)
        return y + 0.1 * self.variables["params"]["dense"]["kernel"].sum(0)


def case(net, *mutable):
    def loss(variables, x, rng):
        y, updates = net.apply(variables, x, mutable=list(mutable)) if mutable else (net.apply(variables, x), {})
        return jnp.mean(jnp.square(y - jnp.roll(x, 1, -1))), updates

    return lambda key: net.init(key, BATCHES[0]), loss


@pytest.mark.parametrize(
    ("net", "mutable"),
    [
        (Normed(), ["batch_stats"]),
        (Scanned(), ["batch_stats"]),
        (Ensemble(), []),
        (PerRow(), []),
        (Boxed(), []),
        (Tied(), ["counts"]),
        (Raw(), []),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_in_shards_as_on_one_device(net, mutable):
    make, loss = case(net, *mutable)
    state, step = assert_equal_runs(make, loss, BATCHES, micro_batches=2)
    assert not entered(state, step)


def test_the_gathered_variables_are_as_they_were_made():
    make, loss = case(Boxed())
    zero = Zero(stage=3, min_shard_size=8)
    state = zero.init(make, optax.sgd(0.1))
    model = zero.gather(state)
    plain = make(jax.random.key(0))
    assert jax.tree.structure(model) == jax.tree.structure(plain)
    assert isinstance(model["params"]["Dense_0"]["kernel"], nn.Partitioned)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), model, plain)


def test_a_collection_that_is_not_given_back_stays():
    make, loss = case(Tied(), "counts")
    zero = Zero(stage=3, min_shard_size=8, micro_batches=2)
    state = zero.init(make, optax.sgd(0.1))
    before = int(state.variables["counts"]["calls"])
    state, _ = zero.train_step(loss)(state, BATCHES[0])
    assert int(state.variables["counts"]["calls"]) == before + 2
    forgets = lambda variables, x, rng: loss(variables, x, rng)[0]
    state, _ = zero.train_step(forgets)(state, BATCHES[0])
    assert int(state.variables["counts"]["calls"]) == before + 2


def test_a_checkpoint_of_linen_variables(tmp_path):
    make, loss = case(Normed(), "batch_stats")
    zero, optimizer = Zero(stage=3, min_shard_size=8), optax.adamw(1e-2)
    state = zero.init(make, optimizer)
    state, _ = zero.train_step(loss)(state, BATCHES[0])
    zerojax.save(tmp_path / "checkpoint", state)
    restored = zerojax.restore(tmp_path / "checkpoint", Zero(stage=1), make, optimizer)
    jax.tree.map(np.testing.assert_array_equal, zero.gather(state), Zero(stage=1).gather(restored))
