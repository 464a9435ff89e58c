"""Where every leaf of a state lies, for a stage and the rest of the settings."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.errors import UserError
from zerojax.mesh import SHARD_AXIS, data_axes, data_parallel_size
from zerojax.paths import path_name
from zerojax.zero.offload import offloaded_fields
from zerojax.zero.partition import Leaf, cut_of, is_large
from zerojax.zero.stages import stage_of
from zerojax.zero.state import Layout

PARTITIONED = ("params", "frozen", "opt_state")


@dataclasses.dataclass(frozen=True)
class Placement:
    """What decides where leaves lie: settings of `Zero`, under their names there."""

    mesh: Mesh
    stage: int
    offload: tuple[str, ...]
    offload_path: str | None
    min_shard_size: int
    micro_batches: int

    def leaves(self, shapes: dict[str, Any], rows: Any) -> dict[str, Any]:
        """A `Leaf` for every leaf of a state.

        Args:
          shapes: the leaves' logical shapes, under the state's field names.
          rows: whether each variable has a row for each example.

        Raises:
          UserError: if a variable with rows cannot be split over devices and micro-batches.
        """
        shards = self.mesh.shape[SHARD_AXIS] if stage_of(self.stage).partitions else 1
        directory = self.offload_path
        in_host = offloaded_fields(
            tuple(name for name in self.offload if directory is None or name != "optimizer"), self.mesh
        )

        def plan(field: str, path: Any, x: jax.ShapeDtypeStruct) -> Leaf:
            cut = cut_of(x.shape, shards if field in PARTITIONED else 1, self.min_shard_size)
            name = "/".join(filter(None, (field, path_name(path))))
            leaf = Leaf(name, x.shape, x.dtype, cut)
            if not is_large(x.shape, self.min_shard_size):
                return leaf
            if field == "opt_state" and directory is not None and not jnp.issubdtype(x.dtype, jax.dtypes.extended):
                return dataclasses.replace(leaf, directory=directory)
            return dataclasses.replace(leaf, offloaded=field in in_host)

        leaves = {
            field: jax.tree_util.tree_map_with_path(functools.partial(plan, field), tree)
            for field, tree in shapes.items()
        }
        return leaves | {"variables": jax.tree.map(self._with_rows, leaves["variables"], rows)}

    def moved(self, layout: Layout) -> Layout:
        """The layout of the same state, placed like this."""
        rows = jax.tree.map(lambda leaf: bool(leaf.batch_axes), layout.leaves["variables"])
        as_before = lambda new, old: dataclasses.replace(new, in_norm=old.in_norm)
        leaves = jax.tree.map(as_before, self.leaves(layout.logical, rows), layout.leaves)
        return dataclasses.replace(layout, mesh=self.mesh, leaves=leaves)

    def _with_rows(self, leaf: Leaf, has_rows: bool) -> Leaf:
        """The leaf of a variable, split with the batch if it has a row for each example."""
        if not has_rows:
            return leaf
        parts = data_parallel_size(self.mesh) * self.micro_batches
        if not leaf.shape or leaf.shape[0] % parts:
            raise UserError(
                f"per_example chooses {leaf.name!r} of shape {leaf.shape}; accepted: arrays whose first axis is the "
                f"batch, a multiple of {parts} (devices x micro-batches)"
            )
        return dataclasses.replace(leaf, batch_axes=data_axes(self.mesh))
