"""Wrong input: one line that names the thing, its value and what is accepted."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from zerojax import UserError, Weighted, Zero

BATCH = np.ones((16, 4), np.float32)


def make_model(key):
    return {"w": jnp.ones((4, 4))}


def loss_fn(model, batch, rng):
    return jnp.mean(batch @ model["w"])


def refused(function, *parts):
    """Calls `function`, and checks the error's one line for `parts`."""
    with pytest.raises(UserError) as error:
        function()
    said = str(error.value)
    assert "\n" not in said
    assert re.search("accepted: .", said), said
    for part in parts:
        assert part in said


@pytest.mark.parametrize("stage", [4, -1, "3", None, True, 2.5, 3.0, [1]])
def test_stages(stage):
    refused(lambda: Zero(stage=stage), f"stage is {stage!r}", "0, 1, 2 or 3")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("micro_batches", 0),
        ("micro_batches", 1.5),
        ("micro_batches", True),
        ("micro_batches", None),
        ("min_shard_size", -1),
        ("min_shard_size", 1e3),
        ("clip_norm", 0),
        ("clip_norm", -1.0),
        ("clip_norm", float("nan")),
        ("clip_norm", "1"),
        ("remat", "most"),
        ("precision", "fp8"),
        ("precision", "float32"),
        ("precision", None),
        ("mesh", (8,)),
    ],
)
def test_settings(setting, value):
    refused(lambda: Zero(**{setting: value}), f"{setting} is {value!r}")


def test_a_mesh_without_a_data_axis():
    refused(lambda: Zero(mesh=Mesh(np.array(jax.devices()), ("batch",))), "('batch',)", "'data'")


@pytest.mark.parametrize("optimizer", [None, "adamw", 1e-3, optax.adamw, optax.constant_schedule(1.0), object()])
def test_optimizers(optimizer):
    refused(lambda: Zero().init(make_model, optimizer), "optimizer is ", "optax.GradientTransformation")


@pytest.mark.parametrize("model", [None, make_model(None), 3])
def test_a_model_where_a_function_that_makes_it_is_wanted(model):
    refused(lambda: Zero().init(model, optax.sgd(0.1)), "make_model is ", "function")


@pytest.mark.parametrize(
    "make",
    [
        lambda key: {},
        lambda key: None,
        lambda key: {"ids": jnp.arange(4)},
        lambda key: "model",
        lambda key: nnx.Dropout(0.5),
    ],
)
def test_models_without_parameters(make):
    refused(lambda: Zero().init(make, optax.sgd(0.1)), "model without floating parameters")


@pytest.mark.parametrize("loss_fn", [None, "mse", 3])
def test_losses_that_are_no_functions(loss_fn):
    refused(lambda: Zero().train_step(loss_fn), f"loss_fn is {loss_fn!r}")
    refused(lambda: Zero().eval_step(loss_fn), f"loss_fn is {loss_fn!r}")


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        (lambda loss: loss * jnp.ones(3), ("loss has shape (3,)", "float32", "scalar")),
        (lambda loss: loss[None, None], ("loss has shape (1, 1)",)),
        (lambda loss: jnp.int32(3), ("loss has dtype int32", "floating")),
        (lambda loss: jnp.bool_(True), ("loss has dtype bool",)),
        (lambda loss: loss * 1j, ("loss has dtype complex64",)),
        (lambda loss: None, ("loss is None", "scalar")),
        (lambda loss: "low", ("loss is 'low'",)),
        (lambda loss: {"loss": loss}, ("loss is {",)),
        (lambda loss: [loss, {}], ("loss is [",)),
        (lambda loss: Weighted(loss, jnp.ones(2)), ("loss's weight has shape (2,)",)),
        (lambda loss: Weighted(jnp.ones(2), loss), ("loss has shape (2,)",)),
        (lambda loss: Weighted(loss, None), ("loss's weight is None",)),
        (lambda loss: (loss, {}, {}), ("returned 3 values", "pair")),
        (lambda loss: (loss, loss), ("aux of type", "dict")),
        (lambda loss: (loss, None), ("aux of type NoneType", "dict")),
        (lambda loss: (loss, {"accuracy": jnp.ones(4)}), ("aux 'accuracy' has shape (4,)",)),
        (lambda loss: (loss, {"nested": {"a": loss}}), ("aux 'nested' is {",)),
        (lambda loss: (loss, {"step": loss}), ("'step'", "other names")),
        (lambda loss: (loss, {"grad_norm": loss, "mine": loss}), ("'grad_norm'",)),
    ],
)
def test_what_a_loss_returns(returned, parts):
    zero = Zero()
    state = zero.abstract_state(make_model, optax.sgd(0.1))
    step = zero.train_step(lambda model, batch, rng: returned(loss_fn(model, batch, rng)))
    refused(lambda: step.lower(state, BATCH), *parts)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (BATCH[:12], ("'batch' has 12 examples", "a multiple of 16", "8 data-parallel devices x 2 micro-batches")),
        (BATCH[:8], ("'batch' has 8 examples", "a multiple of 16")),
        (BATCH[:0], ("'batch' has 0 examples",)),
        ({"x": BATCH, "y": np.ones((32, 2))}, ("[16, 32] examples", "all of one size")),
        ({"x": BATCH, "n": 16}, ("'n' is 16",)),
        ({"x": BATCH, "t": jnp.float32(1)}, ("'t' is Array(1.",)),
        ({"x": [1.0, 2.0]}, ("'x/0' is 1.0",)),
        (3.0, ("'batch' is 3.0",)),
        ("batch", ("'batch' is 'batch'",)),
        ({"x": BATCH, "texts": ["a"] * 16}, ("'texts/0' is 'a'",)),
        ({"x": BATCH, "texts": np.array(["a"] * 16)}, ("'texts' has dtype <U1",)),
        ({}, ("one array or more",)),
        (None, ("one array or more",)),
    ],
)
def test_batches(batch, parts):
    zero = Zero(micro_batches=2)
    state = zero.abstract_state(make_model, optax.sgd(0.1))
    refused(lambda: zero.train_step(loss_fn).lower(state, batch), *parts)


def test_a_batch_of_an_evaluation_has_no_micro_batches():
    zero = Zero(micro_batches=2)
    state = zero.abstract_state(make_model, optax.sgd(0.1))
    refused(lambda: zero.eval_step(loss_fn).lower(state, BATCH[:12]), "a multiple of 8")
    zero.eval_step(loss_fn).lower(state, BATCH[:8])


@pytest.mark.parametrize("name", ["loss", "weight"])
def test_names_that_an_evaluation_uses_itself(name):
    zero = Zero()
    state = zero.abstract_state(make_model, optax.sgd(0.1))
    evaluate = zero.eval_step(lambda model, batch, rng: (loss_fn(model, batch, rng), {name: 0.0}))
    refused(lambda: evaluate.lower(state, BATCH), f"{name!r}", "other names")
