"""LAMB, which sets the step of a leaf by the size of the leaf, as DeepSpeed's kernel computes it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.errors import UserError, shown
from zerojax.optim import checks
from zerojax.optim.chains import descent
from zerojax.optim.moments import Coefficient, correction, moment


class LambState(NamedTuple):
    """The number of updates and the moments."""

    count: jax.Array  # type: ignore[assignment]  # optax's name, which is a method of tuples
    mu: Any
    nu: Any


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    betas: Sequence[Coefficient] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    bias_correction: bool = True,
    eps_inside_sqrt: bool = False,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
) -> optax.GradientTransformationExtraArgs:
    """LAMB (You et al. 2020, arXiv:1904.00962) in DeepSpeed's form.

    With u = m / (sqrt(v) + eps) + weight_decay p of moments that are not bias-corrected, a leaf moves by
    ``-lr sqrt(1 - b2**t) / (1 - b1**t) clip(|p| / |u|, min_coeff, max_coeff) u``; the ratio of norms is 1 where one of
    them is 0. The norms are those of a whole leaf, wherever its shards are; where the layers of a model are one stack,
    that is the norm of the stack, not of each layer.

    Args:
        learning_rate: a number or a schedule.
        betas: decay of the first and the second moment; the first may be a schedule.
        eps: added to the root of the second moment, or with ``eps_inside_sqrt`` to the moment.
        weight_decay: see u.
        bias_correction: whether the factor of 1 - b**t is there.
        max_coeff, min_coeff: the limits of the ratio of norms.

    Raises:
        UserError: a value out of its range.

    >>> optimizer = lamb(1.0)
    >>> params = {"w": jnp.array([3.0, 4.0])}
    >>> updates, _ = optimizer.update({"w": jnp.array([1.0, -9.0])}, optimizer.init(params), params)
    >>> print(updates["w"].round(3))  # |u| is sqrt(20)
    [-1.118  1.118]
    """
    b1, b2 = checks.betas(betas)
    for name, value in ("eps", eps), ("weight_decay", weight_decay), ("min_coeff", min_coeff), ("max_coeff", max_coeff):
        checks.real(name, value)
    if min_coeff > max_coeff:
        raise UserError(f"min_coeff is {shown(min_coeff)}; accepted: at most max_coeff, {shown(max_coeff)}")
    checks.flag("bias_correction", bias_correction)
    checks.flag("eps_inside_sqrt", eps_inside_sqrt)

    def init(params: Any) -> LambState:
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return LambState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def update(updates: Any, state: LambState, params: Any = None) -> tuple[Any, LambState]:
        b1_now = b1(state.count) if callable(b1) else b1
        count = optax.safe_increment(state.count)
        mu = moment(b1_now, updates, state.mu)
        nu = moment(b2, jax.tree.map(jnp.square, updates), state.nu)
        size = jnp.sqrt(correction(b2, count)) / correction(b1_now, count) if bias_correction else 1.0

        def step(m: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
            u = m / (jnp.sqrt(v + eps) if eps_inside_sqrt else jnp.sqrt(v) + eps) + weight_decay * p
            return size * trust_ratio(p, u, min_coeff, max_coeff) * u

        return jax.tree.map(step, mu, nu, params), LambState(count, mu, nu)

    return descent(learning_rate, optax.GradientTransformation(init, update))


def trust_ratio(p: jax.Array, u: jax.Array, low: float, high: float) -> jax.Array:
    """|p| / |u| within limits, and 1 if a norm is 0.

    >>> float(trust_ratio(jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0]), 0.01, 10.0))
    2.5
    """
    of_p, of_u = (jnp.sqrt(jnp.sum(jnp.square(x))) for x in (p, u))
    both = (of_p > 0) & (of_u > 0)
    return jnp.where(both, jnp.clip(of_p / jnp.where(both, of_u, 1.0), low, high), 1.0)
