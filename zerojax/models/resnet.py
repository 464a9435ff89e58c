"""Residual networks for small images."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.errors import UserError


class NormedConvolution(nnx.Module):
    """A convolution without bias, then a batch norm.

    Padded alike on both sides, as in the paper: "SAME" would pad a stride of 2 at the end alone.
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> None:
        pad = ((size - 1) // 2, (size - 1) // 2)
        he_normal = jax.nn.initializers.he_normal()
        self.convolution = nnx.Conv(
            inputs, outputs, (size, size), stride, padding=(pad, pad), use_bias=False, kernel_init=he_normal, rngs=rngs
        )
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, height, width, inputs) to (batch, height / stride, width / stride, outputs), in ``x``'s dtype."""
        return self.norm(self.convolution(x)).astype(x.dtype)  # the statistics are fp32, and make the output so


class Block(nnx.Module):
    """Two 3x3 convolutions beside a shortcut, which is a convolution of 1x1 where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        self.first = NormedConvolution(inputs, outputs, 3, stride, rngs)
        self.second = NormedConvolution(outputs, outputs, 3, 1, rngs)
        changes = inputs != outputs or stride != 1
        self.shortcut = NormedConvolution(inputs, outputs, 1, stride, rngs) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, height, width, inputs) to (batch, height / stride, width / stride, outputs)."""
        y = self.second(jax.nn.relu(self.first(x)))
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """A residual network of basic blocks (He et al. 2015, arXiv:1512.03385) whose first convolution keeps the size.

    The defaults are ResNet-18 for images of 32x32; ``widths=(16, 32, 64), depths=(3, 3, 3)`` is nearly the paper's
    ResNet-20 (section 4.2), with projections for shortcuts where the width changes. Parameters are born in fp32,
    kernels He normal; the model computes in the dtype of the parameters that it finds, the statistics of batch norms in
    fp32. Every parameter is read once in a forward pass.

    Args:
        classes: number of classes.
        channels: of the images: 1 for grey, 3 for colours.
        widths: channels of each stage; every stage but the first halves height and width.
        depths: number of blocks of each stage.
        rngs: the stream ``params`` is drawn from.

    Raises:
        UserError: there are not as many widths as depths.

    >>> model = ResNet(classes=10, channels=1, widths=(8, 16), depths=(1, 1), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 28, 28, 1))).shape
    (2, 10)
    """

    def __init__(
        self,
        *,
        classes: int,
        channels: int = 3,
        widths: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        rngs: nnx.Rngs,
    ) -> None:
        if not widths or len(widths) != len(depths):
            raise UserError(f"widths={tuple(widths)}, depths={tuple(depths)}: must be one of each for every stage")
        self.stem = NormedConvolution(channels, widths[0], 3, 1, rngs)
        blocks, inputs = [], widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for i in range(depth):
                blocks.append(Block(inputs, width, 2 if stage > 0 and i == 0 else 1, rngs))
                inputs = width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, classes, kernel_init=jax.nn.initializers.normal(0.01), rngs=rngs)

    def __call__(self, images: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """(batch, height, width, channels) floats to logits (batch, classes) in the parameters' dtype.

        In training mode the norms take the batch's statistics and keep a running mean of them, which they take in
        evaluation mode. Nothing is random: ``rng`` is there for the loss functions, which have one.
        """
        x = jax.nn.relu(self.stem(images.astype(self.stem.convolution.kernel.dtype)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2), dtype=jnp.float32).astype(x.dtype))
