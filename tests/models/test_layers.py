"""The layers against float64 NumPy and plain autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.models.layers import (
    attention,
    causal_attention,
    erf_gelu,
    gelu,
    layer_norm,
    rms_norm,
    rotary_angles,
    rotate,
    swiglu,
)


def plain_norm(x, scale, bias, centred, epsilon=1e-5):
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True) if centred else x
    y = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon) * scale
    return y if bias is None else y + bias


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


NORMS = {
    "layer_norm": (layer_norm, True, True),
    "layer_norm without bias": (layer_norm, True, False),
    "rms_norm": (rms_norm, False, False),
}


@pytest.mark.parametrize("norm, centred, with_bias", NORMS.values(), ids=NORMS)
def test_norm_equals_plain_autodiff(norm, centred, with_bias):
    x, weight = 2 + 3 * normal(0, 4, 5, 32), normal(1, 4, 5, 32)
    params = (1 + normal(2, 32), normal(3, 32)) if with_bias else (1 + normal(2, 32),)
    each = tuple(range(1 + len(params)))
    ours = jax.value_and_grad(lambda x, *p: (weight * norm(x, *p)).sum(), each)
    plain = jax.value_and_grad(
        lambda x, *p: (weight * plain_norm(x, p[0], p[1] if with_bias else None, centred)).sum(), each
    )
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, ours(x, *params), plain(x, *params))


@pytest.mark.parametrize("norm, centred", [(layer_norm, True), (rms_norm, False)])
def test_epsilon_is_that_which_is_given(norm, centred):
    x, scale = normal(0, 4, 32) / 100, 1 + normal(1, 32)
    ours = jax.value_and_grad(lambda x: norm(x, scale, epsilon=1e-3).sum())
    plain = jax.value_and_grad(lambda x: plain_norm(x, scale, None, centred, 1e-3).sum())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), ours(x), plain(x))


def test_norm_of_bf16_is_computed_in_fp32():
    x, scale = 100 + normal(0, 64, 256), 1 + normal(1, 256)
    x16, scale16 = x.astype(jnp.bfloat16), scale.astype(jnp.bfloat16)
    want = plain_norm(x16, scale16.astype(jnp.float32), None, True)
    got = layer_norm(x16, scale16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    "ours, plain, arity",
    [(gelu, lambda x: 0.5 * x * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3))), 1),
     (erf_gelu, lambda x: 0.5 * x * (1 + jax.lax.erf(x / 2**0.5)), 1),
     (swiglu, lambda g, x: g / (1 + jnp.exp(-g)) * x, 2)],
)  # fmt: skip
def test_activation_equals_its_formula_and_keeps_only_its_inputs(ours, plain, arity):
    args = tuple(normal(i, 64) for i in range(arity))
    for got, want in zip(jax.vjp(ours, *args)[1](args[0]), jax.vjp(plain, *args)[1](args[0]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours(*args), plain(*args), rtol=1e-5, atol=1e-6)
    half = tuple(x.astype(jnp.bfloat16) for x in args)
    kept = jax.tree.leaves(jax.vjp(ours, *half)[1])
    assert sum(x.nbytes for x in kept) == arity * 64 * 2


def test_rotated_products_depend_on_the_distance_alone():
    q, k = normal(0, 8), normal(1, 8)
    cos, sin = rotary_angles(32, 8, 10_000.0)
    q, k = (rotate(jnp.broadcast_to(x, (1, 32, 1, 8)), cos, sin)[0, :, 0] for x in (q, k))
    products = np.asarray(q @ k.T)
    for distance in (-20, -1, 0, 3, 17):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(products[0]) > 0.1


def test_rotation_is_the_complex_product():
    x, theta = np.asarray(normal(0, 2, 16, 3, 8), np.float64), 500.0
    angle = np.arange(16)[:, None] * theta ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)[:, None]
    got = rotate(jnp.asarray(x, jnp.float32), *rotary_angles(16, 8, theta))
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=2e-5)


def attention_float64(q, k, v, visible=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    visible = np.tril(np.ones((length, length), bool)) if visible is None else visible
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("length", [1, 3, 16, 21])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_equals_float64_with_repeated_heads(length, kv_heads):
    q, k, v = normal(0, 2, length, 6, 8), normal(1, 2, length, kv_heads, 8), normal(2, 2, length, kv_heads, 8)
    np.testing.assert_allclose(causal_attention(q, k, v), attention_float64(q, k, v), atol=1e-5)


def test_attention_looks_at_what_is_visible_alone():
    q, k, v = normal(0, 3, 7, 6, 8), normal(1, 3, 7, 2, 8), normal(2, 3, 7, 2, 8)
    visible = jnp.arange(7) < jnp.array([[7], [4], [1]])
    want = attention_float64(q, k, v, np.asarray(visible)[:, None, None])
    np.testing.assert_allclose(attention(q, k, v, visible), want, atol=1e-5)
    np.testing.assert_allclose(attention(q, k, v), attention_float64(q, k, v, np.True_), atol=1e-5)


def test_attention_gradient_equals_jax_causal_attention():
    q, k, v, ct = (normal(i, 2, 18, 4, 8) for i in range(4))
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    ours, theirs = (jax.jit(lambda *qkv, f=f: jax.vjp(f, *qkv)[1](ct)) for f in (causal_attention, plain))
    for got, want in zip(ours(q, k, v), theirs(q, k, v), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_takes_fp16(causal):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 6, 2, 4)) for i in range(3))
    run = causal_attention if causal else attention
    half = [x.astype(jnp.float16) for x in (q, k, v)]
    out, gradient = jax.value_and_grad(lambda q: run(q, *half[1:]).astype(jnp.float32).sum())(half[0])
    want, exact = jax.value_and_grad(lambda q: run(q, k, v).sum())(q)
    assert run(*half).dtype == gradient.dtype == jnp.float16
    np.testing.assert_allclose(out, want, rtol=2e-2)
    np.testing.assert_allclose(gradient.astype(np.float32), exact, atol=5e-3)
