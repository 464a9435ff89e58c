"""Equinox: a module whose fields are read where its methods use them. The module itself is not edited."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax

from zerojax.adapters.adapter import NO_BLOCKS, Parts, is_trainable
from zerojax.adapters.blocks import Block, Module, applies, inside_block, is_sliced
from zerojax.adapters.deferred import is_deferred, read
from zerojax.errors import UserError

# `eqx.nn.BatchNorm` is none of them: it returns the dtype of its statistics.
NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm)


class _ReadAtUse:
    """Mixed into a type of module: a field that is a deferred array, or a container of some, is read when it is got."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name.startswith("__") or name not in object.__getattribute__(self, "__dict__"):
            return value
        return jax.tree.map(read, value, is_leaf=_is_opaque)


@functools.cache
def _read_at_use(kind: Any) -> type[eqx.Module]:
    return _subtype(kind, (_ReadAtUse, kind), {})


@functools.cache
def _rematerialised(kind: Any, block: Block, whole: tuple[int, ...]) -> type[eqx.Module]:
    """The subtype of `kind` whose call is rematerialised as `block` says; of arrays with `whole` dimensions each."""
    call = kind.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = _ndims(self)
        if not applies(block, now, whole):
            return call(self, *args, **kwargs)

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            with inside_block():
                return call(module, *args, **kwargs)

        prevent_cse = not is_sliced(now, whole)
        return eqx.filter_checkpoint(run, policy=block.policy, prevent_cse=prevent_cse)(self, *args, **kwargs)

    return _subtype(kind, (kind,), {"__call__": __call__})


def _subtype(kind: Any, bases: tuple[type, ...], namespace: dict[str, Any]) -> type[eqx.Module]:
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__, **namespace})


def _ndims(module: Any) -> tuple[int, ...]:
    return tuple(x.ndim for x in jax.tree.leaves(module) if eqx.is_array(x))


def is_model(model: Any) -> bool:
    """Whether `model` is an Equinox module, or a tree with one in it."""
    return any(isinstance(part, eqx.Module) for part in jax.tree.leaves(model, is_leaf=_is_module))


@dataclasses.dataclass(frozen=True, eq=False)
class EquinoxAdapter:
    """Floating arrays are parameters; an `eqx.nn.State` and other arrays are carried.

    A loss function gives a new `eqx.nn.State` back in its aux, under any name.

    Attributes:
      rest: the model's tree with `None` at every array.
      variables: the structure of the carried arrays.
    """

    rest: Any
    variables: Any
    finds_uses = True
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
        del rng, compute  # its normalisations compute in float32 and return their input's dtype
        first = lambda *options: next((x for x in options if x is not None), None)
        model = jax.tree.map(first, params, variables, self.rest, is_leaf=lambda x: x is None or is_deferred(x))
        return _prepared(model, training, batch_axes, blocks)

    def modules(self) -> dict[str, Module]:
        return dict(_modules(self.rest))

    def whole(self, params: Any, variables: Any, rng: jax.Array) -> Any:
        return self.join(params, variables, rng, training=True)

    def carried(self, model: Any, aux: Any) -> tuple[Any, Any]:
        is_state = lambda x: isinstance(x, eqx.nn.State)
        given = {name: x for name, x in aux.items() if is_state(x)} if isinstance(aux, dict) else {}
        if len(given) > 1:
            raise UserError(f"loss_fn's aux has an eqx.nn.State under {sorted(given)}; accepted: one")
        for state in given.values():
            model = jax.tree.map(lambda x, new=state: new if is_state(x) else x, model, is_leaf=is_state)
            aux = {name: x for name, x in aux.items() if name not in given}
        return jax.tree.unflatten(self.variables, jax.tree.leaves(_split(model)[1])), aux


def take_apart(model: Any) -> tuple[EquinoxAdapter, Parts]:
    params, variables, rest = _split(model)
    is_norm = lambda x: isinstance(x, NORMS)
    marked = jax.tree.map(lambda part: jax.tree.map(lambda _: is_norm(part), part), model, is_leaf=is_norm)
    in_norms = jax.tree.map(lambda x, mark: None if x is None else mark, params, marked, is_leaf=lambda x: x is None)
    return EquinoxAdapter(rest, jax.tree.structure(variables)), Parts(params, variables, in_norms)


def _split(model: Any) -> tuple[Any, Any, Any]:
    """Parameters, carried arrays and the rest, each in the model's tree with `None` for what is not of its kind."""
    is_array = lambda x: hasattr(x, "dtype") and hasattr(x, "shape")
    is_state = lambda x: isinstance(x, eqx.nn.State)

    def of_kind(kind: str) -> Any:
        def of_part(part: Any) -> Any:
            trains = not is_state(part)
            kind_of = lambda x: "rest" if not is_array(x) else "param" if trains and is_trainable(x) else "carried"
            return jax.tree.map(lambda x: x if kind_of(x) == kind else None, part, is_leaf=is_deferred)

        return jax.tree.map(of_part, model, is_leaf=lambda x: is_state(x) or is_deferred(x))

    return of_kind("param"), of_kind("carried"), of_kind("rest")


def _is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def _is_opaque(x: Any) -> bool:
    """What a read of a field stops at: a module inside reads its own fields itself."""
    return is_deferred(x) or _is_module(x)


def _prepared(
    tree: Any, training: bool, batch_axes: tuple[str, ...], blocks: Mapping[str, Block], path: tuple[Any, ...] = ()
) -> Any:
    """`tree` with each module in it one that reads at use, outside of training in inference mode, with batch statistics
    over `batch_axes` too, and rematerialised if `blocks` has its path."""

    def prepare(inner: tuple[Any, ...], part: Any) -> Any:
        if not _is_module(part):
            return part
        here = (*path, *inner)
        is_static = {field.name: field.metadata.get("static", False) for field in dataclasses.fields(part)}
        fields = {
            name: value
            if is_static.get(name)
            else _prepared(value, training, batch_axes, blocks, (*here, jax.tree_util.GetAttrKey(name)))
            for name, value in vars(part).items()
        }
        if isinstance(part, eqx.nn.BatchNorm) and batch_axes:
            own = part.axis_name if isinstance(part.axis_name, tuple) else (part.axis_name,)
            fields["axis_name"] = (*own, *batch_axes)
        if "inference" in fields and not training:
            fields["inference"] = True
        kind: Any = type(part)
        if any(map(is_deferred, jax.tree.leaves(fields, is_leaf=_is_opaque))):
            kind = _read_at_use(kind)
        if block := blocks.get(_name(here)):
            kind = _rematerialised(kind, block, _ndims(part))
        prepared = object.__new__(kind)
        for name, value in fields.items():
            object.__setattr__(prepared, name, value)
        return prepared

    return jax.tree_util.tree_map_with_path(prepare, tree, is_leaf=_is_opaque)


def _modules(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Module]]:
    """The modules in `tree` by path."""
    for inner, part in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_module):
        if _is_module(part):
            here = (*path, *inner)
            if callable(part):
                yield _name(here), Module(type(part).__name__)
            for name, value in vars(part).items():
                yield from _modules(value, (*here, jax.tree_util.GetAttrKey(name)))


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
