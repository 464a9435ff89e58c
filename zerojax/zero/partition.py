"""Where a leaf is cut, so that every device holds an equal part of it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.mesh import SHARD_AXIS
from zerojax.zero.disk import OnDisk

# What a cut along the first of several dimensions costs, as a share of the leaf: a longer padding is worse.
# The first dimension may be a stack of layers that a scan walks along, which no device can walk over shards of.
LEADING_DIM_COST = 0.1

# A dimension of this length is no stack of layers. As rows of the matrices of one, it is cut before their columns: XLA
# gathers along a later dimension than the first of a layer's weight by way of a second, transposed copy.
NO_STACK = 256

PINNED_HOST = "pinned_host"  # JAX's name of host memory that a device copies from by itself


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one leaf is divided over the "data" axis.

    Attributes:
      dim: the dimension that is cut, counted from the end (so that it stays the same under a leading axis of a scan);
        `None` if the leaf is whole on every device.
      size: length of that dimension.
      padded: its length in storage, the next multiple of the number of devices; the rest holds zeros.
    """

    dim: int | None = None
    size: int = 0
    padded: int = 0

    def axis(self, ndim: int) -> int:
        """The cut dimension of an array of `ndim` dimensions, counted from its first."""
        assert self.dim is not None, "a whole leaf has no cut dimension"
        return self.dim % ndim

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in storage of a leaf of `shape`."""
        if self.dim is None:
            return shape
        return tuple(self.padded if i == len(shape) + self.dim else n for i, n in enumerate(shape))

    def spec(self, ndim: int) -> PartitionSpec:
        """The leaf's partition over a mesh."""
        if self.dim is None:
            return PartitionSpec()
        return PartitionSpec(*(SHARD_AXIS if i == ndim + self.dim else None for i in range(ndim)))

    def survives(self, shape: tuple[int, ...], seen: tuple[int, ...]) -> bool:
        """Whether the cut of a leaf of `shape` is one of what a layer has `seen` of it, all or a turn of a scan."""
        shared = min(len(shape), len(seen))
        return self.dim is None or (-self.dim <= shared and shape[len(shape) - shared :] == seen[len(seen) - shared :])

    def pad(self, x: jax.Array) -> jax.Array:
        """From the logical shape to the stored one."""
        if self.padded == self.size:
            return x
        widths = [(0, 0)] * x.ndim
        widths[self.axis(x.ndim)] = (0, self.padded - self.size)
        return jnp.pad(x, widths)

    def unpad(self, x: jax.Array) -> jax.Array:
        """From the stored shape to the logical one."""
        return x if self.padded == self.size else jax.lax.slice_in_dim(x, 0, self.size, axis=self.axis(x.ndim))


WHOLE = Cut()


def cut_of(shape: tuple[int, ...], shards: int, min_shard_size: int) -> Cut:
    """The cut of a leaf of `shape` into `shards` parts.

    Of matrices in a stack the rows are cut, of other leaves the largest dimension that divides, the first of several
    only if no other does. Where none divides, the one that wastes least is padded. Leaves with fewer than
    `min_shard_size` elements stay whole.

    >>> cut_of((4, 256, 1024), shards=8, min_shard_size=1024)
    Cut(dim=-2, size=256, padded=256)
    >>> cut_of((30, 1001), shards=8, min_shard_size=1024).stored((30, 1001))
    (30, 1008)
    >>> cut_of((255,), shards=8, min_shard_size=1024).dim is None
    True
    """
    if shards == 1 or not is_large(shape, min_shard_size):
        return WHOLE

    def cost(i: int) -> tuple[float, bool, int, int]:
        waste = -shape[i] % shards / shape[i]
        are_rows = 0 < i == len(shape) - 2 and shape[i] >= NO_STACK
        return waste + (LEADING_DIM_COST if i == 0 and len(shape) > 1 else 0.0), not are_rows, -shape[i], -i

    i = min(range(len(shape)), key=cost)
    return Cut(i - len(shape), shape[i], math.ceil(shape[i] / shards) * shards)


def is_large(shape: tuple[int, ...], min_shard_size: int) -> bool:
    """Whether a leaf is worth a cut or a place in host memory.

    >>> is_large((32, 32), 1024), is_large((255,), 1024), is_large((), 0)
    (True, False, False)
    """
    return shape != () and math.prod(shape) >= max(min_shard_size, 1)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a training state.

    Attributes:
      name: where it is in the state.
      shape: its logical shape.
      dtype: its dtype.
      cut: where it is cut.
      batch_axes: of a leaf with a row for each example, the mesh axes that its first dim is split over with the batch.
      in_norm: of a parameter, whether it belongs to a normalisation (see `Parts`).
      offloaded: whether it lies in pinned host memory between steps.
      directory: where it lies in files between steps, or `None`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    cut: Cut = WHOLE
    batch_axes: tuple[str, ...] = ()
    in_norm: bool = False
    offloaded: bool = False
    directory: str | None = None

    @property
    def path(self) -> str:
        """Where it is in its field of the state.

        >>> Leaf("params/mlp/up/kernel", (2, 3), jnp.dtype("float32")).path
        'mlp/up/kernel'
        """
        return self.name.partition("/")[2]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.cut.stored(self.shape)

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(self.batch_axes) if self.batch_axes else self.cut.spec(len(self.shape))

    @property
    def waits(self) -> bool:
        """Whether something has to be done before a device can compute with the whole leaf."""
        return self.cut.dim is not None or self.offloaded

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Where the stored leaf lies between steps; where it is brought to, if it lies in files."""
        return NamedSharding(mesh, self.spec, memory_kind=PINNED_HOST if self.offloaded else None)

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct | OnDisk:
        """The stored leaf without its values."""
        if self.directory is not None:
            return OnDisk(self.stored_shape, self.dtype, self.sharding(mesh), self.directory)
        return jax.ShapeDtypeStruct(self.stored_shape, self.dtype, sharding=self.sharding(mesh))

    def store(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """The stored form of a logical array, in the leaf's dtype and shards, without a weak type, on the device."""
        if not jnp.issubdtype(self.dtype, jax.dtypes.extended):  # a typed key has nothing to convert
            x = jax.lax.convert_element_type(x, self.dtype)
        return jax.lax.with_sharding_constraint(self.cut.pad(x), NamedSharding(mesh, self.spec))

    def view(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """The logical array of a stored one on the device; where padding is cut off, the compiler keeps the shards
        where they are."""
        if self.cut.padded == self.cut.size:
            return x
        return jax.lax.with_sharding_constraint(self.cut.unpad(x), NamedSharding(mesh, self.spec))

    def fetch(self, x: jax.Array) -> jax.Array:
        """On the device, what lies where the leaf does between steps; inside of `shard_map` too."""
        return jax.device_put(x, jax.memory.Space.Device) if self.offloaded else x

    def send(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """The reverse of `fetch`, for a stored leaf as a global array."""
        return jax.device_put(x, self.sharding(mesh)) if self.offloaded else x
