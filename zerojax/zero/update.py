"""The update: an optax transformation on global arrays, which may lie in shards.

It runs outside of the manual region, so that whatever an optimizer asks of a whole leaf or of all leaves (a trust
ratio, a factored moment, an orthogonalised matrix, a global norm) is what it gets.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.zero.state import Layout, State


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


def apply_update(
    layout: Layout, state: State, gradients: Any, variables: Any, loss: jax.Array, clip_norm: float | None
) -> tuple[State, jax.Array]:
    """The next state, and the gradients' global norm before clipping. Gradients come in stored form."""
    gradients = layout.view("params", gradients)
    norm = global_norm(gradients)
    gradients = clip(gradients, norm, clip_norm)
    params = layout.view("params", state.params)
    optimizer = optax.with_extra_args_support(layout.optimizer)
    updates, opt_state = optimizer.update(gradients, layout.view("opt_state", state.opt_state), params, value=loss)
    return State(
        step=state.step + 1,
        params=layout.store("params", optax.apply_updates(params, updates)),
        opt_state=layout.store("opt_state", opt_state),
        variables=layout.store("variables", variables),
        rng=state.rng,
        layout=layout,
    ), norm
