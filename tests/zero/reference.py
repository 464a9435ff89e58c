"""A plain training loop on one device, which the tests hold zerojax against."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import Weighted

CLIP = 1.0
EPS = 1e-5  # above the rounding of gradients: Adam would divide a gradient of rounding by its own size
VOCAB, DIM, HIDDEN, LENGTH, BATCH = 40, 32, 64, 12, 32


def adamw(learning_rate, **settings):
    return optax.adamw(learning_rate, eps=EPS, **settings)


def make_model(key):
    """A small network over tokens: matrices, vectors, a scanned stack, and sizes that 8 does not divide."""
    del key  # the same numbers to the last bit, however the initialisation is compiled
    phases = itertools.count(1)

    def irregular(*shape):
        """Irregular numbers of unit variance, over the root of the inputs that a matrix has."""
        wave = np.sin(1e3 * next(phases) + np.arange(math.prod(shape)) ** 1.3)
        return jnp.asarray(np.sqrt(2 / shape[-2]) * wave.reshape(shape), jnp.float32)

    return {
        "embedding": irregular(VOCAB, DIM) * 3,
        "layers": {
            "up": irregular(3, DIM, HIDDEN),
            "bias": jnp.zeros((3, HIDDEN)),
            "down": irregular(3, HIDDEN, DIM),
        },
        "odd": irregular(DIM, 27),
        "back": irregular(27, DIM),
        "scale": jnp.ones((DIM,)),
    }


def layer(weights, h):
    return h + jnp.tanh(h @ weights["up"] + weights["bias"]) @ weights["down"]


def logits(params, tokens, layer=layer):
    h = params["embedding"][tokens]
    h, _ = jax.lax.scan(lambda h, weights: (layer(weights, h), None), h, params["layers"])
    h = h + jnp.tanh(h @ params["odd"]) @ params["back"]
    return (h * params["scale"]) @ params["embedding"].T


def loss_fn(params, batch, rng):
    """Unequal weights: some devices and micro-batches weigh far more than others."""
    del rng
    tokens, weights = batch["tokens"], batch["weights"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens[:, :-1]), tokens[:, 1:])
    return Weighted(jnp.sum(losses * weights), jnp.sum(weights))


def batches(steps, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        tokens = rng.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
        tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % VOCAB  # something to learn
        weights = rng.uniform(0, 1, (BATCH, LENGTH)) * rng.choice([0.0, 0.1, 5.0], (BATCH, 1))
        yield {"tokens": tokens, "weights": weights.astype(np.float32)}


def train(optimizer, steps, seed=0):
    """Losses and final parameters of a plain optax loop over whole batches on one device."""
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optimizer)
    params = jax.jit(make_model)(jax.random.key(seed))
    opt_state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, opt_state, batch):
        def loss_of(params):
            loss = loss_fn(params, batch, None)
            return loss.total / loss.weight

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for batch in batches(steps):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    return np.array(losses), jax.device_get(params)


def assert_close(params, want, rtol):
    """Every leaf within `rtol` of the size of the leaf's largest entry."""
    got = jax.tree_util.tree_leaves_with_path(jax.device_get(params))
    for (path, a), b in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))
