"""What is known of a step that was taken; figures stay on the device until they are asked for."""

import dataclasses
from collections.abc import Mapping

import jax

from zerojax.precision import LossScale
from zerojax.zero.loss_scale import ScalerState, check_not_exhausted


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A step at a boundary.

    Attributes:
      number: of the step, from 1, skipped ones counted.
      samples: rows of all steps up to it.
      updates_before: the number of updates applied before.
      metrics: as `TrainStep` returns them.
      scaling: the loss scale's policy.
      scalers: its state before and after the step; `None` without a policy.
      began: `time.perf_counter` at its start, in seconds.
    """

    number: int
    samples: int
    updates_before: jax.Array | int
    metrics: Mapping[str, jax.Array]
    scaling: LossScale | None
    scalers: tuple[ScalerState, ScalerState] | None
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
        if self.scalers is not None:
            check_not_exhausted(self.scaling, *jax.device_get(self.scalers))
