"""`verify` finds what a sharded run computes differently, and says why."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax import Zero

WIDTH, ROWS = 16, 32
BATCH = np.random.default_rng(0).normal(1, 2, size=(ROWS, WIDTH)).astype(np.float32)


def make_model(key):
    return {"w": jax.random.normal(key, (WIDTH, 8)) / 4, "v": jax.random.normal(key, (8, WIDTH)) / 4}


def autoencode(model, batch, rng):
    return jnp.mean(jnp.square(jnp.tanh(batch @ model["w"]) @ model["v"] - batch))


def contrastive(gather):
    """InfoNCE (van den Oord et al. 2018, arXiv:1807.03748, eq. 4) of rows with themselves, shifted."""

    def loss(model, batch, rng):
        here, there = (
            x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (batch @ model["w"], batch @ model["w"] + 1)
        )
        here, there = gather(here), gather(there)
        return optax.softmax_cross_entropy_with_integer_labels(here @ there.T * 5, jnp.arange(len(here))).mean()

    return loss


def standardised(gather):
    """A normalisation by the batch, written by hand."""

    def loss(model, batch, rng):
        h = batch @ model["w"]
        rows = gather(h)
        return jnp.mean(jnp.square(((h - rows.mean(0)) / rows.std(0)) @ model["v"] - batch))

    return loss


def masked_mean(model, batch, rng):
    weights = (jnp.abs(batch[:, :1]) > 1.5).astype(jnp.float32)
    return jnp.sum(weights * jnp.square(batch @ model["w"])) / jnp.sum(weights)


def noisy(model, batch, rng):
    return autoencode(model, batch + jax.random.normal(rng, batch.shape), rng)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "loss",
    [autoencode, contrastive(zerojax.all_examples), standardised(zerojax.all_examples)],
    ids=["mean", "contrastive", "standardised"],
)
def test_nothing_differs_where_the_loss_is_that_of_the_batch(loss, stage):
    zero = Zero(stage=stage, mesh=zerojax.make_mesh(replica=2), min_shard_size=8)
    found = zero.verify(make_model, optax.adamw(1e-2), loss, BATCH)
    assert found.ok and "nothing differs" in str(found), str(found)


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (contrastive(lambda x: x), "compares the examples of a batch with each other"),
        (standardised(lambda x: x), "takes a statistic over the batch"),
        (masked_mean, "zerojax.Weighted(total, weight)"),
        (noisy, "draws random numbers"),
        (lambda model, batch, rng: autoencode(model, batch, rng) * len(batch), "the loss is a sum over its rows"),
    ],
)
def test_a_loss_that_forgets_the_other_devices_is_found(loss, cause):
    found = Zero(stage=3, min_shard_size=8).verify(make_model, optax.adamw(1e-2), loss, BATCH)
    assert not found.ok and cause in found.cause
    assert found.differences[0].what == "loss" and {d.name for d in found.differences} >= {"w"}
    assert all(d.name in str(found) for d in found.differences)


class Normed(nnx.Module):
    def __init__(self, rngs, norm):
        self.inner, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), norm(rngs)

    def __call__(self, x):
        return self.norm(self.inner(x))


class OwnVariance(nnx.Module):
    """Keeps a statistic that nothing in the loss depends on: only the variable tells."""

    def __init__(self, rngs):
        self.var = nnx.BatchStat(jnp.ones(WIDTH))

    def __call__(self, x):
        self.var[...] = jax.lax.stop_gradient(x.var(0))
        return x


def nnx_case(norm, zero):
    make = lambda key: Normed(nnx.Rngs(key), norm)
    loss = lambda model, x, rng: jnp.mean(jnp.square(model(x) - x))
    return zero.verify(make, optax.sgd(0.1), loss, BATCH)


def test_batch_norm_is_over_the_global_micro_batch_unless_asked_otherwise():
    norm = lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs)
    settings = dict(stage=3, min_shard_size=8, micro_batches=2)
    assert nnx_case(norm, Zero(**settings)).ok
    found = nnx_case(norm, Zero(batch_statistics="per_device", **settings))
    assert "batch_statistics is 'per_device'" in found.cause
    assert {"norm/mean", "norm/var"} & {d.name for d in found.differences if d.what == "variable"}


class Biased(nn.Module):
    """A bias in front of a BatchNorm has a gradient of zero, of whose rounding Adam makes whole steps."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(jnp.tanh(nn.BatchNorm(use_running_average=False)(nn.Dense(37)(x))))


def test_steps_of_rounding_are_no_difference():
    def loss(variables, x, rng):
        y, updates = Biased().apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(jnp.square(y - x)), updates

    make = lambda key: Biased().init(key, BATCH)
    found = Zero(stage=3, min_shard_size=8).verify(make, optax.adamw(1e-2), loss, BATCH)
    assert found.ok, str(found)


def test_a_loss_that_is_no_number_is_told():
    loss = lambda model, batch, rng: jnp.log(-jnp.abs(batch @ model["w"])).mean()
    found = Zero(stage=3, min_shard_size=8).verify(make_model, optax.sgd(0.1), loss, BATCH)
    assert not found.ok and "not finite on one device already" in found.cause


def test_a_statistic_of_a_device_is_found_in_the_variable():
    found = nnx_case(OwnVariance, Zero(stage=3, min_shard_size=8))
    assert {(d.what, d.name) for d in found.differences} == {("variable", "norm/var")}
    assert "a module updates a variable from the rows of one device" in found.cause


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))


@pytest.mark.parametrize("lifted", [False, True])
def test_linen_s_batch_norm_is_over_the_global_micro_batch(lifted):
    net = nn.remat(LinenNormed)() if lifted else LinenNormed()

    def loss(variables, x, rng):
        y, updates = net.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(jnp.square(y - x)), updates

    zero = Zero(stage=3, min_shard_size=8, micro_batches=2)
    make = lambda key: net.init(key, BATCH)
    assert zero.verify(make, optax.sgd(0.1), loss, BATCH).ok
    state = zero.init(make, optax.sgd(0.1))
    state, _ = zero.train_step(loss)(state, BATCH)
    kernel = np.asarray(zero.init(make, optax.sgd(0.1)).params["Dense_0"]["kernel"], np.float64)
    mean = np.zeros(WIDTH)
    for i in range(2):
        mean = 0.99 * mean + 0.01 * (BATCH[i::2] @ kernel).mean(0)
    np.testing.assert_allclose(state.variables["batch_stats"]["BatchNorm_0"]["mean"], mean, rtol=1e-4, atol=1e-6)


def test_a_collection_of_other_shapes_is_refused():
    net = LinenNormed()
    loss = lambda variables, x, rng: (
        jnp.mean(net.apply(variables, x, mutable=["batch_stats"])[0]),
        {"batch_stats": {}},
    )
    zero = Zero(stage=3, min_shard_size=8)
    state = zero.init(lambda key: net.init(key, BATCH), optax.sgd(0.1))
    with pytest.raises(zerojax.UserError, match="aux 'batch_stats' has other arrays"):
        zero.train_step(loss)(state, BATCH)
