"""The update: an optax transformation on global arrays, which may lie in shards.

It runs outside of the manual region, so that whatever an optimizer asks of a whole leaf or of all leaves (a trust
ratio, a factored moment, an orthogonalised matrix, a global norm) is what it gets.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from zerojax.precision import Precision
from zerojax.zero.loss_scale import ScalerState, after_step
from zerojax.zero.state import Layout, State
from zerojax.zero.turns import Turn, in_turns


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What a step computes before the update.

    Attributes:
      gradients: in stored form, unscaled.
      variables: the model's, after the step.
      loss: a scalar.
      losses: of each micro-batch, (M,).
      metrics: scalars by name.
    """

    gradients: Any
    variables: Any
    loss: jax.Array
    losses: jax.Array
    metrics: dict[str, jax.Array]


UPDATED = ("step", "params", "opt_state", "variables")


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


def metrics_after(step: jax.Array, loss_scale: ScalerState, norm: jax.Array) -> dict[str, jax.Array]:
    """The metrics that are known after the update."""
    return {"grad_norm": norm, "skipped": loss_scale.skipped, "step": step}


def update_of(layout: Layout) -> Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]:
    """The update as a function of parameters, optimizer state and gradients, all stored and fetched, and of the loss.

    It returns the new parameters and optimizer state, stored but not sent.
    """
    optimizer = optax.with_extra_args_support(layout.optimizer)

    def update(params: Any, opt_state: Any, gradients: Any, loss: jax.Array) -> tuple[Any, Any]:
        params, opt_state = layout.view("params", params), layout.view("opt_state", opt_state)
        updates, opt_state = optimizer.update(layout.view("params", gradients), opt_state, params, value=loss)
        return layout.store("params", optax.apply_updates(params, updates)), layout.store("opt_state", opt_state)

    return update


def prepared(layout: Layout, gradients: Any, settings: UpdateSettings) -> tuple[Any, jax.Array, jax.Array]:
    """Stored gradients, clipped, their global norm before, and whether the step is not to be skipped."""
    logical = layout.view("params", gradients)
    norm = global_norm(logical)
    finite = all_finite(logical) if settings.precision.skips else jnp.array(True)
    return clip(gradients, norm, settings.clip_norm), norm, finite


def apply_update(
    layout: Layout,
    state: State,
    gradients: Any,
    variables: Any,
    loss: jax.Array,
    settings: UpdateSettings,
    tell: Callable[[tuple[Turn, ...]], None],
) -> tuple[State, jax.Array]:
    """The next state, and the gradients' global norm before clipping. Gradients come in stored form, unscaled.

    Where the policy skips steps that overflow, such a step leaves everything but the loss scale as it was. Leaves in
    host memory come to the device in turns, which `tell` is called with, once the gradients are there.
    """
    policy = settings.precision
    gradients, norm, finite = prepared(layout, gradients, settings)
    update = update_of(layout)

    def updated(before: dict[str, Any], gradients: Any, variables: Any, loss: jax.Array, finite: jax.Array) -> Any:
        before = {field: layout.fetch(field, tree) for field, tree in before.items()}
        params, opt_state = update(before["params"], before["opt_state"], gradients, loss)
        after = {
            "step": before["step"] + 1,
            "params": params,
            "opt_state": opt_state,
            "variables": layout.store("variables", variables),
        }
        if policy.skips:
            after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        return {field: layout.send(field, tree) for field, tree in after.items()}

    operands = ({field: getattr(state, field) for field in UPDATED}, gradients, variables, loss, finite)
    after = in_turns(updated, *operands, after=norm, tell=tell) if layout.offloads else updated(*operands)
    loss_scale = after_step(policy.loss_scale, state.loss_scale, ~finite)
    return dataclasses.replace(state, **after, loss_scale=loss_scale), norm
