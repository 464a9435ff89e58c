"""A model or a training state as named parameters with their shapes, dtypes and shards."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from zerojax.adapters import take_apart
from zerojax.checkpoint.names import named_leaves
from zerojax.errors import UserError, shown
from zerojax.weights.transforms import Shape
from zerojax.zero.disk import DiskArray
from zerojax.zero.state import State
from zerojax.zero.streamed import new_opt_state

FIELDS = ("params", "frozen")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        array: as it is stored.
        shape: of the parameter; the stored array may be longer, filled up with zeros.
    """

    array: jax.Array
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Target:
    """What weights are read into or written from.

    Attributes:
        model: the module; of a state, with abstract arrays.
        parameters: by name.
    """

    model: nnx.Module
    parameters: Mapping[str, Parameter]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: parameter.shape for name, parameter in self.parameters.items()}


def target_of(state_or_model: Any) -> Target:
    """
    Raises:
        UserError: it is neither an NNX module nor the state of one.
    """
    if isinstance(state_or_model, nnx.Module):
        params = take_apart(state_or_model)[1].params
        return Target(state_or_model, {name: Parameter(x, x.shape) for name, x in named_leaves(params).items()})
    model = _abstract_model(state_or_model) if isinstance(state_or_model, State) else None
    if not isinstance(model, nnx.Module):
        raise UserError(f"weights of {shown(state_or_model)}: must be an nnx.Module, or a State of one")
    parameters: dict[str, Parameter] = {}
    for field in FIELDS:
        leaves = named_leaves(state_or_model.layout.leaves[field])
        arrays = named_leaves(getattr(state_or_model, field))
        parameters |= {name: Parameter(arrays[name], leaf.shape) for name, leaf in leaves.items()}
    return Target(model, parameters)


def replaced(state_or_model: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """The state, with an optimizer state that begins anew, or the model, with ``arrays`` for parameters."""
    if isinstance(state_or_model, nnx.Module):
        adapter, parts = take_apart(state_or_model)
        return adapter.join(_filled(parts.params, arrays), parts.variables, jax.random.key(0), training=True)
    fields = {field: _filled(getattr(state_or_model, field), arrays) for field in FIELDS}
    return dataclasses.replace(state_or_model, **fields, opt_state=_new_opt_state(state_or_model, fields["params"]))


def _filled(tree: Any, arrays: Mapping[str, jax.Array]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in named_leaves(tree)])


def _abstract_model(state: State) -> Any:
    layout = state.layout
    abstract = lambda leaves: [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    params = layout.join_params(abstract(layout.param_leaves), abstract(layout.frozen_leaves))
    return layout.adapter.join(params, layout.logical["variables"], jax.random.key(0), training=True)


def _new_opt_state(state: State, params: Any) -> Any:
    """What the optimizer begins with: it may hold copies of the parameters, which would be the old ones."""
    layout = state.layout
    if layout.uses_files:
        places = [x.successor() if isinstance(x, DiskArray) else x for x in jax.tree.leaves(state.opt_state)]
        return new_opt_state(layout, params, jax.tree.unflatten(jax.tree.structure(state.opt_state), places))
    for leaf in jax.tree.leaves(state.opt_state):
        leaf.delete()

    def init(params: Any) -> Any:
        params = layout.view("params", layout.fetch("params", params))
        return layout.store("opt_state", layout.optimizer.init(params))

    return jax.jit(init, out_shardings=layout.shardings.opt_state)(params)
