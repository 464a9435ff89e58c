"""A bidirectional encoder, with heads for masked words, for classes and for sentence embeddings."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.errors import UserError
from zerojax.models.classification import classification
from zerojax.models.layers import LayerNorm, erf_gelu
from zerojax.models.losses import cross_entropy
from zerojax.models.transformer import (
    INIT_STDDEV,
    MLP,
    Attention,
    AttentionImplementation,
    apply_blocks,
    check_choice,
    check_divides,
    check_dropout,
    drop,
    linear,
    make_blocks,
)
from zerojax.weighted import Weighted

MASK_RATE, MASKED, REPLACED = 0.15, 0.8, 0.1  # Devlin et al. 2018, section 3.1


class Block(nnx.Module):
    """Post-norm residual block: ``h = norm(h + attention(h))``, then ``norm(h + mlp(h))``."""

    def __init__(self, norms: tuple[LayerNorm, LayerNorm], attention: Attention, mlp: MLP, dropout: float) -> None:
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp, self.dropout = attention, mlp, dropout

    def __call__(self, h: jax.Array, rng: jax.Array | None, visible: jax.Array | None) -> jax.Array:
        """(batch, length, dim) to the same; drops nothing without ``rng``."""
        first, second = (None, None) if rng is None else jax.random.split(rng)
        h = self.attention_norm(h + drop(self.attention(h, visible=visible), self.dropout, first))
        return self.mlp_norm(h + drop(self.mlp(h), self.dropout, second))


class MaskedLMHead(nnx.Module):
    """Hidden states to logits over the vocabulary, through the transpose of the embedding."""

    def __init__(self, vocab_size: int, dim: int, norm_epsilon: float, rngs: nnx.Rngs) -> None:
        self.dense = linear(dim, dim, INIT_STDDEV, True, rngs)
        self.norm = LayerNorm(dim, epsilon=norm_epsilon)
        self.bias = nnx.Param(jnp.zeros(vocab_size))

    def __call__(self, h: jax.Array, embedding: jax.Array) -> jax.Array:
        """(batch, length, dim) and (vocab, dim) to (batch, length, vocab)."""
        return self.norm(erf_gelu(self.dense(h))) @ embedding.T + self.bias[...]


class BERT(nnx.Module):
    """A post-norm bidirectional transformer (Devlin et al. 2018, arXiv:1810.04805).

    Parameters are born in fp32, kernels and embeddings normal with standard deviation 0.02. The model computes in the
    dtype of the parameters that it finds; norms, activations and softmax compute in fp32. A seed gives the same weights
    scanned and unscanned. Every parameter is read once in a forward pass, inside the layer that owns it. Attention's
    probabilities are not dropped.

    Args:
        vocab_size: number of tokens.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: number of heads; divides ``dim``.
        max_length: longest sequence; learned positions have as many rows.
        mlp_dim: hidden width of the MLP; None for ``4 * dim``.
        token_types: number of segments a token may belong to.
        pooler: whether there is the layer between the first token's state and a classifier.
        classes: number of classes of the head for `classify`; None for no such head.
        masked_lm: whether there is the head for `predict`.
        norm_epsilon: added to the variance in the norms.
        dropout: rate after the embedding, on both branches of a block, and before the classifier.
        remat: whether a block keeps only its input for the backward pass.
        scan: whether the blocks are one stack under `jax.lax.scan` (compile time does not grow with depth) or a list.
        attention_implementation: of `jax.nn.dot_product_attention`; "cudnn" wants fp16 or bf16 on a GPU.
        rngs: the stream ``params`` is drawn from.

    Raises:
        UserError: a size that does not divide, a choice that is not offered, or a classifier without a pooler.

    >>> model = BERT(vocab_size=64, dim=16, layers=2, heads=2, max_length=8, classes=3, rngs=nnx.Rngs(0))
    >>> tokens, mask = jnp.ones((4, 5), jnp.int32), jnp.ones((4, 5), bool)
    >>> model(tokens, mask).shape, model.classify(tokens, mask).shape
    ((4, 5, 16), (4, 3))
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        layers: int,
        heads: int,
        max_length: int,
        mlp_dim: int | None = None,
        token_types: int = 2,
        pooler: bool = True,
        classes: int | None = None,
        masked_lm: bool = False,
        norm_epsilon: float = 1e-12,
        dropout: float = 0.0,
        remat: bool = False,
        scan: bool = True,
        attention_implementation: AttentionImplementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_divides("heads", heads, "dim", dim)
        check_choice("attention_implementation", attention_implementation, (None, "xla", "cudnn"))
        check_dropout(dropout)
        if classes is not None and not pooler:
            raise UserError(f"classes={classes} with pooler=False: a classifier reads the pooler's output")
        normal = jax.nn.initializers.normal(INIT_STDDEV)

        def make_block(key: jax.Array) -> Block:
            init = nnx.Rngs(key)
            attention = Attention(
                dim,
                heads,
                heads,
                causal=False,
                bias=True,
                out_stddev=INIT_STDDEV,
                implementation=attention_implementation,
                rngs=init,
            )
            mlp = MLP(dim, mlp_dim or 4 * dim, activation="erf_gelu", bias=True, out_stddev=INIT_STDDEV, rngs=init)
            norms = LayerNorm(dim, epsilon=norm_epsilon), LayerNorm(dim, epsilon=norm_epsilon)
            return Block(norms, attention, mlp, dropout)

        self.layers, self.max_length, self.dropout, self.remat = layers, max_length, dropout, remat
        self.deterministic = False  # set by nnx's `eval()`: nothing is dropped then
        self.embedding = nnx.Param(normal(rngs.params(), (vocab_size, dim)))
        self.positions = nnx.Param(normal(rngs.params(), (max_length, dim)))
        self.token_types = nnx.Param(normal(rngs.params(), (token_types, dim)))
        self.embedding_norm = LayerNorm(dim, epsilon=norm_epsilon)
        self.blocks = make_blocks(make_block, layers, scan=scan, rngs=rngs)
        self.pooler = linear(dim, dim, INIT_STDDEV, True, rngs) if pooler else None
        self.head = linear(dim, classes, INIT_STDDEV, True, rngs) if classes is not None else None
        self.masked_lm = MaskedLMHead(vocab_size, dim, norm_epsilon, rngs) if masked_lm else None

    def __call__(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """The hidden states (batch, length, dim), in the parameters' dtype.

        Args:
            tokens: (batch, length), integers.
            mask: (batch, length), 0 at padding, which nothing looks at; None for no padding.
            token_types: (batch, length), the segment of each token; None for 0.
            rng: the key of the dropout masks; without it, and in evaluation mode, nothing is dropped.
        """
        return self._encode(tokens, mask, token_types, rng)[0]

    def classify(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (batch, classes) from the first token's state; arguments as of the call."""
        if self.head is None or self.pooler is None:
            raise UserError("classes=None: the model was made without a classifier; give the number of classes")
        rng, last = (None, None) if rng is None else jax.random.split(rng)
        h = self._encode(tokens, mask, token_types, rng)[0]
        pooled = jnp.tanh(self.pooler(h[:, 0]))
        return self.head(drop(pooled, self.dropout, None if self.deterministic else last))

    def predict(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (batch, length, vocab_size) of the token at each position; arguments as of the call."""
        if self.masked_lm is None:
            raise UserError("masked_lm=False: the model was made without the head that predicts tokens")
        return self.masked_lm(*self._encode(tokens, mask, token_types, rng))

    def embed_sentences(self, tokens: jax.Array, mask: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        """(batch, dim) in fp32 of length 1: the mean state of the tokens that are not padding, normalised.

        Source: Reimers and Gurevych 2019, arXiv:1908.10084, section 3 (MEAN pooling). Products are cosines.
        """
        h, weights = self(tokens, mask, token_types).astype(jnp.float32), mask.astype(jnp.float32)[..., None]
        mean = (h * weights).sum(1) / jnp.maximum(weights.sum(1), 1)
        return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)

    def _encode(
        self, tokens: jax.Array, mask: jax.Array | None, token_types: jax.Array | None, rng: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The hidden states, and the embedding: read once, so that it is gathered and reduced once."""
        length = tokens.shape[-1]
        if length > self.max_length:
            raise UserError(f"a sequence of {length} tokens: the model's max_length is {self.max_length}")
        embedding, types = self.embedding[...], self.token_types[...]
        h = embedding[tokens] + self.positions[...][:length] + (types[0] if token_types is None else types[token_types])
        h = self.embedding_norm(h)
        keys = None
        if rng is not None and self.dropout > 0 and not self.deterministic:
            rng, first = jax.random.split(rng)
            h, keys = drop(h, self.dropout, first), jax.random.split(rng, self.layers)
        visible = None if mask is None else mask.astype(bool)
        apply = lambda block, h, key: block(h, key, visible)
        return apply_blocks(self.blocks, apply, h, keys, remat=self.remat), embedding


def classification_loss(
    model: BERT, batch: Mapping[str, jax.Array], rng: jax.Array | None = None
) -> tuple[Weighted, dict[str, Weighted]]:
    """Cross-entropy in nats of each sequence's class, and the accuracy (see `classification.classification`).

    Args:
        model: with a classifier.
        batch: ``tokens`` and ``mask`` (batch, length), ``labels`` (batch,) of any integer dtype; optionally
            ``token_types`` (batch, length) and ``weights`` (batch,).
        rng: the key of the dropout masks; None for none.

    >>> model = BERT(vocab_size=64, dim=16, layers=1, heads=2, max_length=8, classes=2, rngs=nnx.Rngs(0))
    >>> ones = jnp.ones((4, 5), jnp.int32)
    >>> loss, metrics = classification_loss(model, {"tokens": ones, "mask": ones, "labels": jnp.array([0, 1, 0, 1])})
    >>> float(metrics["accuracy"].total / metrics["accuracy"].weight)
    0.5
    """
    tokens = batch["tokens"].astype(jnp.int32)
    logits = model.classify(tokens, batch["mask"], batch.get("token_types"), rng)
    return classification(logits, batch["labels"], batch.get("weights"))


def masked_lm_loss(model: BERT, batch: Mapping[str, jax.Array], rng: jax.Array | None = None) -> Weighted:
    """Cross-entropy in nats of the tokens that were masked.

    Args:
        model: with ``masked_lm``.
        batch: ``tokens`` and ``mask`` (batch, length); ``labels`` and ``weights`` (batch, length), the tokens that were
            there and 1 where one is to be predicted (see `mask_tokens`); optionally ``token_types`` (batch, length).
        rng: the key of the dropout masks; None for none.
    """
    tokens = batch["tokens"].astype(jnp.int32)
    logits = model.predict(tokens, batch["mask"], batch.get("token_types"), rng)
    return cross_entropy(logits, batch["labels"].astype(jnp.int32), batch["weights"])


def mask_tokens(
    rng: jax.Array, tokens: jax.Array, maskable: jax.Array, *, mask_token: int, vocab_size: int
) -> dict[str, jax.Array]:
    """Chooses 15 % of the tokens to be predicted: 80 % of those are masked, 10 % replaced at random, 10 % left.

    Source: Devlin et al. 2018, section 3.1. Each token is chosen by itself, so that the share varies.

    Args:
        rng: a key; the same key chooses the same tokens.
        tokens: integers of any shape.
        maskable: booleans of that shape: no padding, no token that marks the beginning or end.
        mask_token: the token that masks.
        vocab_size: replacements are uniform in [0, vocab_size).

    Returns:
        ``tokens`` as the model shall see them, ``labels`` and ``weights`` for `masked_lm_loss`.

    >>> masked = mask_tokens(jax.random.key(0), jnp.arange(1000), jnp.arange(1000) > 500, mask_token=7, vocab_size=1000)
    >>> bool(masked["weights"][:501].any()), bool((masked["labels"] == jnp.arange(1000)).all())
    (False, True)
    """
    choose, treat, replace = jax.random.split(rng, 3)
    chosen = maskable.astype(bool) & jax.random.bernoulli(choose, MASK_RATE, tokens.shape)
    treatment = jax.random.uniform(treat, tokens.shape)
    replacement = jax.random.randint(replace, tokens.shape, 0, vocab_size, jnp.int32).astype(tokens.dtype)
    seen = jnp.where(treatment < MASKED, jnp.asarray(mask_token, tokens.dtype), tokens)
    seen = jnp.where((treatment >= MASKED) & (treatment < MASKED + REPLACED), replacement, seen)
    return {"tokens": jnp.where(chosen, seen, tokens), "labels": tokens, "weights": chosen.astype(jnp.float32)}
