"""Dynamic loss scaling as a function of a few scalars, inside the compiled step.

The rule is that of DeepSpeed's scaler for ZeRO (which takes it from Micikevicius et al. 2018, arXiv:1710.03740,
section 3.2, and adds the hysteresis).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.errors import RunError
from zerojax.precision import LossScale


class ScalerState(NamedTuple):
    """Scalars on the device.

    Attributes:
      scale: float32; 0 stands for the initial scale of whichever policy comes first.
      hysteresis: int32, the overflows left before the scale halves; 0 likewise.
      steps: int32, the steps seen, skipped ones too.
      last_overflow: int32, the number of the last step that overflowed, from 1; 0 for none.
      skipped: int32, the steps that changed nothing.
    """

    scale: jax.Array
    hysteresis: jax.Array
    steps: jax.Array
    last_overflow: jax.Array
    skipped: jax.Array


def initial_state() -> ScalerState:
    """The state before the first step, the same for every policy, so that a checkpoint knows of none."""
    zero = jnp.zeros((), jnp.int32)
    return ScalerState(jnp.zeros((), jnp.float32), zero, zero, zero, zero)


def scale_of(policy: LossScale | None, state: ScalerState) -> jax.Array:
    """The factor on the loss of the next step, float32."""
    if policy is None:
        return jnp.ones((), jnp.float32)
    if policy.static is not None:
        return jnp.asarray(policy.static, jnp.float32)
    return jnp.where(state.scale == 0, policy.initial, state.scale).astype(jnp.float32)


def after_step(policy: LossScale | None, state: ScalerState, overflow: jax.Array) -> ScalerState:
    """The state after a step of which `overflow` says whether it was skipped.

    >>> state = after_step(LossScale(hysteresis=1), initial_state(), jnp.array(True))
    >>> float(state.scale), int(state.skipped)
    (32768.0, 1)
    """
    steps, skipped = state.steps + 1, state.skipped + overflow
    last_overflow = jnp.where(overflow, steps, state.last_overflow)
    state = state._replace(steps=steps, skipped=skipped, last_overflow=last_overflow)
    if policy is None or policy.static is not None:
        return state
    scale = scale_of(policy, state)
    left = jnp.where(state.hysteresis == 0, policy.hysteresis, state.hysteresis)
    halves = overflow & (left == 1)
    clean = steps - 1 - last_overflow  # clean steps since the last overflow, of which the first does not count
    doubles = ~overflow & (clean > 0) & (clean % policy.window == 0)
    scale = jnp.where(halves, jnp.maximum(scale / 2, policy.minimum), jnp.where(doubles, scale * 2, scale))
    restored = doubles if not policy.consecutive_hysteresis else ~overflow
    left = jnp.where(overflow & ~halves, left - 1, jnp.where(restored, policy.hysteresis, left))
    return state._replace(scale=scale, hysteresis=left.astype(jnp.int32))


@jax.jit
def copied(state: ScalerState) -> ScalerState:
    """A copy for a look at it later: the next step takes a state's memory."""
    return jax.tree.map(jnp.copy, state)


def check_not_exhausted(policy: LossScale | None, before: ScalerState, after: ScalerState) -> None:
    """Stops a run whose step overflowed when the scale could not be halved any more.

    Args:
      policy: the step's.
      before, after: the states around one step, on the host (`jax.device_get`).

    Raises:
      RunError: if the scale was at its minimum and no overflow was left to wait for.
    """
    if policy is None or policy.static is not None or after.skipped == before.skipped:
        return
    scale, left = before.scale or policy.initial, before.hysteresis or policy.hysteresis
    if scale <= policy.minimum and left == 1:
        raise RunError(
            f"step {after.steps} overflowed at the smallest loss scale, {policy.minimum:g}: gradients are not finite; "
            "lower the learning rate, or use bf16"
        )
