"""Bytes per device: the state between steps, its birth, and what a step holds beside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import Zero

ROWS, COLUMNS, DEPTH = 256, 512, 6
MATRICES, VECTORS = DEPTH * ROWS * COLUMNS * 2, 2 * ROWS
P = MATRICES + VECTORS


def optimizer():
    return optax.adamw(optax.linear_schedule(1e-3, 0.0, 10))


def make_model(key):
    normal = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) / 20
    return {
        "layers": {"up": normal(0, DEPTH, ROWS, COLUMNS), "down": normal(1, DEPTH, COLUMNS, ROWS)},
        "scale": jnp.ones((ROWS,)),
        "shift": jnp.zeros((ROWS,)),
    }


@jax.checkpoint
@zerojax.block
def layer(weights, h):
    return h + jnp.tanh(h @ weights["up"]) @ weights["down"]


def loss_fn(params, batch, rng):
    h, _ = jax.lax.scan(lambda h, weights: (layer(weights, h), None), batch, params["layers"])
    return jnp.mean(jnp.square(h * params["scale"] + params["shift"]))


def device_bytes(tree):
    """The most bytes that one device holds of the arrays of `tree`."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


@functools.cache
def report(stage):
    zero = Zero(stage=stage)
    state = zero.abstract_state(make_model, optimizer())
    return zero.report(state, zero.train_step(loss_fn), jax.ShapeDtypeStruct((16, ROWS), jnp.float32))


@functools.cache
def made(stage, replica=1):
    zero = Zero(stage=stage, mesh=zerojax.make_mesh(replica=replica))
    return zero, zero.init(make_model, optimizer(), seed=3)


@pytest.mark.parametrize(("stage", "replica"), [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2)])
def test_the_state_is_as_large_as_zero_says(stage, replica):
    """16P at stage 0, in N parts from stage 1 on, less the gradients and copies that live within the step: 12P."""
    _, state = made(stage, replica)
    shards = 8 // replica if stage else 1
    assert device_bytes(state.params) == pytest.approx(4 * P / shards, rel=0.01)
    assert device_bytes(state.opt_state) == pytest.approx(8 * P / shards, rel=0.01)
    assert device_bytes(state) == pytest.approx(12 * P / shards, rel=0.01)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_report_says_the_same(stage):
    shards = 8 if stage else 1
    found = report(stage)
    assert found.n_parameters == P
    for figure, expected in ((found.parameters, 4 * P), (found.optimizer, 8 * P), (found.state, 12 * P)):
        assert figure.bytes == pytest.approx(expected / shards, rel=0.01)
        assert figure.expected == pytest.approx(expected / shards, rel=0.01)
    # The compiled step takes the state, the rows of one device and nothing else.
    assert found.arguments == pytest.approx(12 * P / shards + 16 / 8 * ROWS * 4, rel=0.01)


def test_at_stage_2_whole_gradients_are_never_there_together():
    """They are the most of what stages 1 and 2 differ in: a layer's is there with its shards only."""
    assert report(1).temporaries - report(2).temporaries > 0.7 * 4 * P


def test_at_stage_3_nor_are_whole_parameters():
    assert report(2).temporaries - report(3).temporaries > 0.7 * 4 * P
    assert report(3).temporaries < 4 * P


@pytest.mark.parametrize("stage", [1, 3])
def test_no_device_holds_a_whole_large_leaf_when_the_state_is_made(stage):
    """Random numbers, zeros of the optimizer and padding are all made by the device that keeps them."""
    build = Zero(stage=stage)._init(make_model, optimizer())
    memory = build.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes == pytest.approx(12 * P / 8, rel=0.01)
    assert memory.temp_size_in_bytes < 4 * DEPTH * ROWS * COLUMNS


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_leaf_is_born_where_it_is_planned(stage):
    zero, state = made(stage)
    planned = zero.abstract_state(make_model, optimizer())
    assert jax.tree.structure(state.params) == jax.tree.structure(planned.params)
    for plan, leaf in zip(jax.tree.leaves(planned), jax.tree.leaves(state), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (plan.shape, plan.dtype, plan.sharding)
        assert leaf.sharding.device_set == set(jax.devices())  # one on a single device would compile the step twice
        assert not leaf.weak_type
    cut = [leaf for leaf in jax.tree.leaves(state) if not leaf.sharding.is_fully_replicated]
    assert len(cut) == (0 if stage == 0 else 3 * 2)


def test_a_seed_makes_the_same_model_at_every_stage_and_on_every_mesh():
    expected = jax.device_get(jax.jit(make_model)(jax.random.key(3)))
    on_three = Zero(stage=1, mesh=zerojax.make_mesh(devices=jax.devices()[:3]))
    for zero, state in (made(0), made(3), (on_three, on_three.init(make_model, optax.sgd(0.1), seed=3))):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(zero.gather(state)), expected)
