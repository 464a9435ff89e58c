"""How a loss uses each parameter, found by tracing it once.

A partitioned parameter may stay in shards until a layer uses it only if nothing else looks at it: a penalty over
`jax.tree.leaves(params)` has to see whole leaves. The trace says which parameters reach their gather points alone.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from zerojax.adapters import BLOCK_ENTRY

USE = "zerojax.use"


@dataclasses.dataclass
class Use:
    """How one parameter is used.

    Attributes:
      ndims: the number of dimensions that each gather point sees; fewer than the parameter has under a scan or vmap.
      in_remat: whether each of them lies inside a `jax.checkpoint` of the model's own.
      outside: the name of an operation that takes the parameter outside of a gather point, or `None`.
    """

    ndims: list[int] = dataclasses.field(default_factory=list)
    in_remat: list[bool] = dataclasses.field(default_factory=list)
    outside: str | None = None


@dataclasses.dataclass(frozen=True)
class Uses:
    """How a loss uses its parameters, in their order, and whether it rematerialises by itself."""

    params: tuple[Use, ...]
    remats: bool


@dataclasses.dataclass(frozen=True)
class MarkUse:
    """Stands at a gather point in the search: names the parameter there and leaves it as it is."""

    def __call__(self, whole: jax.Array) -> jax.Array:
        return checkpoint_name(whole, USE)


def find_uses(loss: Callable[[Sequence[jax.Array]], Any], params: Sequence[jax.ShapeDtypeStruct]) -> Uses:
    """Traces `loss`, a function of whole parameters whose gather points are `MarkUse` or a block's entry."""
    jaxpr = jax.make_jaxpr(loss)(params).jaxpr
    uses = tuple(Use() for _ in params)
    names = dict(zip(jaxpr.invars, uses, strict=True))
    remats = _walk(jaxpr, names, in_remat=False)
    _note_outside(_named(jaxpr.outvars, names), "return")
    return Uses(uses, remats)


def _walk(jaxpr: core.Jaxpr, names: dict[core.Var, Use], in_remat: bool) -> bool:
    """Notes the uses of the variables `names`, and adds the variables that are the same parameters under other names.

    Returns whether a rematerialised part was met.
    """
    remats = False
    for eqn in jaxpr.eqns:
        operands = _named(eqn.invars, names)
        is_remat = eqn.primitive.name in ("checkpoint", "remat", "remat2")
        remats |= is_remat
        if eqn.primitive.name == "name" and eqn.params["name"] in (USE, BLOCK_ENTRY):
            if operands[0] is not None:
                operands[0].ndims.append(eqn.invars[0].aval.ndim)  # type: ignore[attr-defined]
                operands[0].in_remat.append(in_remat)
            continue
        inner = list(_inner(eqn))
        for sub, taken in inner:
            within = {v: use for v, use in zip(sub.invars, operands[taken], strict=True) if use is not None}
            remats |= _walk(sub, within, in_remat or is_remat)
            # A layer may hand its parameters on, as a scan of an NNX module does.
            returned = _named(sub.outvars, within)
            if len(returned) == len(eqn.outvars):
                names.update({v: use for v, use in zip(eqn.outvars, returned, strict=True) if use is not None})
            else:
                _note_outside(returned, eqn.primitive.name)
        if not inner:
            _note_outside(operands, eqn.primitive.name)
    return remats


def _named(variables: Sequence[Any], names: dict[core.Var, Use]) -> list[Use | None]:
    return [names.get(v) if isinstance(v, core.Var) else None for v in variables]


def _note_outside(operands: Sequence[Use | None], by: str) -> None:
    for use in operands:
        if use is not None:
            use.outside = use.outside or by


def _inner(eqn: core.JaxprEqn) -> Iterator[tuple[core.Jaxpr, slice]]:
    """The programs inside an operation that take its inputs, and which of these; none where they take others."""
    for value in eqn.params.values():
        for sub in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(sub, "jaxpr", sub)
            if isinstance(jaxpr, core.Jaxpr):
                skip = len(eqn.invars) - len(jaxpr.invars)
                if skip in (0, 1):  # 1: the index of a `cond`
                    yield jaxpr, slice(skip, None)
