"""Equinox: a module whose fields are read where its methods use them. The module itself is not edited."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax

from zerojax.adapters.adapter import Parts, is_trainable
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
    namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (_ReadAtUse, kind), namespace)


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
    ) -> Any:
        del rng, compute  # its normalisations compute in float32 and return their input's dtype
        first = lambda *options: next((x for x in options if x is not None), None)
        model = jax.tree.map(first, params, variables, self.rest, is_leaf=lambda x: x is None or is_deferred(x))
        return _prepared(model, training, batch_axes)

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


def _prepared(tree: Any, training: bool, batch_axes: tuple[str, ...]) -> Any:
    """`tree` with each module in it one that reads at use, outside of training in inference mode, and with batch
    statistics over `batch_axes` too."""

    def prepare(part: Any) -> Any:
        if not _is_module(part):
            return part
        is_static = {field.name: field.metadata.get("static", False) for field in dataclasses.fields(part)}
        fields = {
            name: value if is_static.get(name) else _prepared(value, training, batch_axes)
            for name, value in vars(part).items()
        }
        if isinstance(part, eqx.nn.BatchNorm) and batch_axes:
            own = part.axis_name if isinstance(part.axis_name, tuple) else (part.axis_name,)
            fields["axis_name"] = (*own, *batch_axes)
        if "inference" in fields and not training:
            fields["inference"] = True
        is_cut = any(map(is_deferred, jax.tree.leaves(fields, is_leaf=_is_opaque)))
        kind: Any = type(part)
        prepared = object.__new__(_read_at_use(kind) if is_cut else kind)
        for name, value in fields.items():
            object.__setattr__(prepared, name, value)
        return prepared

    return jax.tree.map(prepare, tree, is_leaf=_is_opaque)
