"""Equinox modules as their authors wrote them: state, shared layers, containers, functions as fields."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.adapters.one_device import assert_equal_runs, entered
from zerojax import UserError, Zero

WIDTH, ROWS = 16, 32
BATCHES = [np.random.default_rng(i).normal(1, 2, size=(ROWS, WIDTH)).astype(np.float32) for i in range(3)]


class Fields(eqx.Module):
    """Arrays in a dict and in a tuple, a function, a number."""

    arrays: dict
    pair: tuple
    activation: Callable
    factor: float
    steps: int = eqx.field(static=True)

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.arrays = {"in": jax.random.normal(a, (WIDTH, WIDTH)) / 4}
        self.pair = (jax.random.normal(b, (WIDTH, WIDTH)) / 4, jnp.zeros(WIDTH))
        self.activation, self.factor, self.steps = jax.nn.tanh, 0.5, 2

    def __call__(self, x):
        for _ in range(self.steps):
            x = self.activation(self.arrays["in"] @ x) * self.factor
        kernel, bias = self.pair
        return kernel @ x + bias


class Convolved(eqx.Module):
    """A layer that hands its weights to jax.lax directly."""

    conv: eqx.nn.Conv1d
    drop: eqx.nn.Dropout

    def __init__(self, key):
        self.conv, self.drop = eqx.nn.Conv1d(1, 4, 3, padding=1, key=key), eqx.nn.Dropout(0.5, inference=True)

    def __call__(self, x):
        return self.drop(self.conv(x[None])).mean(0)


class Ensemble(eqx.Module):
    members: eqx.nn.Linear

    def __init__(self, key):
        self.members = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(jax.random.split(key, 4))

    def __call__(self, x):
        return eqx.filter_vmap(lambda member, x: member(x), in_axes=(eqx.if_array(0), None))(self.members, x).mean(0)


class Shared(eqx.Module):
    """An embedding whose table is the head's weight: one parameter."""

    layers: eqx.nn.Shared

    def __init__(self, key):
        a, b = jax.random.split(key)
        pair = (eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=a), eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=b))
        self.layers = eqx.nn.Shared(pair, where=lambda p: p[1].weight, get=lambda p: p[0].weight)

    def __call__(self, x):
        first, second = self.layers()
        return second(jnp.tanh(first(x)))


@pytest.mark.parametrize("kind", [Fields, Convolved, Ensemble])
def test_in_shards_as_on_one_device(kind):
    loss = lambda model, x, rng: jnp.mean(jnp.square(jax.vmap(model)(x) - jnp.roll(x, 1, -1)))
    state, step = assert_equal_runs(kind, loss, BATCHES, micro_batches=2)
    assert not entered(state, step)


def test_shared_weights_are_one_parameter():
    loss = lambda model, x, rng: jnp.mean(jnp.square(jax.vmap(model)(x) - jnp.roll(x, 1, -1)))
    state, _ = assert_equal_runs(Shared, loss, BATCHES)
    assert sum(x.size for x in jax.tree.leaves(state.params)) == WIDTH * WIDTH


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="rows", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def normed_loss(pair, x, rng):
    model, state = pair
    y, state = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(x, state)
    return jnp.mean(jnp.square(y - x)), {"state": state}


def test_batch_norm_s_state_is_carried_and_global():
    make = eqx.nn.make_with_state(Normed)
    state, _ = assert_equal_runs(make, normed_loss, BATCHES, micro_batches=2)
    assert sum(x.size for x in jax.tree.leaves(state.params)) == WIDTH * WIDTH + 3 * WIDTH
    before = jax.tree.leaves(Zero(stage=3).init(make, optax.sgd(0.1)).variables)
    assert any(not np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(state.variables), strict=True))


def test_two_states_are_refused():
    def loss(pair, x, rng):
        value, aux = normed_loss(pair, x, rng)
        return value, {**aux, "again": aux["state"]}

    zero = Zero(stage=3, min_shard_size=8)
    state = zero.init(eqx.nn.make_with_state(Normed), optax.sgd(0.1))
    with pytest.raises(UserError, match=r"eqx.nn.State under \['again', 'state'\]; accepted: one"):
        zero.train_step(loss)(state, BATCHES[0])


def test_evaluation_is_in_inference_mode():
    make = eqx.nn.make_with_state(Normed)
    zero = Zero(stage=3, min_shard_size=8)
    state = zero.init(make, optax.sgd(0.1))
    state, _ = zero.train_step(normed_loss)(state, BATCHES[0])
    variables = jax.device_get(jax.tree.leaves(state.variables))
    first = float(zero.eval_step(normed_loss)(state, BATCHES[1])["loss"])
    assert np.isfinite(first) and first == float(zero.eval_step(normed_loss)(state, BATCHES[1])["loss"])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state.variables), variables)
