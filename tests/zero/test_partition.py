"""Where a leaf is cut: the rules, and what padding costs and keeps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.zero.partition import WHOLE, Leaf, cut_of

SHAPES = st.lists(st.integers(1, 40), max_size=4).map(tuple)
SHARDS = st.integers(1, 16)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((16, 64, 32), -2),  # the larger of two that divide
        ((16, 32, 64), -1),
        ((64, 32), -1),  # the first may be a stack that a scan walks along
        ((32, 32), -1),  # of equals the last
        ((27, 32), -1),  # the one that divides, though it is not the larger
        ((33, 32), -1),
        ((32, 33), -2),
        ((8, 30, 31), -1),  # rather pad another by 1/31 than cut the first
        ((8, 13, 13), -3),  # but not at any price
        ((4, 16, 64, 24), -2),
        ((16, 256, 1024), -2),  # rows of matrices in a stack
        ((16, 4, 256, 1024), -2),
        ((16, 128, 1024), -1),  # what may be a stack itself is none of them
        ((40,), -1),
        ((41,), -1),
    ],
)
def test_which_dimension_is_cut(shape, dim):
    cut = cut_of(shape, shards=8, min_shard_size=16)
    assert cut.dim == dim
    assert cut.size == shape[dim]
    assert cut.padded == 8 * math.ceil(shape[dim] / 8)


@pytest.mark.parametrize("shape", [(), (15,), (3, 5), (0,), (0, 64), (1, 1, 1)])
def test_scalars_and_small_leaves_stay_whole(shape):
    assert cut_of(shape, shards=8, min_shard_size=16) == WHOLE
    assert WHOLE.spec(len(shape)) == PartitionSpec()
    assert WHOLE.stored(shape) == shape


def test_nothing_is_cut_for_one_device():
    assert cut_of((64, 64), shards=1, min_shard_size=0) == WHOLE


def test_the_partition_names_the_cut_dimension_alone():
    assert cut_of((4, 64, 32), 8, 16).spec(3) == PartitionSpec(None, "data", None)


@settings(max_examples=200, deadline=None)
@given(SHAPES, SHARDS, st.integers(0, 200))
def test_the_stored_leaf_divides_and_wastes_less_than_a_shard_of_its_dimension(shape, shards, min_shard_size):
    cut = cut_of(shape, shards, min_shard_size)
    stored = cut.stored(shape)
    if cut.dim is None:
        assert stored == shape
        assert shards == 1 or not shape or math.prod(shape) < max(min_shard_size, 1)
        return
    assert math.prod(shape) >= min_shard_size
    assert stored[cut.dim] % shards == 0
    assert 0 <= stored[cut.dim] - shape[cut.dim] < shards
    assert [i for i, n in enumerate(stored) if n != shape[i]] in ([], [len(shape) + cut.dim])
    if any(n % shards == 0 for n in shape[1:] or shape):
        assert stored == shape  # a dimension that divides is never passed over


@settings(max_examples=50, deadline=None)
@given(SHAPES, SHARDS, st.integers(0, 2**31))
def test_padding_is_zeros_at_the_end_and_comes_off_again(shape, shards, seed):
    cut = cut_of(shape, shards, min_shard_size=1)
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    stored = np.asarray(cut.pad(jnp.asarray(x)))
    assert stored.shape == cut.stored(shape)
    expected = np.zeros(stored.shape, np.float32)
    expected[tuple(slice(n) for n in shape)] = x
    np.testing.assert_array_equal(stored, expected)
    np.testing.assert_array_equal(cut.unpad(jnp.asarray(stored)), x)


@pytest.mark.parametrize("stack", [1, 3])
def test_a_cut_holds_for_what_a_scan_slices_off(stack):
    cut = cut_of((stack, 30, 27), shards=8, min_shard_size=1)
    x = jnp.arange(30 * 27.0).reshape(30, 27)
    np.testing.assert_array_equal(cut.unpad(cut.pad(x)), x)
    assert cut.pad(x).shape == cut.stored((stack, 30, 27))[1:]


@pytest.mark.parametrize(
    ("shape", "seen", "survives"),
    [
        ((4, 16, 64), (4, 16, 64), True),
        ((4, 16, 64), (16, 64), True),  # a turn of a scan
        ((4, 16, 64), (3, 4, 16, 64), True),  # a stack made of it
        ((4, 16, 64), (4, 64), False),  # sliced along another dimension than the first
        ((4, 16, 64), (64,), True),
        ((4, 64, 16), (16,), False),  # the cut dimension is gone
        ((8, 13, 13), (13, 13), False),
    ],
)
def test_whether_a_cut_of_the_leaf_is_a_cut_of_what_a_layer_sees(shape, seen, survives):
    assert cut_of(shape, shards=8, min_shard_size=1).survives(shape, seen) is survives


def test_storing_and_viewing_a_leaf_keeps_it_in_shards():
    mesh = zerojax.make_mesh()
    leaf = Leaf("params/w", (30, 27), jnp.dtype("float32"), cut_of((30, 27), 8, 16))
    x = np.arange(30 * 27, dtype=np.float32).reshape(30, 27)
    stored = jax.jit(lambda x: leaf.store(x, mesh))(x)
    assert stored.shape == leaf.stored_shape == (32, 27)
    assert {shard.data.shape for shard in stored.addressable_shards} == {(4, 27)}
    whole = NamedSharding(mesh, PartitionSpec())
    np.testing.assert_array_equal(jax.jit(lambda x: leaf.view(x, mesh), out_shardings=whole)(stored), x)


def test_what_is_stored_has_the_leafs_dtype_and_no_weak_type():
    mesh = zerojax.make_mesh()
    leaf = Leaf("params/w", (), jnp.dtype("float32"))
    stored = jax.jit(lambda: leaf.store(jnp.asarray(2.0), mesh))()
    assert stored.dtype == jnp.float32 and not stored.weak_type


@pytest.mark.parametrize(
    "sizes",
    [
        dict(vocab_size=50257, dim=768, layers=12, heads=12, max_length=1024),  # GPT-2
        dict(
            vocab_size=128256,
            dim=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            mlp_dim=14336,
            max_length=8192,
            norm="rmsnorm",
            mlp="swiglu",
            positions="rope",
            bias=False,
            tied=False,
        ),  # Llama 3 8B
        dict(vocab_size=256, dim=128, layers=2, heads=4, max_length=64),
    ],
)
def test_less_than_a_hundredth_of_a_gpt_stays_whole(sizes):
    optax, nnx = pytest.importorskip("optax"), pytest.importorskip("flax.nnx")
    from zerojax.models.gpt import GPT

    state = zerojax.Zero(stage=1).abstract_state(lambda key: GPT(**sizes, rngs=nnx.Rngs(key)), optax.adamw(1e-3))
    leaves = [*jax.tree.leaves(state.params), *jax.tree.leaves(state.opt_state)]
    whole = sum(x.size * x.dtype.itemsize for x in leaves if x.sharding.is_fully_replicated)
    assert whole < 0.01 * sum(x.size * x.dtype.itemsize for x in leaves)
