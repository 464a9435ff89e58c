"""Models that are pytrees of arrays: plain functions' parameters, and modules that are pytrees themselves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from zerojax.adapters.adapter import NO_BLOCKS, Parts, is_trainable
from zerojax.adapters.blocks import Block, Module
from zerojax.adapters.deferred import is_deferred


@dataclasses.dataclass(frozen=True, eq=False)
class TreeAdapter:
    """Floating arrays are parameters, other arrays are variables, and what is no array stays as it is.

    Attributes:
      rest: the model's tree with `None` at every array.
    """

    rest: Any
    finds_uses = False
    finds_norms = False

    def join(
        self,
        params: Any,
        variables: Any,
        rng: jax.Array,
        *,
        training: bool,
        batch_axes: tuple[str, ...] = (),
        compute: Any = None,
        blocks: Mapping[str, Block] = NO_BLOCKS,
    ) -> Any:
        del rng, training, batch_axes, compute, blocks
        return jax.tree.map(_first, self.rest, params, variables, is_leaf=lambda x: x is None)

    def whole(self, params: Any, variables: Any, rng: jax.Array) -> Any:
        return self.join(params, variables, rng, training=True)

    def modules(self) -> Mapping[str, Module]:
        return {}

    def carried(self, model: Any, aux: Any) -> tuple[Any, Any]:
        return _split(model)[1], aux


def take_apart(model: Any) -> tuple[TreeAdapter, Parts]:
    params, variables, rest = _split(model)
    return TreeAdapter(rest), Parts(params, variables, jax.tree.map(lambda x: False, params))


def _split(model: Any) -> tuple[Any, Any, Any]:
    is_array = lambda x: hasattr(x, "dtype") and hasattr(x, "shape")
    pick = lambda choose: jax.tree.map(choose, model, is_leaf=is_deferred)
    params = pick(lambda x: x if is_trainable(x) else None)
    variables = pick(lambda x: x if is_array(x) and not is_trainable(x) else None)
    rest = pick(lambda x: None if is_array(x) else x)
    return params, variables, rest


def _first(rest: Any, param: Any, variable: Any) -> Any:
    return param if param is not None else variable if variable is not None else rest
