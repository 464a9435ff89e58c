"""A decoder-only transformer that a few arguments make GPT-2 or Llama."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.errors import UserError
from zerojax.models.layers import LayerNorm, RMSNorm, rotary_angles, rotate
from zerojax.models.losses import cross_entropy
from zerojax.weighted import Weighted

INIT_STDDEV = 0.02  # Radford et al. 2018

Angles = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
    """Causal self-attention with grouped queries (Ainslie et al. 2023, arXiv:2305.13245).

    The columns of the joint projection lie group by group, ``[q ... q k v]`` for each key-value head, so that a cut of
    the heads over a mesh axis is one contiguous range.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        *,
        bias: bool,
        residual_stddev: float,
        implementation: Literal["xla", "cudnn"] | None,
        rngs: nnx.Rngs,
    ) -> None:
        self.kv_heads, self.queries, self.head_dim = kv_heads, heads // kv_heads, dim // heads
        self.implementation = implementation
        self.qkv = linear(dim, kv_heads * (self.queries + 2) * self.head_dim, INIT_STDDEV, bias, rngs)
        self.out = linear(dim, dim, residual_stddev, bias, rngs)

    def __call__(self, x: jax.Array, angles: Angles | None) -> jax.Array:
        """(batch, length, dim) to the same; ``angles`` of `rotary_angles` turn queries and keys."""
        batch, length, dim = x.shape
        qkv = self.qkv(x).reshape(batch, length, self.kv_heads, self.queries + 2, self.head_dim)
        q = qkv[..., :-2, :].reshape(batch, length, self.kv_heads * self.queries, self.head_dim)
        k, v = qkv[..., -2, :], qkv[..., -1, :]
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.implementation)
        return self.out(mixed.reshape(batch, length, dim))


class MLP(nnx.Module):
    """``down(gelu(up(x)))``, or with ``gated`` ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202, eq. 6).

    Gate and up share one projection: column ``2i`` is the gate of column ``2i + 1``.
    """

    def __init__(
        self, dim: int, hidden: int, *, gated: bool, bias: bool, residual_stddev: float, rngs: nnx.Rngs
    ) -> None:
        self.gated = gated
        self.up = linear(dim, 2 * hidden if gated else hidden, INIT_STDDEV, bias, rngs)
        self.down = linear(hidden, dim, residual_stddev, bias, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.up(x)
        if self.gated:
            gate, x = jnp.split(x, 2, axis=-1)
            return self.down(jax.nn.silu(gate) * x)
        return self.down(jax.nn.gelu(x, approximate=True))


class Block(nnx.Module):
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

    def __call__(self, h: jax.Array, rng: jax.Array | None, angles: Angles | None) -> jax.Array:
        rngs = (None, None) if rng is None else jax.random.split(rng)
        h = h + drop(self.attention(self.attention_norm(h), angles), self.dropout, rngs[0])
        return h + drop(self.mlp(self.mlp_norm(h)), self.dropout, rngs[1])


class GPT(nnx.Module):
    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        layers: int,
        heads: int,
        max_length: int,
        kv_heads: int | None = None,
        mlp_dim: int | None = None,
        norm: Literal["layernorm", "rmsnorm"] = "layernorm",
        mlp: Literal["gelu", "swiglu"] = "gelu",
        positions: Literal["learned", "rope"] = "learned",
        rope_theta: float = 10_000.0,
        bias: bool = True,
        tied: bool = True,
        dropout: float = 0.0,
        remat: bool = False,
        scan: bool = True,
        attention_implementation: Literal["xla", "cudnn"] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        residual_stddev = INIT_STDDEV / (2 * layers) ** 0.5

        def make_norm() -> LayerNorm | RMSNorm:
            return LayerNorm(dim, bias=bias) if norm == "layernorm" else RMSNorm(dim)

        def make_block(key: jax.Array) -> Block:
            block_rngs = nnx.Rngs(key)
            attention = Attention(
                dim,
                heads,
                kv_heads,
                bias=bias,
                residual_stddev=residual_stddev,
                implementation=attention_implementation,
                rngs=block_rngs,
            )
            gated = mlp == "swiglu"
            feed_forward = MLP(
                dim, mlp_dim or 4 * dim, gated=gated, bias=bias, residual_stddev=residual_stddev, rngs=block_rngs
            )
            return Block((make_norm(), make_norm()), attention, feed_forward, dropout)

        self.layers, self.dropout, self.remat, self.scan = layers, dropout, remat, scan
        self.rope = (dim // heads, rope_theta) if positions == "rope" else None
        normal = jax.nn.initializers.normal(INIT_STDDEV)
        self.embedding = nnx.Param(normal(rngs.params(), (vocab_size, dim)))
        self.positions = nnx.Param(normal(rngs.params(), (max_length, dim))) if positions == "learned" else None
        keys = jax.random.split(rngs.params(), layers)
        self.blocks = nnx.vmap(make_block)(keys) if scan else nnx.List([make_block(key) for key in keys])
        self.final_norm = make_norm()
        self.head = None if tied else linear(dim, vocab_size, INIT_STDDEV, False, rngs)

    def __call__(self, tokens: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        length = tokens.shape[-1]
        table = self.embedding[...]
        h = table[tokens]
        if self.positions is not None:
            h = h + self.positions[...][:length]
        angles = None if self.rope is None else rotary_angles(length, *self.rope)
        keys = None
        if rng is not None and self.dropout > 0:
            first, rest = jax.random.split(rng)
            h = drop(h, self.dropout, first)
            keys = jax.random.split(rest, self.layers)
        h = self._through_blocks(h, keys, angles)
        h = self.final_norm(h)
        return h @ table.T if self.head is None else self.head(h)

    def _through_blocks(self, h: jax.Array, keys: jax.Array | None, angles: Angles | None) -> jax.Array:
        def apply(block: Block, h: jax.Array, key: jax.Array | None) -> jax.Array:
            return block(h, key, angles)

        if self.scan:
            apply = nnx.remat(apply, prevent_cse=False) if self.remat else apply
            through = nnx.scan(lambda h, block, key: apply(block, h, key), in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
            return through(h, self.blocks, keys)
        apply = nnx.remat(apply) if self.remat else apply
        for i, block in enumerate(self.blocks):
            h = apply(block, h, None if keys is None else keys[i])
        return h


def linear(inputs: int, outputs: int, stddev: float, bias: bool, rngs: nnx.Rngs) -> nnx.Linear:
    """(..., inputs) to (..., outputs), kernel normal with ``stddev``, bias zero."""
    return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=jax.nn.initializers.normal(stddev), rngs=rngs)


def drop(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity without ``rng``."""
    if rng is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(rng, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def next_token_loss(model: Callable[..., jax.Array], batch: dict[str, Any], rng: jax.Array | None = None) -> Weighted:
    tokens = batch["tokens"].astype(jnp.int32)
    logits = model(tokens[:, :-1], rng)
    return cross_entropy(logits, tokens[:, 1:], batch.get("weights"))
