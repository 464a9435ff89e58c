"""The learning rate, as a scheduler object tells it."""

from collections.abc import Callable, Sequence

import optax


class Scheduler:
    """What DeepSpeed's `lr_scheduler` is asked for. It follows the updates that were applied: there is nothing to step.

    Attributes:
      schedules: one for each group of parameters, of the number of updates applied.
    """

    def __init__(self, schedules: Sequence[optax.Schedule], applied: Callable[[], int]):
        self.schedules, self._applied = tuple(schedules), applied

    @property
    def last_batch_iteration(self) -> int:
        """The number of the last update applied, from 0; -1 before the first."""
        return self._applied() - 1

    def get_lr(self) -> list[float]:
        """The learning rates that the next update uses."""
        return [float(schedule(self._applied())) for schedule in self.schedules]

    def get_last_lr(self) -> list[float]:
        """As `get_lr`, under torch's name."""
        return self.get_lr()
