"""The loss that `engine(batch)` returns: a number once it is asked for."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zerojax.errors import UserError


class PendingLoss:
    """A scalar whose value comes with the step that its micro-batch is part of.

    The engine computes a step's micro-batches in one compiled program, when `step` is called at the boundary. After
    that the value is the program's own. Asked for before (`float`, `print`, arithmetic), it is computed by a forward
    pass of its own, which costs that pass.
    """

    def __init__(self, owner: Any, batch: Any, forward: Callable[[Any], jax.Array]):
        self.owner = owner
        self._batch, self._forward = batch, forward
        self._value: jax.Array | None = None
        self._step_s: Callable[[], jax.Array] | None = None
        self._taken = False

    @property
    def value(self) -> jax.Array:
        """The scalar on the device, float32: the mean over the micro-batch on all devices."""
        if self._step_s is not None:
            self._value, self._step_s = self._step_s(), None
        if self._value is None:
            self._value = self._forward(self._batch)
        return self._value

    def take_batch(self) -> Any:
        """The batch, for the step; once.

        Raises:
          UserError: a second time.
        """
        if self._taken:
            raise UserError("backward was given a loss a second time; accepted: one backward for each forward")
        self._taken = True
        return self._batch

    def settle(self, value: Callable[[], jax.Array]) -> None:
        """Takes the step's own value, and lets go of the batch."""
        self._step_s, self._batch = value, None

    def item(self) -> float:
        return float(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def __repr__(self) -> str:
        return (
            repr(float(self))
            if self._value is not None or self._step_s is not None
            else "<loss, computed with its step>"
        )

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)


def _forwarded(operator: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.value, operator)(*others)


for _name in "abs add eq ge gt le lt mul ne neg pow radd rmul rsub rtruediv sub truediv".split():
    setattr(PendingLoss, f"__{_name}__", _forwarded(f"__{_name}__"))
