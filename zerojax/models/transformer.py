"""The modules that transformers share: attention, the feed-forward layer, and a stack of blocks."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.errors import UserError
from zerojax.models.layers import LayerNorm, RMSNorm, attention, causal_attention, erf_gelu, gelu, rotate, swiglu

INIT_STDDEV = 0.02  # GPT-2's, BERT's and ViT's

Angles = tuple[jax.Array, jax.Array]
AttentionImplementation = Literal["xla", "cudnn"] | None
Activation = Literal["gelu", "erf_gelu", "swiglu"]
B = TypeVar("B", bound=nnx.Module)


class Attention(nnx.Module):
    """Self-attention with grouped queries (Ainslie et al. 2023, arXiv:2305.13245).

    The columns of the joint projection lie group by group, ``[q ... q k v]`` for each key-value head, so that a cut of
    the heads over a mesh axis is one contiguous range.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        *,
        causal: bool,
        bias: bool,
        out_stddev: float,
        implementation: AttentionImplementation,
        rngs: nnx.Rngs,
    ) -> None:
        self.kv_heads, self.group, self.head_dim = kv_heads, heads // kv_heads, dim // heads
        self.causal, self.implementation = causal, implementation
        self.qkv = linear(dim, kv_heads * (self.group + 2) * self.head_dim, INIT_STDDEV, bias, rngs)
        self.out = linear(dim, dim, out_stddev, bias, rngs)

    def __call__(self, x: jax.Array, angles: Angles | None = None, visible: jax.Array | None = None) -> jax.Array:
        """(batch, length, dim) to the same.

        ``angles`` (of `rotary_angles`) turn the queries and keys; ``visible`` (batch, length) is of `attention`, for
        attention that is not causal.
        """
        batch, length, dim = x.shape
        qkv = self.qkv(x).reshape(batch, length, self.kv_heads, self.group + 2, self.head_dim)
        q = qkv[..., :-2, :].reshape(batch, length, self.kv_heads * self.group, self.head_dim)
        k, v = qkv[..., -2, :], qkv[..., -1, :]
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        if self.causal:
            mixed = causal_attention(q, k, v, self.implementation)
        else:
            mixed = attention(q, k, v, visible, self.implementation)
        return self.out(mixed.reshape(batch, length, dim))


class MLP(nnx.Module):
    """``down(gelu(up(x)))``, or gated ``down(silu(gate(x)) * up(x))`` with gate and up in one projection, in halves."""

    def __init__(
        self, dim: int, mlp_dim: int, *, activation: Activation, bias: bool, out_stddev: float, rngs: nnx.Rngs
    ) -> None:
        self.activation = activation
        self.up = linear(dim, 2 * mlp_dim if activation == "swiglu" else mlp_dim, INIT_STDDEV, bias, rngs)
        self.down = linear(mlp_dim, dim, out_stddev, bias, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., dim) to the same."""
        x = self.up(x)
        match self.activation:
            case "gelu":
                x = gelu(x)
            case "erf_gelu":
                x = erf_gelu(x)
            case "swiglu":
                x = swiglu(*jnp.split(x, 2, axis=-1))
        return self.down(x)


class PreNormBlock(nnx.Module):
    """Pre-norm residual block: ``h + attention(norm(h))``, then ``h + mlp(norm(h))``."""

    def __init__(
        self,
        norms: tuple[LayerNorm | RMSNorm, LayerNorm | RMSNorm],
        attention: Attention,
        mlp: MLP,
        dropout: float,
    ) -> None:
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp, self.dropout = attention, mlp, dropout

    def __call__(self, h: jax.Array, rng: jax.Array | None, angles: Angles | None = None) -> jax.Array:
        """(batch, length, dim) to the same; drops nothing without ``rng``."""
        first, second = (None, None) if rng is None else jax.random.split(rng)
        h = h + drop(self.attention(self.attention_norm(h), angles), self.dropout, first)
        return h + drop(self.mlp(self.mlp_norm(h)), self.dropout, second)


def make_blocks(make_block: Callable[[jax.Array], B], layers: int, *, scan: bool, rngs: nnx.Rngs) -> B | nnx.List[B]:
    """``layers`` blocks, each made from a key of its own: one stack for `apply_blocks` to scan, or a list."""
    keys = jax.random.split(rngs.params(), layers)
    return nnx.vmap(make_block)(keys) if scan else nnx.List([make_block(key) for key in keys])


def apply_blocks(
    blocks: B | nnx.List[B],
    apply: Callable[[B, jax.Array, jax.Array | None], jax.Array],
    h: jax.Array,
    keys: jax.Array | None,
    *,
    remat: bool,
) -> jax.Array:
    """``h`` through all blocks of `make_blocks`.

    Args:
        blocks: one stack, which runs under `jax.lax.scan` (compile time does not grow with depth), or a list.
        apply: a block, its input and its key to its output, of the input's shape.
        h: the first block's input.
        keys: one for each block; None for None.
        remat: whether a block keeps only its input for the backward pass.
    """

    # A module is a pytree: jax.lax.scan slices the stack, and the parameters are read inside the layer. nnx.scan
    # over nnx.remat would return the whole stack of weights as a second output of the loop.
    def layer(h: jax.Array, block_and_key: tuple[Any, jax.Array | None]) -> tuple[jax.Array, None]:
        block, key = block_and_key
        return apply(block, h, key), None

    if remat:
        layer = jax.checkpoint(layer, prevent_cse=isinstance(blocks, nnx.List))
    if not isinstance(blocks, nnx.List):
        return jax.lax.scan(layer, h, (blocks, keys))[0]
    for i, block in enumerate(blocks):
        h, _ = layer(h, (block, None if keys is None else keys[i]))
    return h


def linear(inputs: int, outputs: int, stddev: float, bias: bool, rngs: nnx.Rngs) -> nnx.Linear:
    """(..., inputs) to (..., outputs), kernel normal with ``stddev``, bias zero."""
    return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=jax.nn.initializers.normal(stddev), rngs=rngs)


def drop(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Zeroes a share ``rate`` of ``x`` and scales the rest by ``1 / (1 - rate)``; the identity without ``rng``."""
    if rng is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(rng, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """Raises: UserError: ``value`` is no positive divisor of ``whole``."""
    if value < 1 or whole % value:
        raise UserError(f"{name}={value}: must be a positive divisor of {whole_name}={whole}")


def check_choice(name: str, value: str | None, accepted: tuple[str | None, ...]) -> None:
    """Raises: UserError: ``value`` is none of ``accepted``."""
    if value not in accepted:
        raise UserError(f"{name}={value!r}: must be one of {', '.join(map(repr, accepted))}")


def check_dropout(dropout: float) -> None:
    """Raises: UserError: the rate lies outside of [0, 1)."""
    if not 0 <= dropout < 1:
        raise UserError(f"dropout={dropout}: must lie in [0, 1)")
