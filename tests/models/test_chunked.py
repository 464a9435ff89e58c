"""Losses and layers in chunks of rows: the same numbers in less memory, and parameters in shards gathered once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.adapters.one_device import entered
from tests.models import sharded
from tests.models.test_gpt import SHAPES, both_shapes
from zerojax import UserError, Zero
from zerojax.models import GPT, chunked_cross_entropy, cross_entropy, next_token_loss, tiled
from zerojax.models.transformer import MLP

ROWS, DIM, VOCAB = 24, 8, 40


def operands(dtype=jnp.float32):
    draw = functools.partial(jnp.asarray, dtype=dtype)
    rng = np.random.default_rng(0)
    hidden, head, bias = rng.normal(size=(2, ROWS // 2, DIM)), rng.normal(size=(DIM, VOCAB)), rng.normal(size=VOCAB)
    return draw(hidden), draw(head), draw(bias)


TARGETS = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, size=(2, ROWS // 2)))
WEIGHTS = jnp.asarray(np.random.default_rng(2).uniform(0, 2, size=(2, ROWS // 2)), jnp.float32)


def reference(hidden, head, bias, weights):
    """The mean loss, by optax."""
    logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32) + (0 if bias is None else bias.astype(jnp.float32))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def chunked(hidden, head, bias, weights, chunks):
    loss = chunked_cross_entropy(hidden, head, TARGETS, weights, bias=bias, chunks=chunks)
    return loss.total / loss.weight


@pytest.mark.parametrize("chunks", [1, 4, 5, ROWS, 2 * ROWS])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["unweighted", "weighted"])
def test_loss_and_gradients_are_the_plain_ones(chunks, biased, weights):
    hidden, head, bias = operands()
    bias = bias if biased else None
    which = (0, 1, 2) if biased else (0, 1)
    ones = jnp.ones(TARGETS.shape)
    want, want_gradients = jax.value_and_grad(reference, which)(
        hidden, head, bias, ones if weights is None else weights
    )
    got, gradients = jax.value_and_grad(chunked, which)(hidden, head, bias, weights, chunks)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for a, b in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())
    np.testing.assert_allclose(chunked(hidden, head, bias, weights, chunks), want, rtol=1e-6)  # without gradients


def test_16_bit_gradients_are_as_near_as_the_plain_ones():
    wide = operands(jnp.bfloat16)
    true = jax.grad(reference, (0, 1))(*(x.astype(jnp.float32) for x in wide), WEIGHTS)
    error = lambda loss: [
        np.abs(np.asarray(g, np.float32) - t).max() for g, t in zip(jax.grad(loss, (0, 1))(*wide), true, strict=True)
    ]

    def plain(hidden, head, bias):
        loss = cross_entropy(hidden @ head + bias, TARGETS, WEIGHTS)
        return loss.total / loss.weight

    in_chunks = lambda hidden, head, bias: chunked(hidden, head, bias, WEIGHTS, 6)
    assert {g.dtype for g in jax.grad(in_chunks, (0, 1, 2))(*wide)} == {jnp.dtype(jnp.bfloat16)}
    for ours, theirs in zip(error(in_chunks), error(plain), strict=True):
        assert ours < 1.5 * theirs


def test_under_checkpoint_and_in_a_larger_function():
    hidden, head, bias = operands()
    through = lambda loss: lambda hidden, head: jnp.sin(loss(jnp.tanh(hidden), head, bias, WEIGHTS))
    want = jax.grad(through(reference), (0, 1))(hidden, head)
    loss = functools.partial(chunked, chunks=4)
    for rematerialised in (
        loss,
        jax.checkpoint(loss),
        jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable),
    ):
        got = jax.jit(jax.grad(through(rematerialised), (0, 1)))(hidden, head)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


def temporaries(loss, *shapes):
    gradient = jax.grad(loss, (0, 1))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_the_loss_s_memory_is_that_of_a_chunk():
    rows, dim, vocab, chunks = 1024, 64, 4096, 8
    targets = jnp.zeros(rows, jnp.int32)
    shapes = (rows, dim), (dim, vocab)
    plain = temporaries(lambda hidden, head: cross_entropy(hidden @ head, targets).total, *shapes)
    ours = temporaries(lambda hidden, head: chunked_cross_entropy(hidden, head, targets, chunks=chunks).total, *shapes)
    assert plain == pytest.approx(4 * rows * vocab, rel=0.05)
    assert ours == pytest.approx(4 * rows * vocab / chunks + 4 * dim * vocab, rel=0.05)  # without what is returned


# --- the reference model's loss


def make(shape, **changes):
    return lambda key: GPT(**SHAPES[shape] | changes, rngs=nnx.Rngs(key))


BATCH = {"tokens": np.random.default_rng(3).integers(0, 64, size=(16, 17)).astype(np.int32)}
in_chunks = functools.partial(next_token_loss, chunks=3)


@both_shapes
def test_the_gradients_of_the_model_are_the_plain_ones(shape):
    """With the embedding for a head its gradient comes through both ends."""
    graph, params = nnx.split(GPT(**shape, rngs=nnx.Rngs(0)))

    def mean(params, loss):
        loss = loss(nnx.merge(graph, params), BATCH)
        return loss.total / loss.weight

    (want, want_gradients), (got, gradients) = (
        jax.jit(jax.value_and_grad(functools.partial(mean, loss=loss)))(params) for loss in (next_token_loss, in_chunks)
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max()), gradients, want_gradients
    )


def test_in_shards_as_on_one_device():
    sharded.assert_shards_train_as_one_device_does(make("gpt2", layers=1), in_chunks, BATCH, steps=2)


@pytest.mark.parametrize(("shape", "whole"), [("gpt2", "72x32"), ("llama", "32x72")])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_head_is_gathered_and_its_logits_are_computed_once(stage, shape, whole):
    zero = Zero(stage=stage, min_shard_size=8)
    state = zero.abstract_state(make(shape, remat=True, vocab_size=72), optax.sgd(0.1))
    step = zero.train_step(in_chunks)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    lines = step.lower(state, batch).as_text().splitlines()
    assert not entered(state, step)
    gathers = [line for line in lines if "stablehlo.all_gather" in line]
    assert sum(f"-> tensor<{whole}xf32>" in line for line in gathers) == 1
    # Of a chunk: logits, their gradient times the head, and times the states.
    assert sum("dot_general" in line and "72x" in line for line in lines) == 3


# --- layers


def mlp():
    return MLP(16, 64, activation="gelu", bias=True, out_stddev=0.1, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_a_layer_in_chunks_is_the_layer(chunks):
    graph, params = nnx.split(mlp())
    x = jax.random.normal(jax.random.key(1), (2, 6, 16))
    plain = lambda params, x: jnp.sum(jnp.sin(nnx.merge(graph, params)(x)))
    tiles = lambda params, x: jnp.sum(jnp.sin(tiled(nnx.merge(graph, params), x, chunks=chunks)))
    want, want_gradients = jax.value_and_grad(plain, (0, 1))(params, x)
    got, gradients = jax.value_and_grad(tiles, (0, 1))(params, x)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max()), gradients, want_gradients
    )


def test_rows_may_become_anything():
    x = jnp.arange(12.0).reshape(2, 3, 2)
    assert tiled(lambda rows: rows.sum(1), x, chunks=4).tolist() == x.sum(-1).tolist()
    np.testing.assert_array_equal(
        tiled(lambda rows: rows[:, :, None] * rows[:, None], x, chunks=4)[1, 2, 0, 1], 10 * 11
    )


def test_a_layer_s_memory_is_that_of_a_chunk():
    rows, dim, hidden = 1024, 64, 1024
    layer = lambda w, rows: jnp.tanh(rows @ w) @ w.T
    shapes = (dim, hidden), (rows, dim)
    plain = temporaries(lambda w, x: layer(w, x).sum(), *shapes)
    ours = temporaries(lambda w, x: tiled(functools.partial(layer, w), x, chunks=8).sum(), *shapes)
    share = lambda chunks: 2 * 4 * rows * hidden / chunks  # the hidden layer and its gradient
    assert plain == pytest.approx(share(1), rel=0.2)
    assert ours == pytest.approx(share(8) + 4 * dim * hidden + 4 * rows * dim, rel=0.2)


class Tiled(nnx.Module):
    def __init__(self, rngs):
        self.mlp = MLP(16, 64, activation="gelu", bias=True, out_stddev=0.1, rngs=rngs)

    def __call__(self, x):
        return x + tiled(self.mlp, x, chunks=4)


@pytest.mark.parametrize("remat", [False, True])
def test_a_layer_s_shards_are_gathered_before_its_chunks(remat):
    run = jax.checkpoint(lambda model, x: model(x)) if remat else lambda model, x: model(x)
    loss = lambda model, x, rng: jnp.mean(jnp.square(run(model, x) - 1))
    make = lambda key: Tiled(nnx.Rngs(key))
    x = np.random.default_rng(4).normal(size=(32, 16)).astype(np.float32)
    sharded.assert_shards_train_as_one_device_does(make, loss, x, steps=2)
    zero = Zero(stage=3, min_shard_size=128)
    state = zero.abstract_state(make, optax.sgd(0.1))
    report = zero.report(state, zero.train_step(loss), jax.ShapeDtypeStruct(x.shape, jnp.float32))
    gathers = [c for c in report.collectives if c.kind == "all-gather"]
    assert sum(c.bytes_sent for c in gathers) <= 2 * 7 / 8 * 4 * 2 * 16 * 64  # not once for each chunk
    assert not any("entered" in note.note for note in report.notes)


@pytest.mark.parametrize("chunks", [0, 2.0, True])
def test_numbers_of_chunks_that_are_refused(chunks):
    hidden, head, _ = operands()
    for refused in (
        lambda: chunked_cross_entropy(hidden, head, TARGETS, chunks=chunks),
        lambda: tiled(jnp.tanh, hidden, chunks=chunks),
    ):
        with pytest.raises(UserError, match=f"^chunks is {re.escape(repr(chunks))}; accepted: a positive integer$"):
            refused()


ZEROS, ONES, CLASSES = jnp.zeros((2, 4, 8)), jnp.ones((8, 16)), jnp.zeros((2, 4), jnp.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ZEROS, ONES, CLASSES[:1]), r"targets has shape \(1, 4\), and hidden has .*; accepted: \(2, 4\)"),
        ((ZEROS, ONES, CLASSES, jnp.ones((2, 1))), r"weights has shape \(2, 1\)"),
        ((ZEROS, ONES, CLASSES, jnp.ones(3)), r"weights has shape \(3,\)"),
        ((ZEROS, ONES, CLASSES * 1.0), "targets has dtype float32; accepted: integers"),
        ((ZEROS, ONES.T, CLASSES), r"head has shape \(16, 8\); accepted: \(8, vocab\)"),
    ],
)
def test_shapes_that_do_not_go_together(arguments, message):
    """Rows would be cut off, or weights broadcast, in silence."""
    with pytest.raises(UserError, match=message):
        chunked_cross_entropy(*arguments)


def test_a_bias_of_another_vocabulary():
    with pytest.raises(UserError, match=r"bias has shape \(8,\); accepted: \(16,\)"):
        chunked_cross_entropy(ZEROS, ONES, CLASSES, bias=jnp.ones(8))


def test_a_function_that_does_not_keep_rows():
    with pytest.raises(UserError, match=r"tiled: the function makes shape \(\) of \(4, 8\)"):
        tiled(jnp.sum, ZEROS, chunks=2)
