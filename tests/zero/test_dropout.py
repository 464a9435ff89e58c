"""Dropout in an NNX and a Linen model: its rate, other masks on every device and micro-batch, the same on resume."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax import Zero

WIDTH, RATE, ROWS = 512, 0.25, 16
BATCH = np.ones((ROWS, WIDTH), np.float32)


class NnxDropped(nnx.Module):
    def __init__(self, rngs):
        self.scale, self.drop = nnx.Param(jnp.ones(WIDTH)), nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x):
        return self.drop(x * self.scale[...])


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(RATE, deterministic=False)(x * self.param("scale", nn.initializers.ones, (WIDTH,)))


def measured(y):
    """How much is kept, and a number that tells masks apart."""
    kept = (y != 0).astype(jnp.float32)
    return jnp.mean(y), {"kept": kept.mean(), "code": jnp.sum(kept * jnp.arange(kept.size).reshape(kept.shape) % 977)}


KINDS = {
    "nnx": (lambda key: NnxDropped(nnx.Rngs(key)), lambda model, x, rng: measured(model(x))),
    "linen": (
        lambda key: LinenDropped().init({"params": key, "dropout": key}, BATCH),
        lambda variables, x, rng: measured(LinenDropped().apply(variables, x, rngs={"dropout": rng})),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_keeps_its_rate_and_repeats_on_resume(kind, tmp_path):
    make, loss = KINDS[kind]
    zero, optimizer = Zero(stage=3, min_shard_size=8, micro_batches=2), optax.sgd(0.0)
    state, step, history = zero.init(make, optimizer), zero.train_step(loss), []
    for i in range(4):
        if i == 2:
            zerojax.save(tmp_path / "checkpoint", state)
        state, metrics = step(state, BATCH)
        history.append({name: float(x) for name, x in jax.device_get(metrics).items()})
    draws = 4 * ROWS * WIDTH
    kept = np.mean([m["kept"] for m in history])
    assert abs(kept - (1 - RATE)) < 4 * np.sqrt(RATE * (1 - RATE) / draws)
    assert len({m["code"] for m in history}) == 4
    state = zerojax.restore(tmp_path / "checkpoint", zero, make, optimizer)
    for want in history[2:]:
        state, metrics = step(state, BATCH)
        assert float(metrics["code"]) == want["code"] and float(metrics["loss"]) == want["loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_device_and_micro_batch_draws_its_own_mask(kind):
    make, loss = KINDS[kind]

    def told(model, x, rng):
        value, aux = loss(model, x, rng)
        place = x[0, 0].astype(jnp.int32)  # which device and micro-batch: the rows say
        return value, {str(i): jnp.where(place == i, aux["code"], 0.0) for i in range(ROWS)}

    zero = Zero(stage=3, min_shard_size=8, micro_batches=2)
    rows = np.broadcast_to(np.arange(ROWS, dtype=np.float32)[:, None], (ROWS, WIDTH)).copy()
    rows[:, 1:] = 1.0
    _, metrics = zero.train_step(told)(zero.init(make, optax.sgd(0.0)), rows)
    codes = {float(metrics[str(i)]) for i in range(ROWS)}
    assert len(codes) == ROWS
