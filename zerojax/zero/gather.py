"""The gather points: collectives with their transposes.

Each function runs inside a `shard_map` that is manual over the data axes and sees one device's part of a leaf.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zerojax.adapters.regather import GATHERED
from zerojax.errors import UserError
from zerojax.mesh import SHARD_AXIS
from zerojax.zero.partition import Cut

# The data axes over which a loss function is running; empty outside of one.
_loss_runs: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("loss_runs", default=())


@contextlib.contextmanager
def loss_running(axes: tuple[str, ...]) -> Iterator[None]:
    """While the loss function runs, no gradient of a shard may be asked for: it would be one of all devices' losses."""
    token = _loss_runs.set(axes)
    try:
        yield
    finally:
        _loss_runs.reset(token)


def all_examples(x: Any) -> Any:
    """The rows of every device's part of a micro-batch, for a loss that compares examples with each other.

    Inside of a loss function a device sees its own rows of the micro-batch. This gathers a value that has one row for
    each of them over the data axes, in the order of the global batch, so that a loss over all rows (a contrastive loss,
    a statistic of the batch) is that of one device. Its gradient goes back to the devices that the rows came from.
    Outside of a step it returns `x`.

    Args:
      x: a pytree of arrays, (rows of this device, ...).

    Returns:
      The same with (rows of all devices, ...).

    >>> import jax.numpy as jnp
    >>> all_examples(jnp.ones((4, 2))).shape  # no step is running
    (4, 2)
    """
    axes = _loss_runs.get()
    if not axes:
        return x
    return jax.tree.map(lambda rows: jax.lax.all_gather(rows, axes, axis=0, tiled=True), x)


@dataclasses.dataclass(frozen=True)
class Point:
    """What a gather point needs to know of its parameter.

    Attributes:
      cut: where the parameter is cut, if it is.
      compute: dtype in which it is gathered and computed with.
      reduce: dtype in which its gradient is summed; `None` for the gradient's own.
    """

    cut: Cut
    compute: jnp.dtype
    reduce: jnp.dtype | None

    def gather(self, shard: jax.Array) -> jax.Array:
        """The whole leaf in the compute dtype; the narrower of that and its own goes over the wire."""
        if self.cut.dim is None:
            return shard.astype(self.compute)
        dim = self.cut.axis(shard.ndim)
        if shard.dtype.itemsize > self.compute.itemsize:
            shard = shard.astype(self.compute)
        whole = jax.lax.all_gather(shard, SHARD_AXIS, axis=dim, tiled=True)
        return self.cut.unpad(whole.astype(self.compute))

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """This device's part of the sum over devices of a whole leaf's gradient; of a leaf that is not cut, its own
        gradient, which is summed at the end of the backward pass."""
        if self.cut.dim is None:
            return gradient
        gradient = self.cut.pad(gradient.astype(self.reduce or gradient.dtype))
        dim = self.cut.axis(gradient.ndim)
        return jax.lax.psum_scatter(gradient, SHARD_AXIS, scatter_dimension=dim, tiled=True)


@dataclasses.dataclass(frozen=True)
class GatherAtUse:
    """Stage 3: a shard becomes the whole leaf; its gradient is reduced and scattered back to the shard."""

    point: Point

    def __call__(self, shard: jax.Array) -> jax.Array:
        return checkpoint_name(_gather_at_use(self.point, shard), GATHERED)


@dataclasses.dataclass(frozen=True)
class UseGathered:
    """Stage 2: the whole leaf is already there; its gradient is reduced and scattered to the shard beside it."""

    point: Point

    def __call__(self, shard: jax.Array, whole: jax.Array) -> jax.Array:
        return _use_gathered(self.point, shard, whole)


@dataclasses.dataclass(frozen=True)
class FetchAtUse:
    """Stage 3, for a shard in host memory: it comes to the device and becomes the whole leaf there; its gradient is
    reduced and scattered to the zeros on the device that stand for it, of which nothing is read."""

    point: Point

    def __call__(self, zeros: jax.Array, shard: jax.Array) -> jax.Array:
        return checkpoint_name(_fetch_at_use(self.point, zeros, shard), GATHERED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_at_use(point: Point, shard: jax.Array) -> jax.Array:
    return point.gather(shard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use_gathered(point: Point, shard: jax.Array, whole: jax.Array) -> jax.Array:
    del point, shard
    return whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fetch_at_use(point: Point, zeros: jax.Array, shard: jax.Array) -> jax.Array:
    del zeros
    return point.gather(jax.device_put(shard, jax.memory.Space.Device))


def _empty_like(shard: jax.Array) -> jax.Array:
    """Carries a dtype to the backward pass in no bytes."""
    return jnp.zeros((0,), shard.dtype)


def _scattered(point: Point, like: jax.Array, gradient: jax.Array) -> jax.Array:
    if _loss_runs.get() and point.cut.dim is not None:
        raise UserError(
            "loss_fn itself takes a gradient with respect to parameters that are in shards; accepted: stage 0 or 1, "
            "or gradients with respect to arrays made from the parameters"
        )
    return point.scatter(gradient).astype(like.dtype)


_gather_at_use.defvjp(
    lambda point, shard: (point.gather(shard), _empty_like(shard)),
    lambda point, like, gradient: (_scattered(point, like, gradient),),
)
_fetch_at_use.defvjp(
    lambda point, zeros, shard: (
        point.gather(jax.device_put(shard, jax.memory.Space.Device)),
        _empty_like(zeros),
    ),
    lambda point, like, gradient: (_scattered(point, like, gradient), None),
)
_use_gathered.defvjp(
    lambda point, shard, whole: (whole, _empty_like(shard)),
    lambda point, like, gradient: (_scattered(point, like, gradient), None),
)
