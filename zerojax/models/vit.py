"""A transformer over the patches of an image."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.errors import UserError
from zerojax.models.layers import LayerNorm
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


class ViT(nnx.Module):
    """A pre-norm transformer over patches (Dosovitskiy et al. 2020, arXiv:2010.11929).

    Parameters are born in fp32, normal with standard deviation 0.02. The model computes in the dtype of the parameters
    that it finds; norms, activations and softmax compute in fp32. A seed gives the same weights scanned and unscanned.
    Every parameter is read once in a forward pass, inside the layer that owns it.

    Args:
        classes: number of classes.
        image_size: height and width of the images in pixels.
        patch_size: height and width of a patch; divides ``image_size``.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: number of heads; divides ``dim``.
        channels: of the images: 1 for grey, 3 for colours.
        mlp_dim: hidden width of the MLP; None for ``4 * dim``.
        pool: what the classifier reads: a token of its own beside the patches ("class"), or their mean ("mean").
        norm_epsilon: added to the variance in the norms.
        dropout: rate after the embedding and on both branches of a block.
        remat: whether a block keeps only its input for the backward pass.
        scan: whether the blocks are one stack under `jax.lax.scan` (compile time does not grow with depth) or a list.
        attention_implementation: of `jax.nn.dot_product_attention`; "cudnn" wants fp16 or bf16 on a GPU.
        rngs: the stream ``params`` is drawn from.

    Raises:
        UserError: a size that does not divide or a choice that is not offered.

    >>> model = ViT(classes=10, image_size=28, patch_size=7, channels=1, dim=16, layers=2, heads=2, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 28, 28, 1))).shape
    (3, 10)
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: int,
        patch_size: int,
        dim: int,
        layers: int,
        heads: int,
        channels: int = 3,
        mlp_dim: int | None = None,
        pool: Literal["class", "mean"] = "class",
        norm_epsilon: float = 1e-6,
        dropout: float = 0.0,
        remat: bool = False,
        scan: bool = True,
        attention_implementation: AttentionImplementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_divides("patch_size", patch_size, "image_size", image_size)
        check_divides("heads", heads, "dim", dim)
        check_choice("pool", pool, ("class", "mean"))
        check_choice("attention_implementation", attention_implementation, (None, "xla", "cudnn"))
        check_dropout(dropout)
        normal = jax.nn.initializers.normal(INIT_STDDEV)
        patches = (image_size // patch_size) ** 2

        def make_block(key: jax.Array) -> PreNormBlock:
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
            return PreNormBlock(norms, attention, mlp, dropout)

        self.layers, self.dropout, self.remat = layers, dropout, remat
        self.image_shape, self.patch_size = (image_size, image_size, channels), patch_size
        self.deterministic = False  # set by nnx's `eval()`: nothing is dropped then
        self.patches = linear(patch_size * patch_size * channels, dim, INIT_STDDEV, True, rngs)
        self.class_token = nnx.Param(normal(rngs.params(), (dim,))) if pool == "class" else None
        self.positions = nnx.Param(normal(rngs.params(), (patches + (pool == "class"), dim)))
        self.blocks = make_blocks(make_block, layers, scan=scan, rngs=rngs)
        self.final_norm = LayerNorm(dim, epsilon=norm_epsilon)
        self.head = linear(dim, classes, INIT_STDDEV, True, rngs)

    def __call__(self, images: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """(batch, image_size, image_size, channels) floats to logits (batch, classes) in the parameters' dtype.

        ``rng`` is the key of the dropout masks; without it, and in evaluation mode, nothing is dropped.
        """
        if images.shape[1:] != self.image_shape:
            raise UserError(f"images of shape {images.shape[1:]}: the model's are {self.image_shape}")
        h = self.patches(cut_into_patches(images, self.patch_size).astype(self.patches.kernel.dtype))
        if self.class_token is not None:
            token = jnp.broadcast_to(self.class_token[...], (h.shape[0], 1, h.shape[2]))
            h = jnp.concatenate([token, h], axis=1)
        h, keys = h + self.positions[...], None
        if rng is not None and self.dropout > 0 and not self.deterministic:
            rng, first = jax.random.split(rng)
            h, keys = drop(h, self.dropout, first), jax.random.split(rng, self.layers)
        h = apply_blocks(self.blocks, lambda block, h, key: block(h, key), h, keys, remat=self.remat)
        h = self.final_norm(h)
        return self.head(h.mean(1) if self.class_token is None else h[:, 0])


def cut_into_patches(images: jax.Array, size: int) -> jax.Array:
    """(batch, height, width, channels) to (batch, patches, size * size * channels), row by row.

    >>> cut_into_patches(jnp.arange(16).reshape(1, 4, 4, 1), 2)[0, 1].tolist()
    [2, 3, 6, 7]
    """
    batch, height, width, channels = images.shape
    rows = images.reshape(batch, height // size, size, width // size, size, channels).swapaxes(2, 3)
    return rows.reshape(batch, -1, size * size * channels)
