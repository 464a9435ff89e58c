"""Linen's normalisations, which are met where they are called: a Linen module is made inside the user's function."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from zerojax.adapters.deferred import inside_norm


@contextlib.contextmanager
def in_loss(batch_axes: tuple[str, ...], compute: Any) -> Iterator[None]:
    """As `Adapter.join`'s, of all normalisations called meanwhile; what their authors have set stays.

    `linen.BatchNorm` takes its statistics over `batch_axes`, if there are any. Every normalisation returns `compute`,
    if that is given; it computes in float32 in any case.
    """
    linen: Any = sys.modules.get("flax.linen")  # where it was never imported, no module of its kind is called
    if linen is None or not (batch_axes or compute is not None):
        yield
        return
    norms = (linen.LayerNorm, linen.RMSNorm, linen.GroupNorm, linen.InstanceNorm, linen.BatchNorm)

    def prepare(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if not isinstance(module, norms):
            return call(*args, **kwargs)
        settings: dict[str, Any] = {}
        if batch_axes and isinstance(module, linen.BatchNorm) and module.axis_name is None:
            settings["axis_name"] = batch_axes
        if compute is not None and module.dtype is None:
            settings["dtype"] = compute
        for name, value in settings.items():
            object.__setattr__(module, name, value)
        token = inside_norm.set(True)
        try:
            return call(*args, **kwargs)
        finally:
            inside_norm.reset(token)
            for name in settings:
                object.__setattr__(module, name, None)

    with linen.intercept_methods(prepare):
        yield
