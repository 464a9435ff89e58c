"""What of a loss is rematerialised, and with which policy: what was asked for, together with stage 3's gathering."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax

from zerojax.adapters import Block, Module
from zerojax.adapters.blocks import holders, named_blocks, repeated_blocks, scanned_blocks
from zerojax.adapters.regather import all_but_gathered
from zerojax.errors import UserError, shown
from zerojax.remat import Policy, Remat
from zerojax.zero.partition import Leaf
from zerojax.zero.stages import Gather, Stage
from zerojax.zero.state import Layout
from zerojax.zero.uses import Uses


@dataclasses.dataclass(frozen=True)
class Plan:
    """What of a loss is rematerialised.

    Attributes:
      blocks: the modules, by path.
      around: the policy around the whole loss, or `None`.
    """

    blocks: Mapping[str, Block] = dataclasses.field(default_factory=dict)
    around: Policy | None = None

    def without_blocks(self, remat: Remat | Policy | None) -> "Plan":
        """The plan for a loss that calls none of the blocks.

        Raises:
          UserError: if `remat` names them.
        """
        if not isinstance(remat, Remat):
            return Plan(around=self.around)
        if remat.blocks is not None:
            paths = ", ".join(path or "the model itself" for path in self.blocks)
            raise UserError(
                f"Remat.blocks is {shown(remat.blocks)}: {paths}, which the loss does not call; accepted: modules that "
                "it calls"
            )
        return Plan(around=next(iter(self.blocks.values())).policy)  # `every` never leaves out the first


def make_plan(
    remat: Remat | Policy | None, stage: Stage, layout: Layout, uses: Uses, met: Mapping[str, Module]
) -> Plan:
    """The plan for a loss whose uses have been found, and which has met the modules `met` as it called them.

    At stage 3 no policy keeps what was gathered. The layers of a stack are blocks there even if nothing else is asked
    for: around the whole loss, a policy gathers again for all of them at once. A loss that rematerialises by itself
    gets no policy around it that nobody asked for: that would take precedence over its own and keep what it drops. If
    a name asks for one, it gets it, but for "full", which would only compute everything once more.
    """
    at_use = stage.gather is Gather.AT_USE
    leaves = [*layout.param_leaves, *layout.frozen_leaves]
    shapes = frozenset(gathered_shapes(leaves, uses)) if at_use else frozenset()

    def but_gathered(keep: Policy) -> Policy:
        return _but_gathered(shapes, keep) if at_use else keep

    rest = but_gathered(jax.checkpoint_policies.everything_saveable) if at_use and layout.adapter.finds_uses else None
    names = [leaf.name.partition("/")[2] for leaf in leaves]
    known = holders(names)
    modules = {path: x for path, x in layout.adapter.modules().items() if path in known} | dict(met)
    by_name = list(zip(names, leaves, uses.params, strict=True))
    scanned = [name for name, leaf, use in by_name if any(len(shape) < len(leaf.shape) for shape in use.given)]
    own = [name for name, _, use in by_name if any(use.in_remat)]
    if remat is None:
        blocks = {} if rest is None else scanned_blocks(modules, scanned, own, rest)
        return Plan(blocks, None if uses.remats else rest)
    if not isinstance(remat, Remat):
        return Plan(around=but_gathered(remat))
    policy = but_gathered(remat.keeps)
    if remat.blocks is not None:
        return Plan(named_blocks(modules, remat.blocks, remat.every, scanned, policy, rest))
    blocks = repeated_blocks(modules, remat.every, scanned, own, policy, rest)
    if blocks or (own and remat.keeps is jax.checkpoint_policies.nothing_saveable):
        return Plan(blocks)
    return Plan(around=policy)


def gathered_shapes(leaves: Sequence[Leaf], uses: Uses) -> set[tuple[int, ...]]:
    """The shapes that gather points make: of whole leaves, or of a scan's slices of them."""
    return {
        shape[-ndim:]
        for leaf, use in zip(leaves, uses.params, strict=True)
        for ndim in (*map(len, use.shapes), len(leaf.shape))
        for shape in (leaf.shape, leaf.stored_shape)
        if leaf.waits
    }


@functools.lru_cache(maxsize=64)
def _but_gathered(shapes: frozenset[tuple[int, ...]], keep: Policy) -> Policy:
    """One object for equal arguments: types of modules and JAX's caches hold policies."""
    return all_but_gathered(shapes, keep)
