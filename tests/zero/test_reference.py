"""Every stage against a plain optax loop on one device."""

import functools

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.zero import reference
from zerojax import Zero

STEPS = 20


def optimizers():
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    kinds = lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)
    return {
        "adamw": reference.adamw(3e-3),
        "lamb": optax.lamb(3e-3, mask=matrices),
        "lion": optax.lion(1e-4),
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
        "muon": optax.contrib.muon(3e-3),
        "sgd_momentum": optax.sgd(3e-2, momentum=0.9),
        "multi_transform": optax.multi_transform(
            {"matrix": reference.adamw(3e-3, weight_decay=0.1, mask=matrices), "vector": optax.sgd(1e-2)}, kinds
        ),
        "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
            optax.linear_schedule(1e-3, 3e-3, 10), eps=reference.EPS
        ),
    }


@functools.cache
def expected(name):
    return reference.train(optimizers()[name], STEPS)


def check(zero, name):
    state = zero.init(reference.make_model, optimizers()[name])
    step = zero.train_step(reference.loss_fn)
    losses = []
    for batch in reference.batches(STEPS):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    want_losses, want = expected(name)
    np.testing.assert_allclose(np.array(losses), want_losses, rtol=1e-5)
    reference.assert_close(zero.gather(state), want, rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_equal_a_plain_loop_with_adamw(stage):
    check(Zero(stage=stage, micro_batches=2, clip_norm=1.0, min_shard_size=64), "adamw")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shards_in_replicas_equal_a_plain_loop(stage):
    mesh = zerojax.make_mesh(replica=2, data=4)
    check(Zero(stage=stage, mesh=mesh, micro_batches=2, clip_norm=1.0, min_shard_size=64), "adamw")


@pytest.mark.parametrize("name", [n for n in optimizers() if n != "adamw"])
def test_any_optimizer_equals_a_plain_loop(name):
    check(Zero(stage=3, micro_batches=2, clip_norm=1.0, min_shard_size=64), name)
