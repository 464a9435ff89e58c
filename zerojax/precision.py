"""The dtypes of a training step: what is stored, what is computed with, what is summed."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.errors import UserError, shown
from zerojax.paths import as_patterns, matches

NAMED = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
DTYPES = ("float32", "bfloat16", "float16", "float64")
PLACES = ("master", "compute", "accumulate", "reduce")


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
        if self.static is None and self.minimum > self.initial:
            raise UserError(
                f"LossScale.minimum is {self.minimum!r}, and the scale begins at 2**{self.initial_power}; accepted: at "
                "most that"
            )

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
      master: dtype of the parameters between steps. In 16 bit, small steps are lost without
        `zerojax.optim.stochastic_rounding` or `zerojax.optim.kahan`.
      loss_scale: the factor on the loss whose gradients are computed, or `None`. With one, a step whose gradients are
        not all finite changes nothing and counts as skipped.
      skip_nonfinite: whether such a step is skipped without a loss scale too.
      keep: patterns of the paths of parameters that the model sees in float32 whatever `compute` is, such as
        "*router*"; * stands for anything, also for slashes. What a model computes from them is float32 unless the model
        casts it.
      keep_norms: whether it sees those of normalisations so: modules of NNX, Linen and Equinox. These return `compute`
        nevertheless.

    There is no dtype of the output: a loss is summed in float32, and what a model gives its loss function is its own.
    Floating inputs in a batch keep their dtype: a loss mask or a regression target must not lose digits, so a model
    that wants 16-bit inputs casts them itself. Variables and integer leaves are never cast.

    Raises:
      UserError: if a dtype is not one of float32, bfloat16, float16 and, with `jax_enable_x64`, float64, or another
        field is out of its range.

    >>> Precision.of("bf16").compute
    dtype(bfloat16)
    >>> Precision.of("bf16,reduce=float32") == Precision(compute="bfloat16", reduce="float32")
    True
    """

    compute: Any = jnp.float32
    reduce: Any = None
    accumulate: Any = jnp.float32
    master: Any = jnp.float32
    loss_scale: LossScale | None = None
    skip_nonfinite: bool = False
    keep: str | Sequence[str] = ()
    keep_norms: bool = True

    def __post_init__(self) -> None:
        for name in PLACES:
            value = getattr(self, name)
            if value is not None or name != "reduce":
                object.__setattr__(self, name, _floating(name, value))
        if not isinstance(self.loss_scale, LossScale | None):
            raise UserError(f"Precision.loss_scale is {self.loss_scale!r}; accepted: a zerojax.LossScale, or None")
        for name in ("skip_nonfinite", "keep_norms"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"Precision.{name} is {getattr(self, name)!r}; accepted: True or False")
        object.__setattr__(self, "keep", tuple(as_patterns("Precision.keep", self.keep)))

    @property
    def skips(self) -> bool:
        """Whether a step whose gradients are not finite is skipped."""
        return self.skip_nonfinite or self.loss_scale is not None

    @property
    def kept(self) -> np.dtype:
        """The dtype in which a model sees what is kept: float32, or the compute dtype if that is wider."""
        return jnp.promote_types(self.compute, jnp.float32)

    def compute_of(self, path: str, *, in_norm: bool = False) -> np.dtype:
        """The dtype in which the model sees a parameter.

        Args:
          path: the parameter's, such as "blocks/mlp/up/kernel".
          in_norm: whether it belongs to a normalisation.

        >>> Precision(compute="bf16", keep="*router*").compute_of("layers/router/kernel")
        dtype('float32')
        """
        return self.kept if in_norm and self.keep_norms or matches(path, self.keep) else self.compute

    @staticmethod
    def of(value: "str | Precision") -> "Precision":
        """The policy that `value` describes, or `value` itself if it is one.

        Args:
          value: items with commas between them. The first may be a name: "fp32", "bf16", or "fp16", which scales the
            loss. The others are PLACE=DTYPE, of the places master, compute, accumulate and reduce.

        Raises:
          UserError: for anything else.

        >>> Precision.of("master=bfloat16,compute=bfloat16").accumulate
        dtype('float32')
        """
        if isinstance(value, Precision):
            return value
        if not isinstance(value, str):
            raise _refused(value, "")
        first, *rest = items = [item.strip() for item in value.split(",")]
        settings: dict[str, Any] = {}
        if first in NAMED:
            items = rest
            settings = {"compute": NAMED[first], "loss_scale": LossScale() if first == "fp16" else None}
        written = set()
        for item in items:
            place, is_pair, dtype = item.partition("=")
            if not is_pair or place not in PLACES or place in written:
                raise _refused(value, f": {item!r}" if item != value else "")
            written.add(place)
            settings[place] = dtype
        return Precision(**settings)


def _refused(value: Any, where: str) -> UserError:
    return UserError(
        f"precision is {shown(value)}{where}; accepted: {', '.join(map(repr, NAMED))}, PLACE=DTYPE of "
        f"{', '.join(PLACES)}, such items once each with commas between, or a zerojax.Precision"
    )


def _floating(name: str, value: Any) -> np.dtype:
    accepted = DTYPES if jax.config.read("jax_enable_x64") else DTYPES[:-1]
    given = shown(value)
    if value is not None:  # which numpy takes for float64
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(NAMED.get(value, value) if isinstance(value, str) else value)
            if dtype.name in accepted:
                return dtype
            given = dtype.name
    raise UserError(f"Precision.{name} is {given}; accepted: {', '.join(map(repr, accepted))}")
