"""Cross-entropy of a large vocabulary without a second copy of the logits."""

import jax
import jax.numpy as jnp

from zerojax.errors import UserError
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

    Raises:
        UserError: if targets or weights are not one for each row of logits, or targets are no integers.

    >>> loss = cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]), jnp.array([1.0, 0.5]))
    >>> round(float(loss.total / loss.weight), 4)  # ln 4
    1.3863
    """
    check_rows("logits", logits, targets, weights)
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    weights = jax.lax.stop_gradient(weights)
    valid = (targets >= 0) & (targets < logits.shape[-1])
    total = (weights * _negative_log_likelihood(logits, jnp.where(valid, targets, 0))).sum()
    return Weighted(jnp.where((valid | (weights == 0)).all(), total, jnp.nan), weights.sum())


def check_rows(name: str, rows: jax.Array, targets: jax.Array, weights: jax.Array | None) -> None:
    """Refuses targets and weights that are not one for each row of an array: they would broadcast, or be cut off."""
    for what, array in (("targets", targets), ("weights", weights)):
        if array is not None and array.shape != rows.shape[:-1]:
            raise UserError(
                f"{what} has shape {array.shape}, and {name} has shape {rows.shape}; accepted: {rows.shape[:-1]}, one "
                "for each row"
            )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise UserError(f"targets has dtype {targets.dtype}; accepted: integers")


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
