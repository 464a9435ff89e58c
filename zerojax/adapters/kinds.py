"""Which adapter a model takes."""

import sys
from typing import Any

import jax

from zerojax.adapters import tree
from zerojax.adapters.adapter import Adapter, Parts
from zerojax.errors import UserError


def take_apart(model: Any) -> tuple[Adapter, Parts]:
    """The adapter for `model` and the parts of `model`."""
    nnx = sys.modules.get("flax.nnx")  # a model of that kind exists only where it has been imported
    if nnx is not None and isinstance(model, nnx.Module):
        from zerojax.adapters import nnx as nnx_adapter

        return nnx_adapter.take_apart(model)
    if nnx is not None:
        _refuse_parts(nnx, model)
    if "flax.core" in sys.modules:
        from zerojax.adapters import linen

        if linen.is_variables(model):
            return linen.take_apart(model)
    if "equinox" in sys.modules:
        from zerojax.adapters import equinox

        if equinox.is_model(model):
            return equinox.take_apart(model)
    return tree.take_apart(model)


def _refuse_parts(nnx: Any, model: Any) -> None:
    """A module inside of a pytree would have its statistics trained and its modes ignored."""
    kinds = (nnx.Module, nnx.Variable, nnx.State)
    for part in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(part, kinds):
            raise UserError(
                f"make_model returned a pytree with an nnx {type(part).__name__} in it; accepted: one nnx.Module "
                "(nnx.Dict and nnx.List hold several), or a pytree of arrays"
            )
