"""The GPT whose compiled step the tests look into: four scanned layers, each a `jax.checkpoint` of its own."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import zerojax
from zerojax import Zero
from zerojax.models.gpt import GPT, next_token_loss
from zerojax.zero.report import Report

VOCAB, DIM, HEADS, LAYERS, LENGTH, BATCH = 512, 256, 4, 4, 64, 32
BATCH_SHAPE = {"tokens": jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)}
LIMIT = 1024  # smaller leaves stay whole


def make_gpt(key, **changes):
    settings = dict(vocab_size=VOCAB, dim=DIM, layers=LAYERS, heads=HEADS, max_length=LENGTH, remat=True) | changes
    return GPT(**settings, rngs=nnx.Rngs(key))


def leaf_bytes(scan=True):
    """Bytes of fp32 parameters: of the layers', of the others that are cut, and of those that stay whole.

    A GPT-2 with a tied head, written down by hand: Radford et al. 2019.
    """
    layer = [
        (DIM, 3 * DIM),
        (3 * DIM,),
        (DIM, DIM),
        (DIM,),
        (DIM, 4 * DIM),
        (4 * DIM,),
        (4 * DIM, DIM),
        (DIM,),
        *[(DIM,)] * 4,
    ]
    others = [(VOCAB, DIM), (LENGTH, DIM), (DIM,), (DIM,)]
    stack = LAYERS if scan else 1  # a stack of four vectors is large enough to cut, a single one is not
    size = lambda shape: 4 * math.prod(shape)
    is_cut = lambda shape, stack=1: stack * math.prod(shape) >= LIMIT
    layers = LAYERS * sum(size(s) for s in layer if is_cut(s, stack))
    outside = sum(size(s) for s in others if is_cut(s))
    whole = LAYERS * sum(map(size, layer)) + sum(map(size, others)) - layers - outside
    return layers, outside, whole


def report(stage: int, micro_batches: int = 1, replica: int = 1, **changes) -> Report:
    """What the compiled step of a GPT costs; compiled once for all tests."""
    return _report(stage, micro_batches, replica, **changes)


@functools.cache
def _report(stage: int, micro_batches: int, replica: int, **changes) -> Report:
    zero = Zero(stage=stage, mesh=zerojax.make_mesh(replica=replica), micro_batches=micro_batches, min_shard_size=LIMIT)
    state = zero.abstract_state(functools.partial(make_gpt, **changes), optax.adamw(1e-3))
    return zero.report(state, zero.train_step(next_token_loss), BATCH_SHAPE)
