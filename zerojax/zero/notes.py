"""The leaves that are not simply in shards, and why."""

from collections.abc import Iterator

from zerojax.mesh import SHARD_AXIS
from zerojax.zero.gradients import on_entry
from zerojax.zero.partition import Leaf
from zerojax.zero.report import LeafNote
from zerojax.zero.stages import Gather, Stage
from zerojax.zero.state import Layout
from zerojax.zero.uses import Uses


def leaf_notes(layout: Layout, stage: Stage, uses: Uses | None, min_shard_size: int) -> list[LeafNote]:
    """A note for every parameter that is whole, padded, or gathered elsewhere than in the layer that uses it."""
    if not stage.partitions or layout.mesh.shape[SHARD_AXIS] == 1:
        return []
    return [
        LeafNote(leaf.name, leaf.shape, leaf.size * leaf.dtype.itemsize, "; ".join(said))
        for i, leaf in enumerate([*layout.param_leaves, *layout.frozen_leaves])
        if (said := list(_notes(i, leaf, layout, stage, uses, min_shard_size)))
    ]


def _notes(i: int, leaf: Leaf, layout: Layout, stage: Stage, uses: Uses | None, min_shard_size: int) -> Iterator[str]:
    if leaf.cut.dim is None:
        yield f"kept whole: fewer than {min_shard_size} elements"
        return
    if leaf.cut.padded != leaf.cut.size:
        yield f"dimension {leaf.cut.dim} padded from {leaf.cut.size} to {leaf.cut.padded}"
    if uses is None or stage.gather is not Gather.AT_USE:
        return
    use = uses.params[i]
    if on_entry(leaf, use):
        why = f"{use.outside!r} takes it outside of a layer" if use.outside else "a scan walks along its cut dimension"
        yield f"gathered when the model is entered: {why}"
    elif not all(use.in_remat) and (uses.remats if layout.adapter.finds_uses else any(use.in_remat)):
        yield "gathered outside of the model's remat: whole from its use to its gradient"
    elif layout.adapter.finds_uses and not all(use.in_remat) and any(len(x) < len(leaf.shape) for x in use.given):
        yield "gathered again for all layers at once in the backward pass: the layers have no remat of their own"
