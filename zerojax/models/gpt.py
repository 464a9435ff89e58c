"""A decoder-only transformer that a few arguments make GPT-2 or Llama."""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.errors import UserError
from zerojax.models.layers import LayerNorm, RMSNorm, causal_attention, gelu, rotary_angles, rotate, swiglu
from zerojax.models.losses import cross_entropy
from zerojax.weighted import Weighted

INIT_STDDEV = 0.02  # GPT-2's

Angles = tuple[jax.Array, jax.Array]
AttentionImplementation = Literal["xla", "cudnn"] | None


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
        out_stddev: float,
        implementation: AttentionImplementation,
        rngs: nnx.Rngs,
    ) -> None:
        self.kv_heads, self.group, self.head_dim = kv_heads, heads // kv_heads, dim // heads
        self.implementation = implementation
        self.qkv = linear(dim, kv_heads * (self.group + 2) * self.head_dim, INIT_STDDEV, bias, rngs)
        self.out = linear(dim, dim, out_stddev, bias, rngs)

    def __call__(self, x: jax.Array, angles: Angles | None) -> jax.Array:
        """(batch, length, dim) to the same; ``angles`` (of `rotary_angles`) turn the queries and keys."""
        batch, length, dim = x.shape
        qkv = self.qkv(x).reshape(batch, length, self.kv_heads, self.group + 2, self.head_dim)
        q = qkv[..., :-2, :].reshape(batch, length, self.kv_heads * self.group, self.head_dim)
        k, v = qkv[..., -2, :], qkv[..., -1, :]
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        return self.out(causal_attention(q, k, v, self.implementation).reshape(batch, length, dim))


