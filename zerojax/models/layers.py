"""Normalisation, activations, rotary positions and attention: the pieces of a transformer that own a formula."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

EPSILON = 1e-5  # GPT-2's and Llama's


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, epsilon: float = EPSILON) -> jax.Array:
    """``(x - mean) / sqrt(var + epsilon) * scale + bias`` over the last dim (Ba et al. 2016, arXiv:1607.06450, eq. 4).

    Computed in fp32, returned in ``x``'s dtype. The backward pass starts from the normalised input instead of
    ``x``: the same bytes wait for it, and XLA cannot fuse the statistics into the transposed reads of the weight
    gradients around it, which on the CPU cost more than the norm itself.

    Args:
        x: (..., dim), any float dtype.
        scale: (dim,).
        bias: (dim,), or None for none.
        epsilon: added to the variance.

    >>> layer_norm(jnp.array([1.0, 3.0]), jnp.ones(2), jnp.ones(2)).round(3).tolist()
    [0.0, 2.0]
    """
    return _normalise(True, epsilon, x, scale, bias)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    """``x / sqrt(mean(x**2) + epsilon) * scale`` over the last dim (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4).

    Shapes, dtypes and backward pass as in `layer_norm`.

    >>> rms_norm(jnp.array([3.0, -3.0]), jnp.ones(2)).round(3).tolist()
    [1.0, -1.0]
    """
    return _normalise(False, epsilon, x, scale, None)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalise(centred: bool, epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    return _normalise_forward(centred, epsilon, x, scale, bias)[0]


def _normalise_forward(
    centred: bool, epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]]:
    x32 = x.astype(jnp.float32)
    if centred:
        x32 = x32 - x32.mean(-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + epsilon)
    normal = (x32 * rstd).astype(x.dtype)
    y = normal.astype(jnp.float32) * scale.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype), (normal, rstd, scale, bias)


def _normalise_backward(
    centred: bool, epsilon: float, kept: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None], dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    del epsilon  # rstd holds it
    normal, rstd, scale, bias = kept
    normal32, dy32 = normal.astype(jnp.float32), dy.astype(jnp.float32)
    rows = tuple(range(dy.ndim - 1))
    dscale = (dy32 * normal32).sum(rows).astype(scale.dtype)
    dbias = None if bias is None else dy32.sum(rows).astype(bias.dtype)
    g = dy32 * scale.astype(jnp.float32)
    dx = g - normal32 * (g * normal32).mean(-1, keepdims=True)
    if centred:
        dx = dx - g.mean(-1, keepdims=True)
    return (dx * rstd).astype(dy.dtype), dscale, dbias


_normalise.defvjp(_normalise_forward, _normalise_backward)


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` by `layer_norm`."""

    def __init__(self, dim: int, *, bias: bool = True, epsilon: float = EPSILON) -> None:
        super().__init__(dim, epsilon=epsilon, use_bias=bias, rngs=nnx.Rngs(0))  # 1 and 0: nothing is drawn

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]  # no mask
        assert self.scale is not None
        return layer_norm(x, self.scale[...], None if self.bias is None else self.bias[...], self.epsilon)


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` by `rms_norm`."""

    def __init__(self, dim: int, *, epsilon: float = EPSILON) -> None:
        super().__init__(dim, epsilon=epsilon, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        assert self.scale is not None
        return rms_norm(x, self.scale[...], self.epsilon)


def _keeping_inputs(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """An elementwise function computed in fp32 whose backward pass keeps its inputs, in their own dtype, and no more.

    Plain autodiff keeps every factor of the chain rule, and a scan over layers stacks them all.
    """

    def compute(*args: jax.Array) -> jax.Array:
        return function(*(x.astype(jnp.float32) for x in args)).astype(args[0].dtype)

    wrapped = jax.custom_vjp(compute)
    wrapped.defvjp(lambda *args: (compute(*args), args), lambda args, dy: jax.vjp(compute, *args)[1](dy))
    return wrapped


_gelu = _keeping_inputs(partial(jax.nn.gelu, approximate=True))
_erf_gelu = _keeping_inputs(partial(jax.nn.gelu, approximate=False))
_swiglu = _keeping_inputs(lambda gate, x: jax.nn.silu(gate) * x)


def gelu(x: jax.Array) -> jax.Array:
    """GPT-2's tanh form of ``x * Phi(x)`` (Hendrycks and Gimpel 2016, arXiv:1606.08415), elementwise.

    Computed in fp32 and returned in ``x``'s dtype; only ``x`` is kept for the backward pass.

    >>> gelu(jnp.array([0.0, 100.0])).tolist()
    [0.0, 100.0]
    """
    return _gelu(x)


def erf_gelu(x: jax.Array) -> jax.Array:
    """``x * Phi(x)`` itself, with the error function, as BERT and ViT use it; dtypes and memory as in `gelu`.

    >>> round(float(erf_gelu(jnp.array(1.0))), 4)  # Phi(1)
    0.8413
    """
    return _erf_gelu(x)


def swiglu(gate: jax.Array, x: jax.Array) -> jax.Array:
    """``silu(gate) * x`` elementwise (Shazeer 2020, arXiv:2002.05202, eq. 5), dtypes and memory as in `gelu`.

    >>> swiglu(jnp.array([0.0, 100.0]), jnp.array([3.0, 3.0])).tolist()
    [0.0, 300.0]
    """
    return _swiglu(gate, x)


def rotary_angles(length: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of ``position * theta**(-2i / head_dim)``, each (length, head_dim // 2) in fp32.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 15.

    >>> cos, sin = rotary_angles(4, 6, 10_000.0)
    >>> cos.shape, float(sin[0, 0])
    ((4, 3), 0.0)
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns pair (i, i + head_dim // 2) of each head by its position's angle, as Llama's published weights pair them.

    The dot product of two turned vectors depends on their positions through the difference alone.

    Args:
        x: (batch, length, heads, head_dim), computed in fp32, returned in its own dtype.
        cos, sin: (length, head_dim // 2), of `rotary_angles`.

    >>> quarter = jnp.array([[0.0]]), jnp.array([[1.0]])
    >>> rotate(jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2), *quarter).ravel().tolist()
    [0.0, 1.0]
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


QUERY_BLOCKS = 4


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, implementation: Literal["xla", "cudnn"] | None = None
) -> jax.Array:
    """``softmax(q k^T / sqrt(head_dim)) v`` where a position sees itself and what lies before it; softmax in fp32.

    cuDNN's kernel skips the half of the scores that lies in the future by itself. XLA's does not, so the queries go
    through it in four blocks, each against the keys up to its own end: 5/8 of the work and of the scores kept.

    Args:
        q: (batch, length, heads, head_dim).
        k, v: (batch, length, kv_heads, head_dim); query head i reads kv head ``i // (heads // kv_heads)``.
        implementation: of `jax.nn.dot_product_attention`.

    Returns:
        (batch, length, heads, head_dim) in ``q``'s dtype.

    >>> v = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> causal_attention(jnp.zeros_like(v), v, v).ravel().tolist()
    [1.0, 2.0]
    """
    if implementation == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    length = q.shape[1]
    block = -(-length // QUERY_BLOCKS)
    mixed = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        visible = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        mixed.append(attend(q[:, start:stop], k[:, :stop], v[:, :stop], visible[None, None], implementation))
    return jnp.concatenate(mixed, axis=1)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """``softmax(q k^T / sqrt(head_dim)) v`` where a position sees those that are ``visible``; softmax in fp32.

    Args:
        q, k, v: as in `causal_attention`.
        visible: (batch, length) booleans, which positions may be looked at (those that are not padding); None for all.
        implementation: of `jax.nn.dot_product_attention`.

    Returns:
        (batch, length, heads, head_dim) in ``q``'s dtype.

    >>> v = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> attention(jnp.zeros_like(v), v, v).ravel().tolist()
    [2.0, 2.0]
    """
    return attend(q, k, v, None if visible is None else visible[:, None, None, :], implementation)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    implementation: Literal["xla", "cudnn"] | None,
) -> jax.Array:
    """`jax.nn.dot_product_attention`, where it takes no fp16 with fp32 in its place.

    It asks for products of fp16 that are summed in fp32, which XLA has for GPUs alone.
    """

    def own(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    if q.dtype != jnp.float16:
        return own(q, k, v)
    widened = lambda *qkv: own(*(x.astype(jnp.float32) for x in qkv)).astype(q.dtype)
    return jax.lax.platform_dependent(q, k, v, cuda=own, rocm=own, default=widened)
