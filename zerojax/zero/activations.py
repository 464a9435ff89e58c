"""What a forward pass leaves behind for the backward pass, counted on the traced program.

`jax.vjp` returns the backward pass as a pytree whose leaves are the residuals: what it will read of the forward pass.
They are those of the program as traced, the same on every backend; the compiler may keep less where it computes an
elementwise operation again inside of the one that reads it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from zerojax.adapters.regather import GATHERED, LAYOUT_OPERATIONS


def kept_bytes(function: Callable[..., Any], operands: Any, *others: Any) -> int:
    """Bytes that the forward pass of a function makes and its backward pass reads.

    What the function was given or closes over does not count, nor what gather points made (`GATHERED`), nor either of
    them laid out anew.

    Args:
      function: of `operands` and `others`, returning a scalar and an aux; inside of `shard_map`, of a device's parts.
      operands: what gradients are taken of.
      others: the rest of the arguments.

    >>> import jax.numpy as jnp
    >>> w, x = jnp.ones((4, 8)), jnp.ones((3, 4))
    >>> loss = lambda w, x: (jnp.sum(jnp.sin(x @ w)), None)  # keeps x, which it was given, and the cosine of x @ w
    >>> kept_bytes(loss, w, x)  # 3 x 8 x 4 bytes
    96
    """

    def residuals(operands: Any, *others: Any) -> list[Any]:
        _, backward, _ = jax.vjp(lambda x: function(x, *others), operands, has_aux=True)
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(residuals)(operands, *others).jaxpr
    kept = dict.fromkeys(v for v in jaxpr.outvars if isinstance(v, core.Var))
    avals: list[Any] = [v.aval for v in kept if _is_made(jaxpr, v, [False] * len(jaxpr.invars))]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def _is_made(jaxpr: core.Jaxpr, variable: Any, given: Sequence[bool]) -> bool:
    """Whether a program computes a variable, rather than being given it, gathering it, or laying out such a one anew.

    `given` says it of the program's arguments; what it closes over was given.
    """
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while (eqn := makers.get(variable)) is not None:
        name = eqn.primitive.name
        if name == "name" and eqn.params["name"] == GATHERED:
            return False
        if name in (*LAYOUT_OPERATIONS, "convert_element_type") and isinstance(eqn.invars[0], core.Var):
            source: Any = eqn.invars[0].aval
            if variable.aval.size > source.size:  # a broadcast takes memory of its own
                return True
            variable = eqn.invars[0]
            continue
        inner = _called(eqn)
        if inner is None:
            return True
        made = [isinstance(v, core.Var) and _is_made(jaxpr, v, given) for v in eqn.invars]
        if name == "scan":
            made = _changed_by_scan(eqn, inner, made)
        result = inner.outvars[eqn.outvars.index(variable)]
        return isinstance(result, core.Var) and _is_made(inner, result, made)
    return given[jaxpr.invars.index(variable)] if variable in jaxpr.invars else False


def _changed_by_scan(eqn: core.JaxprEqn, body: core.Jaxpr, made: Sequence[bool]) -> list[bool]:
    """The same of a scan's body: what is carried from turn to turn is made, whatever it was at the beginning.

    Arguments are constants, carries and slices, in this order; only slices have another shape inside.
    """
    sliced = lambda outer, inner: outer.aval.shape != inner.aval.shape
    n_slices = sum(sliced(a, b) for a, b in zip(eqn.invars, body.invars, strict=True))
    n_carried = sum(not sliced(a, b) for a, b in zip(eqn.outvars, body.outvars, strict=True))
    first = len(made) - n_slices - n_carried
    return [flag or first <= i < first + n_carried for i, flag in enumerate(made)]


def _called(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """The program that an equation runs on its operands, where there is one alone."""
    programs = [p for p in map(_program, jax.tree.leaves(list(eqn.params.values()))) if p is not None]
    if len(programs) != 1 or eqn.primitive.name in ("while", "cond", "custom_jvp_call", "custom_vjp_call"):
        return None
    (inner,) = programs
    return inner if len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars) else None


def _program(value: Any) -> core.Jaxpr | None:
    jaxpr = getattr(value, "jaxpr", value)
    return jaxpr if isinstance(jaxpr, core.Jaxpr) else None
