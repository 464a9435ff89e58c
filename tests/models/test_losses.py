"""Cross-entropy against float64 NumPy, and its memory against optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax import UserError
from zerojax.models.losses import cross_entropy


def float64(logits, targets, weights):
    """Total, weight and the total's gradient."""
    logits, weights = np.asarray(logits, np.float64), np.asarray(weights, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    hit = np.eye(logits.shape[-1])[targets]
    nll = np.log(np.exp(shifted).sum(-1)) - (shifted * hit).sum(-1)
    return (weights * nll).sum(), weights.sum(), weights[..., None] * (probabilities - hit)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 2**-8)])
def test_equals_float64(dtype, tolerance):
    logits = (8 * jax.random.normal(jax.random.key(0), (3, 5, 97))).astype(dtype)
    targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 97)
    weights = jax.random.uniform(jax.random.key(2), (3, 5))
    total, weight, gradient = float64(logits.astype(jnp.float32), targets, weights)
    got = cross_entropy(logits, targets, weights)
    np.testing.assert_allclose(got.total, total, rtol=1e-6)
    np.testing.assert_allclose(got.weight, weight, rtol=1e-6)
    got_gradient = jax.grad(lambda x: cross_entropy(x, targets, weights).total)(logits)
    assert got_gradient.dtype == dtype
    np.testing.assert_allclose(got_gradient.astype(jnp.float32), gradient, rtol=tolerance, atol=tolerance / 100)


def test_no_weights_is_one_each_and_huge_logits_stay_finite():
    logits, targets = jnp.array([[1e4, -1e4], [-1e4, 1e4]]), jnp.array([0, 0])
    loss = cross_entropy(logits, targets)
    assert (float(loss.total), float(loss.weight)) == (2e4, 2.0)


def test_weights_have_no_gradient():
    logits, targets = jnp.ones((4, 8)), jnp.zeros(4, jnp.int32)
    gradient = jax.grad(lambda w: cross_entropy(logits, targets, w).total)(jnp.ones(4))
    assert not gradient.any()


def test_keeps_one_copy_of_the_logits_where_optax_keeps_more():
    """Bytes that wait between the forward and the backward pass, and the compiled temporaries."""
    logits = jnp.zeros((512, 4096), jnp.bfloat16)
    targets = jnp.zeros(512, jnp.int32)

    def ours(x):
        return cross_entropy(x, targets).total

    def plain(x):
        return optax.softmax_cross_entropy_with_integer_labels(x.astype(jnp.float32), targets).sum()

    def kept(loss):
        return sum(x.nbytes for x in jax.tree.leaves(jax.vjp(loss, logits)[1]))

    def temporaries(loss):
        def step(w, x):
            return loss(x @ w)

        shapes = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
        compiled = jax.jit(jax.grad(step, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert kept(ours) < 1.01 * logits.nbytes
    assert kept(plain) >= 2 * logits.nbytes
    assert temporaries(ours) <= temporaries(plain)


@pytest.mark.parametrize("target", [-1, 3, -100])
def test_a_target_out_of_range_is_no_other_class(target):
    logits, targets = jnp.array([[1.0, 2.0, 5.0], [0.0, 3.0, 1.0]]), jnp.array([target, 1])
    assert np.isnan(cross_entropy(logits, targets).total)
    weighted = cross_entropy(logits, targets, jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(weighted.total, cross_entropy(logits[1:], targets[1:]).total, rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 1), (1, 4), (3,)])
def test_weights_that_would_broadcast(shape):
    with pytest.raises(UserError, match=r"weights has shape .*, and logits has shape \(2, 4, 16\); accepted: \(2, 4\)"):
        cross_entropy(jnp.zeros((2, 4, 16)), jnp.zeros((2, 4), int), jnp.ones(shape))
