"""The dtypes of a training step: what is stored, what is computed with, what is summed."""

import contextlib
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.errors import UserError

NAMED = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The factor that lifts a 16-bit gradient out of underflow; a step whose gradients overflow changes nothing.

    A dynamic scale starts at 2**`initial_power`, doubles after every `window` steps without an overflow and halves at
    an overflow, down to `minimum`. With `hysteresis` n, the first n - 1 overflows leave it as it is; their count starts
    again when the scale doubles or, with `consecutive_hysteresis`, at every step without an overflow.

    Attributes:
      static: a fixed factor in place of a dynamic one.
      initial_power, window, hysteresis, consecutive_hysteresis, minimum: of a dynamic scale.

    Raises:
      UserError: if a field is out of its range.

    >>> LossScale().initial, LossScale(static=128.0).initial
    (65536.0, 128.0)
    """

    static: float | None = None
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0

    def __post_init__(self) -> None:
        numbers: dict[str, tuple[Any, Any, str]] = {
            "static": (float | int | None, lambda x: x is None or 0 < x < float("inf"), "a positive number, or None"),
            "initial_power": (int, lambda x: 0 <= x < 128, "an integer from 0 to 127"),
            "window": (int, lambda x: x > 0, "a positive integer"),
            "hysteresis": (int, lambda x: x > 0, "a positive integer"),
            "minimum": (float | int, lambda x: 0 < x < float("inf"), "a positive number"),
        }
        for name, (kind, holds, accepted) in numbers.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
                raise UserError(f"LossScale.{name} is {value!r}; accepted: {accepted}")

    @property
    def initial(self) -> float:
        """The scale of the first step."""
        return float(2.0**self.initial_power if self.static is None else self.static)


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes at each place of a training step.

    Attributes:
      compute: dtype of the copy of the parameters that the model sees, so of the forward and backward pass and of
        what an all-gather carries.
      reduce: dtype in which gradients are summed over devices. `None` keeps the dtype that the gradient has there:
        the compute dtype where a gradient is reduced at its parameter's use, the accumulation dtype where an
        accumulated sum is reduced.
      accumulate: dtype in which gradients of micro-batches are summed, and which the optimizer is given.
      master: dtype of the parameters between steps.
      loss_scale: the factor on the loss whose gradients are computed, or `None`. With one, a step whose gradients are
        not all finite changes nothing and counts as skipped.
      skip_nonfinite: whether such a step is skipped without a loss scale too.

    Floating inputs in a batch keep their dtype: a loss mask or a regression target must not lose digits, so a model
    that wants 16-bit inputs casts them itself. Integer leaves are never cast.

    >>> Precision.of("bf16").compute
    dtype(bfloat16)
    >>> Precision.of("bf16").master
    dtype('float32')
    """

    compute: Any = jnp.float32
    reduce: Any = None
    accumulate: Any = jnp.float32
    master: Any = jnp.float32
    loss_scale: LossScale | None = None
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "accumulate", "master"):
            value = getattr(self, name)
            if value is not None or name != "reduce":
                object.__setattr__(self, name, _floating(name, value))
        if not isinstance(self.loss_scale, LossScale | None):
            raise UserError(f"Precision.loss_scale is {self.loss_scale!r}; accepted: a zerojax.LossScale, or None")
        if not isinstance(self.skip_nonfinite, bool):
            raise UserError(f"Precision.skip_nonfinite is {self.skip_nonfinite!r}; accepted: True or False")

    @property
    def skips(self) -> bool:
        """Whether a step whose gradients are not finite is skipped."""
        return self.skip_nonfinite or self.loss_scale is not None

    @staticmethod
    def of(value: "str | Precision") -> "Precision":
        """The policy named `value` ("fp32", "bf16", "fp16"), or `value` itself if it is one.

        Raises:
          UserError: for any other name or type.
        """
        if isinstance(value, Precision):
            return value
        if isinstance(value, str) and value in NAMED:
            return Precision(compute=NAMED[value], loss_scale=LossScale() if value == "fp16" else None)
        raise UserError(f"precision is {value!r}; accepted: {', '.join(map(repr, NAMED))} or a zerojax.Precision")


def _floating(name: str, value: Any) -> np.dtype:
    given = repr(value)
    if value is not None:  # which numpy takes for float64
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(NAMED.get(value, value) if isinstance(value, str) else value)
            if jnp.issubdtype(dtype, jnp.floating):
                return dtype
            given = dtype.name
    raise UserError(f"Precision.{name} is {given}; accepted: a floating dtype such as 'float32'")
