"""What is known of a step that was taken; figures stay on the device until they are asked for."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from zerojax.errors import RunError
from zerojax.precision import LossScale
from zerojax.zero.loss_scale import ScalerState, scale_of


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A step at a boundary.

    Attributes:
      number: of the step, from 1, skipped ones counted.
      samples: rows of all steps up to it.
      updates_before: the number of updates applied before.
      metrics: as `TrainStep` returns them.
      ends_if_skipped: whether the loss scale had nowhere to go from there.
      began: `time.perf_counter` at its start, in seconds.
    """

    number: int
    samples: int
    updates_before: jax.Array | int
    metrics: Mapping[str, jax.Array]
    ends_if_skipped: jax.Array | bool
    began: float

    @property
    def applied(self) -> bool:
        """Whether it changed the parameters, rather than overflow."""
        return int(self.metrics["step"]) > int(self.updates_before)

    def check(self) -> None:
        """
        Raises:
          RunError: if it overflowed at the smallest loss scale.
        """
        if self.ends_if_skipped is not False and bool(self.ends_if_skipped) and not self.applied:
            raise RunError(
                f"step {self.number} overflowed at the smallest loss scale, {float(self.metrics['loss_scale']):g}: "
                "gradients are not finite; lower the learning rate, look for infinities in the data, or use bf16"
            )


def ends_if_skipped(policy: LossScale | None, state: ScalerState) -> jax.Array | bool:
    """Whether DeepSpeed's scaler gives up if the next step overflows: the scale is the smallest, no overflow is free.

    >>> from zerojax.zero.loss_scale import initial_state
    >>> bool(ends_if_skipped(LossScale(initial_power=0, hysteresis=1), initial_state()))
    True
    >>> bool(ends_if_skipped(LossScale(initial_power=0, hysteresis=2), initial_state()))
    False
    """
    if policy is None or policy.static is not None:
        return False
    return _ends_if_skipped(policy, state)


@functools.partial(jax.jit, static_argnums=0)
def _ends_if_skipped(policy: LossScale, state: ScalerState) -> jax.Array:
    left = jnp.where(state.hysteresis == 0, policy.hysteresis, state.hysteresis)
    return (left == 1) & (scale_of(policy, state) <= policy.minimum)
