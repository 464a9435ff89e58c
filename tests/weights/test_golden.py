"""Files that transformers wrote: our models compute what it does, and the files come back byte for byte."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.weights import golden
from zerojax import Zero
from zerojax.weights import load_weights, save_weights

each = pytest.mark.parametrize("name", golden.KINDS)


def assert_same_bytes(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].tobytes() == tensor.tobytes(), name


@each
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "listed"])
def test_logits_equal_those_of_transformers(name, scan):
    model = load_weights(golden.weights(name), golden.make(name, scan=scan), golden.KINDS[name])
    want = golden.arrays(name)["logits"]
    assert np.abs(want).max() > 1  # so that the tolerance is small beside them
    np.testing.assert_allclose(golden.logits(name, model), want, atol=1e-4)


@each
def test_what_was_read_is_written_again(name, tmp_path):
    model = load_weights(golden.weights(name), golden.make(name), golden.KINDS[name])
    save_weights(tmp_path, model, golden.KINDS[name])
    assert_same_bytes(load_file(tmp_path / "model.safetensors"), golden.tensors(name))
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def state_of(name, stage, devices):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    zero = Zero(stage=stage, mesh=mesh, min_shard_size=16)
    graph, params = nnx.split(golden.make(name))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)  # nothing to compile
    return zero, zero.init(lambda key: nnx.merge(graph, zeros), optax.contrib.schedule_free_sgd(0.1))


@each
def test_shards_hold_what_one_device_does(name, tmp_path):
    """Padding, cuts along every dim, and an optimizer that begins with a copy of the parameters."""
    zero, state = state_of(name, stage=3, devices=8)
    loaded = load_weights(golden.weights(name), state, golden.KINDS[name])
    assert {x.sharding.spec for x in jax.tree.leaves(loaded.params)} - {jax.sharding.PartitionSpec()}
    assert jax.tree.map(lambda x: (x.shape, x.sharding), loaded) == jax.tree.map(
        lambda x: (x.shape, x.sharding), loaded.layout.abstract
    )
    assert state.params["embedding"].is_deleted()
    alone = load_weights(golden.weights(name), state_of(name, stage=0, devices=1)[1], golden.KINDS[name])
    whole = loaded.layout.view("params", loaded.params)
    jax.tree.map(np.testing.assert_array_equal, whole, alone.params)
    jax.tree.map(np.testing.assert_array_equal, loaded.opt_state.z, loaded.params)
    np.testing.assert_allclose(golden.logits(name, zero.gather(loaded)), golden.arrays(name)["logits"], atol=1e-4)
    save_weights(tmp_path / "whole.safetensors", loaded, golden.KINDS[name])
    assert_same_bytes(load_file(tmp_path / "whole.safetensors"), golden.tensors(name))


def test_frozen_parameters_are_loaded_and_saved_too(tmp_path):
    zero = Zero(stage=3, min_shard_size=16, trainable=lambda path, parameter: "mlp" in path)
    graph, params = nnx.split(golden.make("llama"))
    state = zero.init(lambda key: nnx.merge(graph, jax.tree.map(np.zeros_like, params)), optax.sgd(0.1))
    assert state.params["embedding"] is None and state.frozen["embedding"] is not None
    state = load_weights(golden.weights("llama"), state, "llama")
    np.testing.assert_allclose(golden.logits("llama", zero.gather(state)), golden.arrays("llama")["logits"], atol=1e-4)
    save_weights(tmp_path / "whole.safetensors", state, "llama")
    assert_same_bytes(load_file(tmp_path / "whole.safetensors"), golden.tensors("llama"))
