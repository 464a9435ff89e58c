"""Checks of the numbers that optimizers and schedules are given."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.errors import UserError, shown

MOST_STEPS = 2**31 - 1  # a step is counted in int32


def real(name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Refuses all but a number with ``low <= value < below``; an array, whose value a trace does not know, passes."""
    if isinstance(value, jax.Array):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= float(value) < below:
        limits = "" if low == -math.inf else f" of at least {low:g}"
        limits += "" if below == math.inf else f" and below {below:g}" if limits else f" below {below:g}"
        raise UserError(f"{name} is {shown(value)}; accepted: a number{limits}")


def rate(name: str, value: Any) -> None:
    """Refuses all but a number of at least 0 or a schedule, a function of the number of applied updates."""
    if not callable(value):
        real(name, value)


def steps(name: str, value: Any, low: int = 1) -> int:
    """A number of steps of at least ``low``; as JSON's 1e4 is a float, a whole float is a number of steps too."""
    whole = isinstance(value, numbers.Integral) or isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not whole or not low <= value <= MOST_STEPS:
        kind = "a positive integer" if low == 1 else f"an integer of at least {low}"
        raise UserError(f"{name} is {shown(value)}; accepted: {kind}")
    return int(value)


def flag(name: str, value: Any) -> None:
    """Refuses all but True and False."""
    if not isinstance(value, bool):
        raise UserError(f"{name} is {shown(value)}; accepted: True or False")


def choice(name: str, value: Any, accepted: Sequence[str]) -> None:
    """Refuses all but one of ``accepted``."""
    if value not in accepted:
        raise UserError(f"{name} is {shown(value)}; accepted: {', '.join(map(repr, accepted))}")


def optimizer(name: str, value: Any) -> None:
    """Refuses what has no ``init`` and ``update``."""
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        raise UserError(f"{name}: optimizer is {shown(value)}; accepted: an optax.GradientTransformation")


def floating(name: str, value: Any) -> None:
    """Refuses all but a floating dtype or its name."""
    try:
        holds = value is not None and jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        holds = False
    if not holds:
        raise UserError(f"{name} is {shown(value)}; accepted: a floating dtype such as 'float32'")


def betas(value: Any) -> tuple[float | Callable[..., Any], float]:
    """The pair (b1, b2), each in [0, 1); b1 may be a schedule."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise UserError(f"betas is {shown(value)}; accepted: a pair of numbers of at least 0 and below 1")
    b1, b2 = value
    if not callable(b1):
        real("betas[0]", b1, below=1)
    real("betas[1]", b2, below=1)
    return b1, b2
