"""The update: an optax transformation on global arrays, which may lie in shards.

It runs outside of the manual region, so that whatever an optimizer asks of a whole leaf or of all leaves (a trust
ratio, a factored moment, an orthogonalised matrix, a global norm) is what it gets.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from zerojax.precision import Precision
from zerojax.zero.loss_scale import after_step
from zerojax.zero.state import Layout, State


class UpdateSettings(Protocol):
    """What the update needs to know of a step's settings."""

    @property
    def precision(self) -> Precision: ...

    @property
    def clip_norm(self) -> float | None: ...


def global_norm(gradients: Any) -> jax.Array:
    """The L2 norm over all leaves, in float32."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def clip(gradients: Any, norm: jax.Array, limit: float | None) -> Any:
    """Gradients scaled down so that their norm `norm` is at most `limit`."""
    if limit is None:
        return gradients
    factor = jnp.where(norm > limit, limit / jnp.where(norm > limit, norm, 1.0), 1.0)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)


def all_finite(gradients: Any) -> jax.Array:
    """Whether no entry of any leaf is infinite or no number."""
    return jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()


def apply_update(
    layout: Layout, state: State, gradients: Any, variables: Any, loss: jax.Array, settings: UpdateSettings
) -> tuple[State, jax.Array]:
    """The next state, and the gradients' global norm before clipping. Gradients come in stored form, unscaled.

    Where the policy skips steps that overflow, such a step leaves everything but the loss scale as it was.
    """
    policy = settings.precision
    gradients = layout.view("params", gradients)
    norm = global_norm(gradients)
    finite = all_finite(gradients) if policy.skips else jnp.array(True)
    gradients = clip(gradients, norm, settings.clip_norm)
    params = layout.view("params", state.params)
    optimizer = optax.with_extra_args_support(layout.optimizer)
    updates, opt_state = optimizer.update(gradients, layout.view("opt_state", state.opt_state), params, value=loss)
    after = dataclasses.replace(
        state,
        step=state.step + 1,
        params=layout.store("params", optax.apply_updates(params, updates)),
        opt_state=layout.store("opt_state", opt_state),
        variables=layout.store("variables", variables),
    )
    if policy.skips:
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
    return dataclasses.replace(after, loss_scale=after_step(policy.loss_scale, state.loss_scale, ~finite)), norm
