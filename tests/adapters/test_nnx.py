"""NNX modules as their authors wrote them: modes, attributes that are arrays, and what a step cannot take."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from zerojax import UserError, Zero

WIDTH = 32


def run(make, zero=None, steps=1, optimizer=None, read=lambda model, x: model(x)):
    zero = zero or Zero(stage=3, min_shard_size=8)
    state = zero.init(lambda key: make(nnx.Rngs(key)), optimizer or optax.sgd(0.1))
    step = zero.train_step(lambda model, x, rng: jnp.mean(read(model, x) ** 2))
    batch = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return zero, state, metrics, batch


class Frozen(nnx.Module):
    """Layers that their author put in evaluation mode."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.drop(self.norm(x)))


def test_training_keeps_the_mode_that_a_module_was_made_in():
    zero, state, metrics, batch = run(Frozen)
    np.testing.assert_array_equal(state.variables["norm"]["mean"], 0.0)
    plain = Frozen(nnx.Rngs(jax.random.key(0)))
    assert float(metrics["loss"]) == pytest.approx(float(jnp.mean(plain(batch) ** 2)), rel=1e-5)


class Scaled(nnx.Module):
    """An attribute that is an array and no variable."""

    def __init__(self, rngs):
        self.linear, self.scale = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.data(jnp.full(WIDTH, 3.0))

    def __call__(self, x):
        return self.linear(x) * self.scale


def test_an_attribute_that_is_an_array_is_carried_and_not_trained():
    zero, state, metrics, batch = run(Scaled)
    plain = Scaled(nnx.Rngs(jax.random.key(0)))
    assert float(metrics["loss"]) == pytest.approx(float(jnp.mean(plain(batch) ** 2)), rel=1e-5)
    np.testing.assert_array_equal(zero.gather(state).scale, 3.0)
    assert "scale" not in state.params


class Counting(nnx.Module):
    """Counts the positive inputs it sees, which differ from device to device."""

    def __init__(self, rngs):
        self.linear, self.count = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += jnp.sum(x > 0)
        return self.linear(x)


def test_an_integer_that_differs_between_devices_becomes_the_first_ones_everywhere():
    _, state, _, batch = run(Counting)
    copies = {int(shard.data) for shard in state.variables["count"].addressable_shards}
    assert copies == {int((batch[:2] > 0).sum())}


class Assigning(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        self.linear.kernel[...] = self.linear.kernel[...] * 0.5
        return self.linear(x)


def test_a_parameter_that_its_module_assigns_to_is_refused_where_it_is_in_shards():
    with pytest.raises(UserError, match=r"assigns to a parameter that is in shards .*\(32, 32\)"):
        run(Assigning)


def test_a_module_inside_of_a_pytree_is_refused():
    of_kinds = (lambda r: {"net": Scaled(r)}, lambda r: nnx.state(Scaled(r)), lambda r: [nnx.Param(jnp.ones(8))])
    for make in of_kinds:
        with pytest.raises(UserError, match="accepted: one nnx.Module"):
            run(make)


def test_a_state_that_a_step_has_used_up_is_told():
    zero = Zero(stage=1)
    state = zero.init(lambda key: {"w": jnp.ones((64, 32))}, optax.sgd(0.1))
    step = zero.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2))
    batch = jnp.ones((8, 64))
    step(state, batch)
    with pytest.raises(UserError, match="accepted: the state that step returned"):
        step(state, batch)
    with pytest.raises(UserError, match="the first argument is .*; accepted: a state"):
        step(batch, state)
