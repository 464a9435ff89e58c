"""The dtypes of a training step: what is stored, what is computed with, what is summed."""

import contextlib
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.errors import UserError

NAMED = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "reduce":
                object.__setattr__(self, field.name, _floating(field.name, value))

    @staticmethod
    def of(value: "str | Precision") -> "Precision":
        """The policy named `value` ("fp32", "bf16"), or `value` itself if it is one.

        Raises:
          UserError: for any other name or type.
        """
        if isinstance(value, Precision):
            return value
        if isinstance(value, str) and value in NAMED:
            return Precision(compute=NAMED[value])
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
