"""Flax NNX: a `Param` whose value is made where the module reads it. The module itself is not edited."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.adapters.adapter import NO_BLOCKS, Parts, is_trainable
from zerojax.adapters.blocks import Block, Module, applies, inside_block, is_sliced, parted
from zerojax.adapters.deferred import is_deferred
from zerojax.errors import UserError

NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.BatchNorm)
_NODES = (nnx.Variable, nnx.Pytree)
STREAMS_SALT = 0x6E6E78  # keeps a module's streams apart from what a loss function folds from the key it is given


class _ReadAtUse:
    """Mixed into a type of variable: reading a value that is deferred makes it."""

    def get_value(self, **kwargs: Any) -> Any:
        raw = self.get_raw_value()  # type: ignore[attr-defined]
        if not is_deferred(raw):
            return super().get_value(**kwargs)  # type: ignore[misc]
        plain = type(self).__mro__[2].from_metadata(raw.read(), self.get_metadata())  # type: ignore[attr-defined]
        return plain.get_value(**kwargs)

    def set_value(self, value: Any, **kwargs: Any) -> None:
        if is_deferred(self.get_raw_value()):  # type: ignore[attr-defined]
            name = f"{type(self).__name__} of shape {self.shape}"  # type: ignore[attr-defined]
            raise UserError(
                f"the module assigns to a parameter that is in shards ({name}); accepted: another kind of nnx.Variable "
                "for what a module changes itself, or stage 0 or 1"
            )
        super().set_value(value, **kwargs)  # type: ignore[misc]


@functools.cache
def _read_at_use(kind: type[nnx.Variable]) -> type[nnx.Variable]:
    """The subtype of `kind` that reads at use; filters on `kind` match it."""
    return type(kind.__name__, (_ReadAtUse, kind), {})


@functools.cache
def _rematerialised(kind: type[nnx.Module], block: Block, whole: tuple[int, ...]) -> type[nnx.Module]:
    """The subtype of `kind` whose call is rematerialised as `block` says; of parameters with `whole` dimensions each.

    The type holds what the call needs to know, so that it survives whatever takes the module apart and together.
    """
    call: Any = kind.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = _ndims(self)
        if not applies(block, now, whole):
            return call(self, *args, **kwargs)
        given, put_back = parted((args, kwargs), _NODES)
        outs = []

        def run(module: Any, given: dict[int, Any]) -> dict[int, Any]:
            args, kwargs = put_back(given)
            with inside_block():
                returned, out = parted(call(module, *args, **kwargs), _NODES)
            outs.append(out)
            return returned

        # In a loop there is nothing that the compiler could merge the second forward pass with.
        prevent_cse = not is_sliced(now, whole)
        remat = nnx.remat(run, policy=block.policy, prevent_cse=prevent_cse, graph=True, graph_updates=True)
        returned = remat(self, given)
        return outs[-1](returned)

    namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__call__": __call__}
    return type(kind)(kind.__name__, (kind,), namespace)  # type: ignore[misc]  # of the metaclass that Flax gives it


def _ndims(module: Any) -> tuple[int, ...]:
    return tuple(x.ndim for x in jax.tree.leaves(nnx.state(module, nnx.Param)))


def _is_param(path: Any, value: Any) -> bool:
    return isinstance(value, nnx.Param) and is_trainable(_raw(value))


def _is_carried(path: Any, value: Any) -> bool:
    if isinstance(value, nnx.Param):
        return not is_trainable(_raw(value)) and not is_deferred(_raw(value))
    return not isinstance(value, nnx.RngState | nnx.Intermediate)


def _raw(leaf: Any) -> Any:
    """The array of a variable, or of an attribute that is an array itself (`nnx.data`)."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


