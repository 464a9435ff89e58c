"""Which adapter a model takes."""

import sys
from typing import Any

from zerojax.adapters import tree
from zerojax.adapters.adapter import Adapter, Parts


def take_apart(model: Any) -> tuple[Adapter, Parts]:
    """The adapter for `model` and the parts of `model`."""
    nnx = sys.modules.get("flax.nnx")  # a model of that kind exists only where it has been imported
    if nnx is not None and isinstance(model, nnx.Module):
        from zerojax.adapters import nnx as nnx_adapter

        return nnx_adapter.take_apart(model)
    return tree.take_apart(model)
