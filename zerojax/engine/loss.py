"""The loss that `engine(batch)` returns: a number once it is asked for."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from zerojax.errors import RunError, UserError

PATIENCE = 300.0  # seconds that a process waits for the others to ask for the same loss

_asked = itertools.count()


class Place(NamedTuple):
    """Where in a run a micro-batch stands.

    Attributes:
      state: the number of the state that it is computed with.
      number: of the micro-batch in its step.
    """

    state: int
    number: int


class PendingLoss:
    """A scalar whose value comes with the step that its micro-batch is part of.

    The engine computes a step's micro-batches in one compiled program, when `step` is called at the boundary. After
    that the value is the program's own. Asked for before (`float`, `print`, arithmetic), it is computed by a forward
    pass of its own, which costs that pass, and which in a run of several processes all of them have to ask for.
    """

    def __init__(self, owner: Any, batch: Any, place: Place, forward: Callable[[Any, Place], jax.Array]):
        self.owner = owner
        self._batch, self._place, self._forward = batch, place, forward
        self._value: jax.Array | None = None
        self._of_step: tuple[jax.Array, int] | None = None
        self._taken = False

    @property
    def value(self) -> jax.Array:
        """The scalar on the device, float32: the mean over the micro-batch on all devices.

        Raises:
          UserError: if it is first asked for when the parameters that it was a loss of have changed.
          RunError: if other processes do not ask for it.
        """
        if self._of_step is not None:
            losses, i = self._of_step
            return losses[i]
        if self._value is None:
            self._value = self._forward(self._batch, self._place)
        return self._value

    def take(self, place: Place, keep: Callable[[Any], Any]) -> Any:
        """The batch, for the step that is to come, as `keep` makes it last until then; once.

        Raises:
          UserError: a second time.
        """
        if self._taken:
            raise UserError("backward was given a loss a second time; accepted: one backward for each forward")
        if place != self._place:
            self._place, self._value = place, None
        self._taken, self._batch = True, keep(self._batch)
        return self._batch

    def settle(self, losses: jax.Array, i: int) -> None:
        """Takes the step's own value, which is entry i of the step's losses, and lets go of the batch."""
        self._of_step, self._batch, self._value = (losses, i), None, None

    def item(self) -> float:
        return float(self)

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __round__(self, digits: int | None = None) -> float:
        return round(float(self), digits)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self._of_step is None:
            return np.asarray(self.value, dtype)
        losses, i = self._of_step
        return np.asarray(np.asarray(losses)[i], dtype)  # no program runs: one process alone may ask

    def __repr__(self) -> str:
        known = self._value is not None or self._of_step is not None
        return repr(float(self)) if known else "<loss, computed with its step>"

    def __str__(self) -> str:
        return str(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)


def wait_for_all(place: Place) -> None:
    """Waits until every process asks for this loss: they compute it together, and one alone would wait for ever.

    Raises:
      RunError: if the others do not.
    """
    if jax.process_count() == 1:
        return
    from orbax.checkpoint import multihost

    key = f"zerojax/loss/{next(_asked)}/{place.state}/{place.number}"
    try:
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=int(1e3 * PATIENCE))
    except jax.errors.JaxRuntimeError as error:
        raise RunError(
            f"process {jax.process_index()} asked for a loss before its step, and other processes did not for "
            f"{PATIENCE:g} seconds; all of them have to, or one alone after the step at the boundary"
        ) from error


def _forwarded(operator: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.value, operator)(*others)


for _name in (
    "abs add bool eq floordiv ge gt int le lt mod mul ne neg pow radd rfloordiv rmod rmul rpow rsub rtruediv sub "
    "truediv"
).split():
    setattr(PendingLoss, f"__{_name}__", _forwarded(f"__{_name}__"))