@dataclasses.dataclass(frozen=True, eq=False)
class NnxAdapter:
    """Floating `nnx.Param`s are parameters; other variables are carried, but for random streams, which are seeded anew.

    Attributes:
      graph: the module's structure.
      params, rngs, array_variables: the module's variables with abstract values.
    """

    graph: nnx.GraphDef
    params: nnx.State
    rngs: nnx.State
    array_variables: nnx.State
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
    ) -> nnx.Module:
        model = nnx.merge(
            self.graph, _fill(self.params, params), _seed(self.rngs, rng), _fill(self.array_variables, variables)
        )
        if not training:
            model.eval()
        if batch_axes or compute is not None:
            for _, module in nnx.iter_modules(model):
                if batch_axes and isinstance(module, nnx.BatchNorm) and module.axis_name is None:
                    module.axis_name = batch_axes  # type: ignore[assignment]  # lax.pmean takes several axes
                if compute is not None:
                    _compute_in(module, compute)
        if blocks:
            for path, module in list(nnx.iter_modules(model)):
                if block := blocks.get(_path(path)):
                    object.__setattr__(module, "__class__", _rematerialised(type(module), block, _ndims(module)))
        return model

    def modules(self) -> dict[str, Module]:
        model = nnx.merge(self.graph, self.params, self.rngs, self.array_variables)
        return {
            _path(path): Module(type(module).__name__) for path, module in nnx.iter_modules(model) if callable(module)
        }

    def whole(self, params: Any, variables: Any, rng: jax.Array) -> Any:
        return self.join(params, variables, rng, training=True)

    def carried(self, model: nnx.Module, aux: Any) -> tuple[Any, Any]:
        return _arrays(nnx.state(model, _is_carried), like=self.array_variables), aux

    def matches(self, nnx_filter: Any, of_params: bool) -> Any:
        """Whether each parameter, or each carried variable, matches an NNX filter, in nested dicts."""
        predicate = nnx.filterlib.to_predicate(nnx_filter)
        state = self.params if of_params else self.array_variables
        flat = {path: bool(predicate(path, variable)) for path, variable in nnx.to_flat_state(state)}
        return nnx.traversals.unflatten_mapping(flat)


def take_apart(model: nnx.Module) -> tuple[NnxAdapter, Parts]:
    graph, *states = nnx.split(model, _is_param, nnx.RngState, _is_carried, ...)
    params, rngs, carried, _ = states
    norms = {path for path, module in nnx.iter_modules(model) if isinstance(module, NORMS)}
    in_norms = {path: path[:-1] in norms for path, _ in nnx.to_flat_state(params)}
    return (
        NnxAdapter(graph, _abstract(params), _abstract(rngs), _abstract(carried)),
        Parts(
            _arrays(params, like=params),
            _arrays(carried, like=carried),
            nnx.traversals.unflatten_mapping(in_norms),
        ),
    )


def _compute_in(module: Any, compute: Any) -> None:
    """Makes a module return `compute` that would return float32, though its author has not asked for it."""
    if isinstance(module, NORMS) and module.dtype is None:
        # By itself it would return the widest of the dtypes of its inputs, its parameters and its statistics; told a
        # dtype alone, it would round them all to it first.
        module.dtype, module.promote_dtype = compute, _as_they_are  # type: ignore[assignment]
    if isinstance(module, nnx.Embed) and module.dtype == module.param_dtype:
        module.dtype = module.embedding.dtype  # an embedding settles for the dtype that it was made in


def _as_they_are(arrays: Any, *, dtype: Any = None, inexact: bool = True) -> tuple[Any, ...]:
    """A norm's inputs; it computes in float32 whatever they are."""
    del dtype, inexact
    return tuple(None if x is None else jnp.asarray(x) for x in arrays)


def _path(parts: tuple[Any, ...]) -> str:
    return "/".join(map(str, parts))


def _abstract(state: nnx.State) -> nnx.State:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def _arrays(state: nnx.State, like: nnx.State) -> Any:
    """Nested dicts of arrays, of what `like` has too."""
    found = dict(nnx.to_flat_state(state))
    return nnx.traversals.unflatten_mapping({path: _raw(found[path]) for path, _ in nnx.to_flat_state(like)})


def _fill(state: nnx.State, values: Any) -> nnx.State:
    """`state` with the values of nested dicts."""
    flat = nnx.traversals.flatten_mapping(values)
    return nnx.from_flat_state([(path, _with_value(v, flat[path])) for path, v in nnx.to_flat_state(state)])


def _with_value(variable: Any, value: Any) -> Any:
    if not isinstance(variable, nnx.Variable):
        return value
    kind = _read_at_use(type(variable)) if is_deferred(value) else type(variable)
    return kind.from_metadata(value, variable.get_metadata())


def _seed(rngs: nnx.State, rng: jax.Array) -> nnx.State:
    """Random streams that start from `rng`: each key of its own, each count zero."""
    rng = jax.random.fold_in(rng, STREAMS_SALT)

    def seeded(i: int, variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_raw_value()
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            keys = (
                jax.random.split(jax.random.fold_in(rng, i), value.shape) if value.shape else jax.random.fold_in(rng, i)
            )
            return _with_value(variable, keys)
        return _with_value(variable, jnp.zeros(value.shape, value.dtype))

    return nnx.from_flat_state([(path, seeded(i, v)) for i, (path, v) in enumerate(nnx.to_flat_state(rngs))])
