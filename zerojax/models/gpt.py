"""A decoder-only transformer that a few arguments make GPT-2 or Llama."""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.errors import UserError
from zerojax.models.chunked import chunked_cross_entropy
from zerojax.models.layers import LayerNorm, RMSNorm, rotary_angles
from zerojax.models.losses import cross_entropy
from zerojax.models.transformer import (
    INIT_STDDEV,
    MLP,
    Attention,
    AttentionImplementation,
    PreNormBlock,
    apply_blocks,
    check_choice,
    check_divides,
    check_dropout,
    drop,
    linear,
    make_blocks,
)
from zerojax.weighted import Weighted


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
        norm: LayerNorm or RMSNorm.
        norm_epsilon: added to the variance or mean square of the norms.
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
        norm_epsilon: float = 1e-5,
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
        check_divides("heads", heads, "dim", dim)
        check_divides("kv_heads", kv_heads, "heads", heads)
        check_choice("norm", norm, ("layernorm", "rmsnorm"))
        check_choice("mlp", mlp, ("gelu", "swiglu"))
        check_choice("positions", positions, ("learned", "rope"))
        check_choice("attention_implementation", attention_implementation, (None, "xla", "cudnn"))
        if positions == "rope" and dim // heads % 2:
            raise UserError(f"dim={dim} over heads={heads}: rope turns pairs, so a head's width must be even")
        check_dropout(dropout)
        out_stddev = INIT_STDDEV / (2 * layers) ** 0.5
        normal = jax.nn.initializers.normal(INIT_STDDEV)

        def make_norm() -> LayerNorm | RMSNorm:
            if norm == "layernorm":
                return LayerNorm(dim, bias=bias, epsilon=norm_epsilon)
            return RMSNorm(dim, epsilon=norm_epsilon)

        def make_block(key: jax.Array) -> PreNormBlock:
            init = nnx.Rngs(key)
            attention = Attention(
                dim,
                heads,
                kv_heads,
                causal=True,
                bias=bias,
                out_stddev=out_stddev,
                implementation=attention_implementation,
                rngs=init,
            )
            feed_forward = MLP(dim, mlp_dim, activation=mlp, bias=bias, out_stddev=out_stddev, rngs=init)
            return PreNormBlock((make_norm(), make_norm()), attention, feed_forward, dropout)

        self.layers, self.max_length, self.dropout = layers, max_length, dropout
        self.vocab_size, self.remat = vocab_size, remat
        self.deterministic = False  # set by nnx's `eval()`: nothing is dropped then
        self.rope = (dim // heads, rope_theta) if positions == "rope" else None
        self.embedding = nnx.Param(normal(rngs.params(), (vocab_size, dim)))
        self.positions = nnx.Param(normal(rngs.params(), (max_length, dim))) if positions == "learned" else None
        self.blocks = make_blocks(make_block, layers, scan=scan, rngs=rngs)
        self.final_norm = make_norm()
        self.head = None if tied else linear(dim, vocab_size, INIT_STDDEV, False, rngs)

    def __call__(self, tokens: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """(batch, length) integers to logits (batch, length, vocab_size) in the parameters' dtype.

        ``rng`` is the key of the dropout masks; without it, and in evaluation mode, nothing is dropped.
        """
        hidden, head = self.hidden(tokens, rng)
        return hidden @ head

    def hidden(self, tokens: jax.Array, rng: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """The states below the head (batch, length, dim), and the head (dim, vocab_size); arguments as of the call."""
        length = tokens.shape[-1]
        if length > self.max_length:
            raise UserError(f"a sequence of {length} tokens: the model's max_length is {self.max_length}")
        embedding = self.embedding[...]  # also the tied head: read once, so that it is gathered and reduced once
        h = embedding[tokens]
        if self.positions is not None:
            h = h + self.positions[...][:length]
        keys = None
        if rng is not None and self.dropout > 0 and not self.deterministic:
            rng, first = jax.random.split(rng)
            h, keys = drop(h, self.dropout, first), jax.random.split(rng, self.layers)
        angles = None if self.rope is None else rotary_angles(length, *self.rope)
        h = apply_blocks(self.blocks, lambda block, h, key: block(h, key, angles), h, keys, remat=self.remat)
        return self.final_norm(h), embedding.T if self.head is None else self.head.kernel[...]


def next_token_loss(
    model: GPT, batch: Mapping[str, jax.Array], rng: jax.Array | None = None, chunks: int | None = None
) -> Weighted:
    """Cross-entropy in nats of every token but the first, given those before it.

    Args:
        model: tokens (batch, length) and ``rng`` to logits.
        batch: ``tokens`` (batch, length + 1) of any integer dtype and, optionally, ``weights`` (batch, length), one
            for each predicted token.
        rng: the key of the dropout masks; None for none.
        chunks: the number of parts that the logits are computed in, one after another, as by `chunked_cross_entropy`;
            None for all at once, which in fp32 are 4 bytes x tokens x vocab_size.

    >>> model = GPT(vocab_size=64, dim=16, layers=2, heads=2, max_length=8, rngs=nnx.Rngs(0))
    >>> loss = next_token_loss(model, {"tokens": jnp.zeros((3, 9), jnp.uint8)})
    >>> float(loss.weight)
    24.0
    """
    tokens = batch["tokens"].astype(jnp.int32)
    inputs, targets, weights = tokens[:, :-1], tokens[:, 1:], batch.get("weights")
    if chunks is None:
        return cross_entropy(model(inputs, rng), targets, weights)
    return chunked_cross_entropy(*model.hidden(inputs, rng), targets, weights, chunks=chunks)
