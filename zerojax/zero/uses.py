"""How a loss uses each parameter, found by tracing it once.

A partitioned parameter may stay in shards until a layer uses it only if nothing else looks at it: a penalty over
`jax.tree.leaves(params)` has to see whole leaves. The trace says which parameters reach their gather points alone.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from zerojax.adapters import is_marked_in_norm, mark_use, marked_shape

# A parameter that goes into one of these counts as used there. Devices may choose another branch or number of turns
# than their neighbours, and collectives inside would wait for devices that never come; a custom derivative may hand out
# the gradient of a whole parameter.
OPAQUE = {"cond", "while", "custom_jvp_call", "custom_vjp_call"}


@dataclasses.dataclass
class Use:
    """How one parameter is used.

    Attributes:
      shapes: the shape that each gather point sees; without the leading dimensions that a scan or vmap walks along.
      given: the shape of which that is a part, without those that a scan walks along.
      in_remat: whether each of them lies inside a `jax.checkpoint` of the model's own.
      in_norm: whether each of them lies inside a normalisation that is known only where it runs, as Linen's.
      outside: the name of an operation that takes the parameter outside of a gather point, or `None`.
    """

    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    given: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    in_remat: list[bool] = dataclasses.field(default_factory=list)
    in_norm: list[bool] = dataclasses.field(default_factory=list)
    outside: str | None = None


@dataclasses.dataclass(frozen=True)
class Uses:
    """How a loss uses its parameters.

    Attributes:
      params: each of them, in their order.
      remats: whether the loss rematerialises a part of itself.
    """

    params: tuple[Use, ...]
    remats: bool


@dataclasses.dataclass(frozen=True)
class MarkUse:
    """Stands at a gather point in the search: names the parameter there and leaves it as it is."""

    def __call__(self, whole: jax.Array) -> jax.Array:
        return mark_use(whole)


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
        name = eqn.primitive.name
        seen = marked_shape(eqn.params["name"]) if name == "name" else None
        if seen is not None:
            if operands[0] is not None:
                given: Any = eqn.invars[0].aval
                _note_use(operands[0], seen, given.shape, in_remat)
                operands[0].in_norm.append(is_marked_in_norm(eqn.params["name"]))
            continue
        is_remat = name in ("checkpoint", "remat", "remat2")
        programs = [program for program in map(_program, jax.tree.leaves(list(eqn.params.values()))) if program]
        if len(programs) == 1 and len(programs[0].invars) == len(eqn.invars) and name not in OPAQUE:
            (inner,) = programs
            within = {v: use for v, use in zip(inner.invars, operands, strict=True) if use is not None}
            remats |= _walk(inner, within, in_remat or is_remat) or is_remat
            # A layer may hand its parameters on, as a scan of an NNX module does.
            returned = _named(inner.outvars, within)
            names.update({v: use for v, use in zip(eqn.outvars, returned, strict=True) if use is not None})
            if name == "scan":
                _note_changed(eqn, inner, operands, returned)
        else:
            remats |= is_remat or any(_walk(program, {}, in_remat) for program in programs)
            _note_outside(operands, name)
    return remats


def _named(variables: Sequence[Any], names: dict[core.Var, Use]) -> list[Use | None]:
    return [names.get(v) if isinstance(v, core.Var) else None for v in variables]


def _note_outside(operands: Sequence[Use | None], by: str) -> None:
    for use in operands:
        if use is not None:
            use.outside = use.outside or by


def _note_use(use: Use, seen: tuple[int, ...], given: tuple[int, ...], in_remat: bool) -> None:
    """A use at a gather point that sees an array of shape `seen`, which is `given` without what vmaps walk along."""
    choices = itertools.combinations(range(len(given)), len(seen))
    kept = [dims for dims in choices if seen == tuple(given[dim] for dim in dims)]
    if kept != [tuple(range(len(given) - len(seen), len(given)))]:  # vmap may walk along any dimension
        _note_outside([use], "vmap")
    use.shapes.append(seen)
    use.given.append(given)
    use.in_remat.append(in_remat)


def _note_changed(eqn: core.JaxprEqn, body: core.Jaxpr, operands: list[Use | None], returned: list[Use | None]) -> None:
    """Parameters that a scan carries and that do not stay themselves, or become so only inside."""
    sliced = lambda outer, inner: outer.aval.shape != inner.aval.shape
    n_slices = sum(sliced(a, b) for a, b in zip(eqn.invars, body.invars, strict=True))
    n_carried = sum(not sliced(a, b) for a, b in zip(eqn.outvars, body.outvars, strict=True))
    first = len(operands) - n_slices - n_carried
    for before, after in zip(operands[first : first + n_carried], returned[:n_carried], strict=True):
        if before is not after:
            _note_outside([before, after], "scan")


def _program(value: Any) -> core.Jaxpr | None:
    jaxpr = getattr(value, "jaxpr", value)
    return jaxpr if isinstance(jaxpr, core.Jaxpr) else None
