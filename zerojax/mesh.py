"""Device meshes: the data-parallel axes that ZeRO works on, and axes of model parallelism beside them."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from zerojax.errors import UserError

SHARD_AXIS = "data"
REPLICA_AXIS = "replica"


def make_mesh(
    *, replica: int = 1, data: int = -1, devices: Sequence[jax.Device] | None = None, **model_axes: int
) -> Mesh:
    """A mesh with a "data" axis, a "replica" axis if it is larger than 1, and any axes of model parallelism.

    States are partitioned over "data" and held in copies over "replica", whose gradients are all-reduced (hybrid
    sharding). Neighbouring devices lie along "data" (and the model axes, which vary fastest), so that partitions
    stay inside a host where they can.

    Args:
      replica: number of copies of the partitioned state.
      data: number of partitions; -1 takes all the devices that the other axes leave.
      devices: the devices in order; all of `jax.devices()` by default.
      **model_axes: sizes of further axes, by name; the compiler partitions over them as sharding constraints in the
        model's own code say. Stored leaves are not cut over them.

    Raises:
      UserError: if the sizes do not multiply to the number of devices.

    >>> dict(make_mesh(devices=jax.devices()[:1], tensor=1).shape)  # with 8 devices, replica=2 leaves 4 to "data"
    {'data': 1, 'tensor': 1}
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {REPLICA_AXIS: replica, SHARD_AXIS: data, **model_axes}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and (name, size) != (SHARD_AXIS, -1)):
            accepted = "a positive integer" + (", or -1 for the rest of the devices" if name == SHARD_AXIS else "")
            raise UserError(f"mesh axis {name!r} has size {size!r}; accepted: {accepted}")
    if data == -1:
        others = math.prod(size for name, size in sizes.items() if name != SHARD_AXIS)
        sizes[SHARD_AXIS] = len(devices) // others if len(devices) % others == 0 else 0
    if not devices or math.prod(sizes.values()) != len(devices):
        asked = " x ".join(f"{name} {'*' if name == SHARD_AXIS and data == -1 else n}" for name, n in sizes.items())
        raise UserError(f"mesh {asked} does not make {len(devices)} devices; accepted: sizes whose product is that")
    if replica == 1:
        del sizes[REPLICA_AXIS]
    return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def as_zero_mesh(mesh: Mesh | None) -> Mesh:
    """`mesh` with every axis left to the compiler outside of zerojax's own manual regions; every device by default.

    Raises:
      UserError: if there is no "data" axis.
    """
    if mesh is None:
        return make_mesh()
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh is {mesh!r}; accepted: a jax.sharding.Mesh, as zerojax.make_mesh makes")
    if SHARD_AXIS not in mesh.axis_names:
        raise UserError(
            f"mesh has axes {mesh.axis_names}; accepted: one named {SHARD_AXIS!r} to partition over, "
            f"beside it {REPLICA_AXIS!r} for copies and any others for model parallelism"
        )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The data-parallel axes of `mesh` in its order: over their product a batch is split."""
    return tuple(name for name in mesh.axis_names if name in (REPLICA_AXIS, SHARD_AXIS))


def data_parallel_size(mesh: Mesh) -> int:
    """The number of parts that a batch is split into."""
    return math.prod(mesh.shape[name] for name in data_axes(mesh))
