"""What `initialize` takes for a model and a loss, as what `Zero` takes."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.errors import UserError
from zerojax.mesh import SHARD_AXIS, as_zero_mesh
from zerojax.zero import State, Zero


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
      make: from arrays and a key to the model.
      arrays: of a model that was given; none where it is made by a function.
    """

    make: Callable[[Sequence[Any], jax.Array], Any]
    arrays: Sequence[Any] = ()

    def init(self, zero: Zero, optimizer: Any, seed: int) -> State:
        """As `Zero.init`. Arrays are operands: as constants of the program they would be in its text."""
        if not self.arrays:
            return zero.init(lambda rng: self.make((), rng), optimizer, seed)
        mesh = as_zero_mesh(zero.mesh)
        born = jax.jit(lambda arrays: zero.init(lambda rng: self.make(arrays, rng), optimizer, seed))
        state = born([_spread(x, mesh) for x in self.arrays])
        return jax.device_put(state, state.layout.shardings)  # which say the same, as the step's program has them

    @property
    def make_model(self) -> Callable[[jax.Array], Any]:
        """From a key to a model of the same shapes, to be traced; it holds no arrays."""
        make, kinds = self.make, [(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in self.arrays]
        return lambda rng: make([jnp.zeros(*kind) for kind in kinds], rng)


def source_of(model: Any) -> Source:
    """The source that the argument `model` is.

    What is callable and no pytree of other things is a function that makes a model. An Equinox module is callable too,
    and is a pytree of its arrays; an NNX module is a model by its type.

    Raises:
      UserError: for a Linen module, which has no parameters in it, and for one of torch.
    """
    if any(kind.__module__.startswith("torch.nn.") for kind in type(model).__mro__):
        raise UserError(f"model is a torch {type(model).__name__}; accepted: a JAX model, or a function that makes one")
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")  # imported, where there is such a model
    if linen is not None and isinstance(model, linen.Module):
        raise UserError(
            f"model is a Linen {type(model).__name__}, which holds no parameters; accepted: the variables that its "
            "init returns, or a function: lambda rng: module.init(rng, ...)"
        )
    if nnx is not None and isinstance(model, nnx.Module):
        graph, state = nnx.split(model)
        return _given(state, lambda state: nnx.merge(graph, state))
    if callable(model) and jax.tree_util.all_leaves([model]):
        return Source(lambda arrays, rng: model(rng))
    return _given(model, lambda model: model)


def model_s_own_loss(model: Any, batch: Any, rng: jax.Array) -> Any:
    """The loss of a model that returns it: called with the batch, a tuple's parts as arguments.

    Raises:
      UserError: if the model cannot be called.
    """
    del rng
    if not callable(model):
        raise UserError(
            f"loss_fn is None, and the model is a {type(model).__name__}, which cannot be called with a batch; "
            "accepted: loss_fn=, a function of (model, batch, rng)"
        )
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _given(tree: Any, model_of: Callable[[Any], Any]) -> Source:
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if _is_array(x)]
    rest = [None if i in places else x for i, x in enumerate(leaves)]

    def make(arrays: Sequence[Any], rng: jax.Array) -> Any:
        del rng
        values = dict(zip(places, arrays, strict=True))
        return model_of(jax.tree.unflatten(structure, [values.get(i, x) for i, x in enumerate(rest)]))

    return Source(make, [leaves[i] for i in places])


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _spread(x: Any, mesh: Mesh) -> jax.Array:
    """`x` on the mesh, in shards where a dimension divides: the program cuts it anew, and no device needs it whole."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x
    dim = next((i for i, n in enumerate(x.shape) if n and n % mesh.shape[SHARD_AXIS] == 0), None)
    spec = PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, SHARD_AXIS)
    whole = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), whole.__getitem__)
