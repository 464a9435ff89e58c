"""Cross-entropy of a large vocabulary without a second copy of the logits."""

import jax
import jax.numpy as jnp

from zerojax.weighted import Weighted


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> Weighted:
    """The weighted sum of ``-log softmax(logits)[target]`` in nats, and the sum of the weights.

    Computed in fp32 whatever the logits' dtype. What waits for the backward pass is the logits themselves and one
    fp32 log-normaliser a token; the logits' gradient ``weight * (softmax(logits) - one_hot(target))`` is made in the
    logits' dtype. A target outside of [0, vocab) makes the loss NaN unless its weight is 0: inside a compiled step
    nothing can be raised, and an index that wraps around would be trained as another class.

    Args:
        logits: (..., vocab), any float dtype.
        targets: (...), integers in [0, vocab).
        weights: (...), or None for 1 each. No gradient flows to them.

    >>> loss = cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]), jnp.array([1.0, 0.5]))
    >>> round(float(loss.total / loss.weight), 4)  # ln 4
    1.3863
    """
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    weights = jax.lax.stop_gradient(weights)
    valid = (targets >= 0) & (targets < logits.shape[-1])
    total = (weights * _negative_log_likelihood(logits, jnp.where(valid, targets, 0))).sum()
    return Weighted(jnp.where((valid | (weights == 0)).all(), total, jnp.nan), weights.sum())


@jax.custom_vjp
def _negative_log_likelihood(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return _nll_forward(logits, targets)[0]


def _nll_forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    normaliser = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return normaliser - picked.astype(jnp.float32), (logits, targets, normaliser)


def _nll_backward(kept: tuple[jax.Array, jax.Array, jax.Array], ct: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, normaliser = kept
    probabilities = jnp.exp(logits.astype(jnp.float32) - normaliser[..., None])
    hit = jnp.arange(logits.shape[-1]) == targets[..., None]
    return (ct[..., None] * (probabilities - hit)).astype(logits.dtype), None


_negative_log_likelihood.defvjp(_nll_forward, _nll_backward)
