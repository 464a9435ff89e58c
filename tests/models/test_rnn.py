"""LSTM and GRU against PyTorch's, their carries, and their gathers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.models.sharded import assert_each_parameter_is_read_once, assert_shards_train_as_one_device_does
from zerojax import Zero
from zerojax.errors import UserError
from zerojax.models import next_token_loss
from zerojax.models.rnn import GRU, LSTM, RNN

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "weights_rnn.npz"
TINY = dict(vocab_size=32, dim=16, layers=2)
both_cells = pytest.mark.parametrize("cell", ["lstm", "gru"])


def make(seed=0, **arguments):
    return RNN(**TINY | arguments, rngs=nnx.Rngs(seed))


def tokens(batch=8, length=9, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 32)


@both_cells
def test_a_layer_equals_pytorchs(cell):
    """`torch.nn.LSTM` and `torch.nn.GRU` (2.13.0); PyTorch has two biases where one would do."""
    found = np.load(GOLDEN)
    kernel, recurrent = found[f"{cell}_weight_ih"].T, found[f"{cell}_weight_hh"].T
    bias, other = found[f"{cell}_bias_ih"], found[f"{cell}_bias_hh"]
    layer = (LSTM if cell == "lstm" else GRU)(6, nnx.Rngs(0))
    layer.kernel[...], layer.recurrent[...] = kernel, recurrent
    if cell == "lstm":
        layer.bias[...] = bias + other
    else:
        layer.bias[...] = bias + np.concatenate([other[:12], np.zeros(6, np.float32)])
        layer.candidate_bias[...] = other[12:]
    y, end = layer(jnp.asarray(found["x"]), layer.initial_carry(3, jnp.float32))
    np.testing.assert_allclose(y, found[f"{cell}_y"], atol=1e-6)
    for i, x in enumerate(end):
        np.testing.assert_allclose(x, found[f"{cell}_end{i}"], atol=1e-6)


@both_cells
def test_a_carry_goes_on_where_it_ended(cell):
    model, text = make(cell=cell), tokens()
    whole, end = model.run(text, None)
    first, carries = model.run(text[:, :4], None)
    second, carries = model.run(text[:, 4:], carries)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), carries, end)
    np.testing.assert_array_equal(model(text), whole)


@both_cells
def test_outputs_have_the_dtype_of_the_parameters_and_memory_is_fp32(cell):
    graph, params = nnx.split(make(cell=cell))
    model = nnx.merge(graph, optax.tree.cast(params, jnp.bfloat16))
    logits, carries = model.run(tokens(), None)
    assert (logits.shape, logits.dtype) == ((8, 9, 32), jnp.bfloat16)
    assert [x.dtype for x in carries[0]] == [jnp.bfloat16, jnp.float32][: len(carries[0])]
    _, again = model.run(tokens(), carries)
    assert jax.tree.map(jnp.shape, again) == jax.tree.map(jnp.shape, carries)


def test_dropout_follows_its_key_and_ends_in_evaluation():
    model = make(dropout=0.5)
    a, b = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(model(tokens(), a), model(tokens(), a))
    assert (model(tokens(), a) != model(tokens(), b)).any()
    np.testing.assert_array_equal(model(tokens()), make()(tokens()))
    model.eval()
    np.testing.assert_array_equal(model(tokens(), a), make()(tokens()))


def test_wrong_arguments_are_named():
    with pytest.raises(UserError, match="cell='rnn': must be one of 'lstm', 'gru'"):
        make(cell="rnn")
    with pytest.raises(UserError, match=r"dropout=1: must lie in \[0, 1\)"):
        make(dropout=1)


@both_cells
def test_each_parameter_is_read_once(cell):
    assert_each_parameter_is_read_once(make(cell=cell), lambda model: model(tokens()))


@both_cells
def test_shards_train_as_one_device_does(cell):
    make_model = lambda key: RNN(**TINY, cell=cell, rngs=nnx.Rngs(key))
    assert_shards_train_as_one_device_does(make_model, next_token_loss, {"tokens": tokens()})


def test_weights_are_gathered_once_whatever_the_length():
    """Twice with the backward pass: were they gathered inside the loop over time, it would be once a token."""
    zero = Zero(stage=3, min_shard_size=8)
    state = zero.init(lambda key: RNN(**TINY, rngs=nnx.Rngs(key)), optax.sgd(0.1))
    step = zero.train_step(next_token_loss)
    sent = [zero.report(state, step, {"tokens": tokens(length=length)}).gather for length in (5, 33)]
    assert sent[0].bytes == sent[1].bytes <= sent[0].expected