class MLP(nnx.Module):
    """``down(gelu(up(x)))``, or gated ``down(silu(gate(x)) * up(x))`` with gate and up in one projection, in halves."""

    def __init__(self, dim: int, mlp_dim: int, *, gated: bool, bias: bool, out_stddev: float, rngs: nnx.Rngs) -> None:
        self.gated = gated
        self.up = linear(dim, 2 * mlp_dim if gated else mlp_dim, INIT_STDDEV, bias, rngs)
        self.down = linear(mlp_dim, dim, out_stddev, bias, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., dim) to the same."""
        x = self.up(x)
        return self.down(swiglu(*jnp.split(x, 2, axis=-1)) if self.gated else gelu(x))


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
        """(batch, length, dim) to the same; drops nothing without ``rng``."""
        first, second = (None, None) if rng is None else jax.random.split(rng)
        h = h + drop(self.attention(self.attention_norm(h), angles), self.dropout, first)
        return h + drop(self.mlp(self.mlp_norm(h)), self.dropout, second)


class GPT(nnx.Module):
    """A pre-norm causal transformer, from GPT-2 (the defaults) to Llama.

    Parameters are born in fp32, normal with standard deviation 0.02, ``0.02 / sqrt(2 * layers)`` for the projections
    back into the residual stream (Radford et al. 2019, section 2.3). The model computes in the dtype of the parameters
    that it finds; norms, activations, rotation and softmax compute in fp32. A seed gives the same weights scanned and
    unscanned. Every parameter is read once in a forward pass, inside the layer that owns it.

    Args:
        vocab_size: number of tokens.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: number of query heads; divides ``dim``.
        max_length: longest sequence; learned positions have as many rows.
        kv_heads: number of key-value heads, divides ``heads``; None for ``heads``.
        mlp_dim: hidden width of the MLP; None for ``4 * dim``.
        norm: LayerNorm or RMSNorm, epsilon 1e-5.
        mlp: GELU, or gated SiLU with three matrices.
        positions: learned and added to the embedding, or rotary inside attention.
        rope_theta: the base of the rotary frequencies.
        bias: whether projections and LayerNorm have one.
        tied: whether the head is the embedding's transpose.
        dropout: rate after the embedding and on both branches of a block.
        remat: whether a block keeps only its input for the backward pass.
        scan: whether the blocks are one stack under `jax.lax.scan` (compile time does not grow with depth) or a list.
        attention_implementation: of `jax.nn.dot_product_attention`; "cudnn" wants fp16 or bf16 on a GPU.
        rngs: the stream ``params`` is drawn from.

    Raises:
        UserError: a size that does not divide or a choice that is not offered.

    >>> model = GPT(vocab_size=64, dim=16, layers=2, heads=2, max_length=8, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 5), jnp.int32)).shape
    (3, 5, 64)
    """

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
        attention_implementation: AttentionImplementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        mlp_dim = 4 * dim if mlp_dim is None else mlp_dim
        _check_divides("heads", heads, "dim", dim)
        _check_divides("kv_heads", kv_heads, "heads", heads)
        _check_choice("norm", norm, ("layernorm", "rmsnorm"))
        _check_choice("mlp", mlp, ("gelu", "swiglu"))
        _check_choice("positions", positions, ("learned", "rope"))
        _check_choice("attention_implementation", attention_implementation, (None, "xla", "cudnn"))
        if positions == "rope" and dim // heads % 2:
            raise UserError(f"dim={dim} over heads={heads}: rope turns pairs, so a head's width must be even")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout={dropout}: must lie in [0, 1)")
        out_stddev = INIT_STDDEV / (2 * layers) ** 0.5
        normal = jax.nn.initializers.normal(INIT_STDDEV)

        def make_norm() -> LayerNorm | RMSNorm:
            return LayerNorm(dim, bias=bias) if norm == "layernorm" else RMSNorm(dim)

        def make_block(key: jax.Array) -> Block:
            init = nnx.Rngs(key)
            attention = Attention(
                dim,
                heads,
                kv_heads,
                bias=bias,
                out_stddev=out_stddev,
                implementation=attention_implementation,
                rngs=init,
            )
            feed_forward = MLP(dim, mlp_dim, gated=mlp == "swiglu", bias=bias, out_stddev=out_stddev, rngs=init)
            return Block((make_norm(), make_norm()), attention, feed_forward, dropout)

        self.layers, self.max_length, self.dropout = layers, max_length, dropout
        self.vocab_size, self.remat = vocab_size, remat
        self.deterministic = False  # set by nnx's `eval()`: nothing is dropped then
        self.rope = (dim // heads, rope_theta) if positions == "rope" else None
        self.embedding = nnx.Param(normal(rngs.params(), (vocab_size, dim)))
        self.positions = nnx.Param(normal(rngs.params(), (max_length, dim))) if positions == "learned" else None
        keys = jax.random.split(rngs.params(), layers)
        self.blocks: Block | nnx.List[Block] = (
            nnx.vmap(make_block)(keys) if scan else nnx.List([make_block(key) for key in keys])
        )
        self.final_norm = make_norm()
        self.head = None if tied else linear(dim, vocab_size, INIT_STDDEV, False, rngs)

    def __call__(self, tokens: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """(batch, length) integers to logits (batch, length, vocab_size) in the parameters' dtype.

        ``rng`` is the key of the dropout masks; without it, and in evaluation mode, nothing is dropped.
        """
        length = tokens.shape[-1]
        if length > self.max_length:
            raise UserError(f"a sequence of {length} tokens: the model's max_length is {self.max_length}")
        embedding = self.embedding[...]  # also the tied head's: read once, so that it is gathered and reduced once
        h = embedding[tokens]
        if self.positions is not None:
            h = h + self.positions[...][:length]
        keys = None
        if rng is not None and self.dropout > 0 and not self.deterministic:
            rng, first = jax.random.split(rng)
            h, keys = drop(h, self.dropout, first), jax.random.split(rng, self.layers)
        h = self.final_norm(self._apply_blocks(h, keys))
        return h @ embedding.T if self.head is None else self.head(h)

    def _apply_blocks(self, h: jax.Array, keys: jax.Array | None) -> jax.Array:
        angles = None if self.rope is None else rotary_angles(h.shape[1], *self.rope)

        # A module is a pytree: jax.lax.scan slices the stack, and the parameters are read inside the layer. nnx.scan
        # over nnx.remat would return the whole stack of weights as a second output of the loop.
        def layer(h: jax.Array, block_and_key: tuple[Block, jax.Array | None]) -> tuple[jax.Array, None]:
            block, key = block_and_key
            return block(h, key, angles), None

        if self.remat:
            layer = jax.checkpoint(layer, prevent_cse=not isinstance(self.blocks, Block))
        if isinstance(self.blocks, Block):
            return jax.lax.scan(layer, h, (self.blocks, keys))[0]
        for i, block in enumerate(self.blocks):
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


def next_token_loss(model: GPT, batch: Mapping[str, jax.Array], rng: jax.Array | None = None) -> Weighted:
    """Cross-entropy in nats of every token but the first, given those before it.

    Args:
        model: tokens (batch, length) and ``rng`` to logits.
        batch: ``tokens`` (batch, length + 1) of any integer dtype and, optionally, ``weights`` (batch, length), one
            for each predicted token.
        rng: the key of the dropout masks; None for none.

    >>> model = GPT(vocab_size=64, dim=16, layers=2, heads=2, max_length=8, rngs=nnx.Rngs(0))
    >>> loss = next_token_loss(model, {"tokens": jnp.zeros((3, 9), jnp.uint8)})
    >>> float(loss.weight)
    24.0
    """
    tokens = batch["tokens"].astype(jnp.int32)
    return cross_entropy(model(tokens[:, :-1], rng), tokens[:, 1:], batch.get("weights"))


def _check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    if value < 1 or whole % value:
        raise UserError(f"{name}={value}: must be a positive divisor of {whole_name}={whole}")


def _check_choice(name: str, value: str | None, accepted: tuple[str | None, ...]) -> None:
    if value not in accepted:
        raise UserError(f"{name}={value!r}: must be one of {', '.join(map(repr, accepted))}")
