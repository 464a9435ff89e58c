"""Muon: which leaves are matrices, and what becomes of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.optim import trees
from zerojax import Zero, optim
from zerojax.models import gpt
from zerojax.optim.orthogonal import orthogonalize
from zerojax.paths import path_name

FLOAT32 = dict(ns_dtype=jnp.float32)


def matrices(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (2, 3, 4, 8)], ids=str)
def test_singular_vectors_stay_and_values_go_to_one(method: str, shape: tuple[int, ...]) -> None:
    x = matrices(*shape)
    u, _, v = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    turned = np.swapaxes(u, -1, -2) @ np.asarray(orthogonalize(x, method, jnp.float32)) @ np.swapaxes(v, -1, -2)
    values = np.diagonal(turned, axis1=-2, axis2=-1)
    assert np.all((0.6 < values) & (values < 1.3))  # the interval that Jordan's coefficients aim at
    np.testing.assert_allclose(turned, values[..., None] * np.eye(values.shape[-1]), atol=1e-5)


def test_the_gram_form_is_the_same_polynomial() -> None:
    x = matrices(3, 5, 12)
    np.testing.assert_allclose(
        orthogonalize(x, "gram", jnp.float32), orthogonalize(x, "standard", jnp.float32), atol=2e-5
    )


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("size", [1e-12, 1e8])
def test_sixteen_bits_hold_gradients_of_any_size(method: str, size: float) -> None:
    x = matrices(4, 8)
    scaled = orthogonalize(x * size, method)
    assert bool(jnp.isfinite(scaled).all())
    # 1e-7 is added to the norm, as DeepSpeed does, so that a tiny gradient has a tiny update.
    assert float(jnp.linalg.norm(scaled)) == pytest.approx(0 if size < 1e-9 else 2, abs=0.3)


def test_no_gradient_no_update() -> None:
    assert not orthogonalize(jnp.zeros((3, 5)), "gram").any()


def test_a_matrix_may_be_empty() -> None:
    params = {"kernel": jnp.zeros((0, 4))}
    assert trees.trained(optim.muon(0.1), params, [params])["kernel"].shape == (0, 4)


def test_an_update_grows_with_outputs_over_inputs() -> None:
    wide, tall = {"kernel": matrices(4, 16)}, {"kernel": matrices(16, 4)}
    for params, scale in (wide, 2.0), (tall, 1.0):
        update = optim.muon(1.0, **FLOAT32).update
        updates, _ = update(params, optim.muon(1.0, **FLOAT32).init(params), params)
        wanted = -scale * orthogonalize(params["kernel"], ns_dtype=jnp.float32)
        np.testing.assert_allclose(updates["kernel"], wanted, atol=1e-5)


def muon_leaves(params: Any) -> set[str]:
    """The names of the leaves that have one moving average, as opposed to two moments."""
    state = optim.muon(0.1).init(params)
    moments = [path_name(path) for path, _ in jax.tree.leaves_with_path(state)]
    names = {path_name(path) for path, _ in jax.tree.leaves_with_path(params)}
    return {name for name in names if sum(moment.endswith(f"/{name}") for moment in moments) == 1}


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
def test_the_matrices_of_a_transformer(scan: bool) -> None:
    model = lambda rng: gpt.GPT(
        vocab_size=32, dim=8, layers=2, heads=2, max_length=4, tied=False, scan=scan, rngs=nnx.Rngs(rng)
    )
    params = Zero().abstract_state(model, optax.sgd(0.1)).params
    layers = ["blocks"] if scan else ["blocks/0", "blocks/1"]
    kernels = ["attention/qkv", "attention/out", "mlp/up", "mlp/down"]
    assert muon_leaves(params) == {f"{layer}/{kernel}/kernel" for layer in layers for kernel in kernels}


def test_what_is_no_matrix_is_said_by_patterns() -> None:
    params = trees.params()
    assert muon_leaves(params) == {"blocks/up/kernel", "out/kernel"}
    optimizer = optim.muon(0.1, adam_lr=0.5, adam_params=["*embed*", "out/*", "blocks/*/bias", "*scale"], **FLOAT32)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    wanted, _ = (adam := optim.adamw(0.5, (0.9, 0.95), 1e-10)).update(params, adam.init(params), params)
    for part in "out", "embedding":
        trees.assert_close(updates[part], wanted[part])


def test_it_trains_in_shards_as_it_does_whole() -> None:
    loss = lambda model, batch, rng: jnp.mean(
        jnp.square(jnp.tanh(batch @ model["in"]["kernel"]) @ model["out"]["kernel"])
    )
    make = lambda rng: {"in": {"kernel": matrices(16, 32)}, "out": {"kernel": matrices(32, 8)}}
    batch = matrices(16, 16)
    after = []
    for stage in 0, 3:
        zero = Zero(stage=stage, min_shard_size=0)
        state, step = zero.init(make, optim.muon(0.1, **FLOAT32)), zero.train_step(loss)
        for _ in range(2):
            state, _ = step(state, batch)
        after.append(zero.gather(state))
    trees.assert_close(after[1], after[0], 2e-6)
