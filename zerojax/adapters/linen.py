"""Flax Linen: a parameter in a box that Linen opens where a module uses it. The module itself is not edited."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax.core import meta, unfreeze

from zerojax.adapters.adapter import NO_BLOCKS, Parts, is_trainable
from zerojax.adapters.blocks import Block, Module
from zerojax.adapters.deferred import Deferred, is_deferred
from zerojax.errors import UserError

PARAMS = "params"


@jax.tree_util.register_pytree_node_class
class _Box(Deferred, meta.AxisMetadata):
    """A parameter that is read where Linen unboxes it, inside of `nn.scan`, `nn.remat` and `nn.vmap` too."""

    def unbox(self) -> jax.Array:
        return self.read()

    def replace_boxed(self, val: Any) -> Any:
        # Linen maps over values while it takes axes apart: what it gives back is a part of this box's, or its value.
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> "_Box":
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "_Box":
        return self


def is_variables(model: Any) -> bool:
    """Whether `model` is what `module.init` returns: collections by name, one of them "params"."""
    return isinstance(model, Mapping) and PARAMS in model and all(isinstance(x, Mapping) for x in model.values())


@dataclasses.dataclass(frozen=True, eq=False)
class LinenAdapter:
    """Floating arrays of the collection "params" are parameters, other arrays of it and other collections are carried.

    A loss function gives a collection's new value back in its aux, under the collection's name.

    Attributes:
      collections: the variables as `module.init` made them, boxes (such as `nn.Partitioned`) with abstract values.
    """

    collections: Any
    finds_uses = True
    finds_norms = True

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
        # Linen modules are made where they are called: see `linen_norms` and `linen_blocks`
        del rng, training, batch_axes, compute, blocks
        values = self._values(params, variables)
        boxed = lambda x: _Box(x.parts, x.make, x.regathers) if is_deferred(x) else x
        return values | {PARAMS: jax.tree.map(boxed, values[PARAMS], is_leaf=is_deferred)}

    def whole(self, params: Any, variables: Any, rng: jax.Array) -> Any:
        del rng
        rebox = lambda box, x: box.replace_boxed(x) if meta.is_axis_metadata(box) else x
        return jax.tree.map(rebox, self.collections, self._values(params, variables), is_leaf=meta.is_axis_metadata)

    def _values(self, params: Any, variables: Any) -> dict[str, Any]:
        """The collections, without boxes: an author's own would constrain an array to axes the mesh may not have."""
        if PARAMS in variables:
            params = jax.tree.map(_either, params, variables[PARAMS], is_leaf=_is_value)
        return {name: params if name == PARAMS else variables[name] for name in self.collections}

    def modules(self) -> Mapping[str, Module]:
        return {}

    def carried(self, model: Any, aux: Any) -> tuple[Any, Any]:
        now = _variables(model)
        if not isinstance(aux, Mapping):
            return now, aux
        given = {name: unfreeze(meta.unbox(aux[name])) for name in now if name != PARAMS and name in aux}
        for name, collection in given.items():
            _check_same(name, collection, now[name])
        return now | given, {name: value for name, value in aux.items() if name not in given}


def take_apart(model: Any) -> tuple[LinenAdapter, Parts]:
    collections = unfreeze(model)
    params = jax.tree.map(lambda x: x if is_trainable(x) else None, meta.unbox(collections[PARAMS]))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), collections)
    parts = Parts(params, _variables(collections), jax.tree.map(lambda x: False, params))
    return LinenAdapter(abstract), parts


def _variables(collections: Any) -> dict[str, Any]:
    """All collections without their boxes, and of "params" what is no parameter, if there is any."""
    beside = lambda x: None if is_deferred(x) or is_trainable(x) else x
    variables = {name: meta.unbox(values) for name, values in collections.items() if name != PARAMS}
    fixed = meta.unbox(jax.tree.map(beside, collections[PARAMS], is_leaf=is_deferred))
    return variables | ({PARAMS: fixed} if jax.tree.leaves(fixed) else {})


def _is_value(x: Any) -> bool:
    return x is None or is_deferred(x)


def _either(param: Any, variable: Any) -> Any:
    return variable if param is None else param


def _check_same(name: str, given: Any, before: Any) -> None:
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)
    structure = lambda tree: str(jax.tree.structure(tree))
    if structure(given) != structure(before) or shapes(given) != shapes(before):
        raise UserError(
            f"loss_fn's aux {name!r} has other arrays than the model's collection of that name; accepted: what "
            f"module.apply(..., mutable=[{name!r}]) returns, with the shapes and dtypes it had"
        )
