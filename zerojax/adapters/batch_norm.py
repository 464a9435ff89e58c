"""Statistics over the whole micro-batch for Linen modules that normalise by the batch."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def linen_statistics_over(axes: tuple[str, ...]) -> Iterator[None]:
    """Every `linen.BatchNorm` called meanwhile, that names no axis itself, takes its statistics over mesh axes `axes`.

    A Linen module is made where it is called, inside the user's function, so it is met there.
    """
    linen: Any = sys.modules.get("flax.linen")  # where it was never imported, no module of its kind is called
    if linen is None or not axes:
        yield
        return

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if not isinstance(module, linen.BatchNorm) or module.axis_name is not None:
            return call(*args, **kwargs)
        object.__setattr__(module, "axis_name", axes)
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", None)

    with linen.intercept_methods(intercept):
        yield
