"""The training state: a pytree of global arrays, and the layout that says what they mean."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.adapters import Adapter, is_deferred
from zerojax.errors import UserError
from zerojax.zero.loss_scale import ScalerState
from zerojax.zero.partition import Leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """How the leaves of a state are laid out on a mesh, and what they belong to.

    Attributes:
      mesh: the devices.
      adapter: how a model of the user's kind is made of parameters.
      optimizer: the optax transformation.
      leaves: a `Leaf` for each leaf of the state, in trees of the state's structure under the state's field names.
      model_dtypes: the dtypes of the trained parameters as the user's model has them, in a tree of their structure.
    """

    mesh: Mesh
    adapter: Adapter
    optimizer: Any
    leaves: dict[str, Any]
    model_dtypes: Any

    @property
    def logical(self) -> dict[str, Any]:
        """Every leaf's shape and dtype without padding, under the state's field names."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.leaves)

    @property
    def shardings(self) -> "State":
        """Every leaf's sharding, as a `State`."""
        return State(**jax.tree.map(lambda leaf: leaf.sharding(self.mesh), self.leaves), layout=self)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that is whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def abstract(self) -> "State":
        """The state as `jax.ShapeDtypeStruct`s of the stored shapes, with shardings; `OnDisk` for leaves in files."""
        return State(**jax.tree.map(lambda leaf: leaf.abstract(self.mesh), self.leaves), layout=self)

    def store(self, field: str, tree: Any) -> Any:
        """The stored form of a tree of logical arrays for a field of the state."""
        return jax.tree.map(lambda leaf, x: leaf.store(x, self.mesh), self.leaves[field], tree)

    def view(self, field: str, tree: Any) -> Any:
        """The logical arrays of a stored tree of a field of the state."""
        return jax.tree.map(lambda leaf, x: leaf.view(x, self.mesh), self.leaves[field], tree)

    def fetch(self, field: str, tree: Any) -> Any:
        """A stored tree of a field of the state in device memory, wherever it lies between steps."""
        return jax.tree.map(lambda leaf, x: leaf.fetch(x), self.leaves[field], tree)

    def send(self, field: str, tree: Any) -> Any:
        """A stored tree of a field of the state where it lies between steps."""
        return jax.tree.map(lambda leaf, x: leaf.send(x, self.mesh), self.leaves[field], tree)

    @property
    def uses_files(self) -> bool:
        """Whether some leaves lie in files between steps."""
        return any(leaf.directory is not None for leaf in jax.tree.leaves(self.leaves))

    def in_memory(self, state: "State") -> "State":
        """A state with `None` for the leaves that lie in files."""
        if not self.uses_files:
            return state
        opt_state = jax.tree.map(
            lambda leaf, x: None if leaf.directory else x, self.leaves["opt_state"], state.opt_state
        )
        return dataclasses.replace(state, opt_state=opt_state)

    @property
    def offloads(self) -> bool:
        """Whether some leaves lie in host memory between steps."""
        return any(leaf.offloaded for leaf in jax.tree.leaves(self.leaves))

    @property
    def param_leaves(self) -> list[Leaf]:
        """Of the parameters that are trained."""
        return jax.tree.leaves(self.leaves["params"])

    @property
    def frozen_leaves(self) -> list[Leaf]:
        return jax.tree.leaves(self.leaves["frozen"])

    @property
    def variable_specs(self) -> Any:
        """The partition of each variable."""
        return jax.tree.map(lambda leaf: leaf.spec, self.leaves["variables"])

    def split_variables(self, variables: Any) -> tuple[Any, Any]:
        """Variables that all examples share, and those that have a row for each, with `None` in each other's place."""
        pick = lambda rows: jax.tree.map(
            lambda leaf, x: x if bool(leaf.batch_axes) is rows else None, self.leaves["variables"], variables
        )
        return pick(False), pick(True)

    def join_params(self, params: Sequence[Any], frozen: Sequence[Any]) -> Any:
        """The model's parameters, of trained and frozen ones in the order of their leaves."""
        trained = jax.tree.unflatten(jax.tree.structure(self.leaves["params"]), params)
        rest = jax.tree.unflatten(jax.tree.structure(self.leaves["frozen"]), frozen)
        return either(trained, rest)


def either(a: Any, b: Any) -> Any:
    """One tree of two that have `None` in each other's place."""
    is_leaf = lambda x: x is None or is_deferred(x)
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=is_leaf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What a training run is between two steps.

    Attributes:
      step: int32 scalar, the number of updates applied.
      params: master parameters that are trained, as a tree of global arrays. For an NNX model, nested dicts under its
        attributes' names; for Linen variables, the collection "params".
      frozen: the other parameters in their own dtype, in a tree of the same structure; each has `None` where the other
        has an array.
      opt_state: the optax state; leaves that lie in files are `DiskArray`s.
      variables: arrays of the model that are carried but not trained, such as BatchNorm's statistics.
      rng: uint32 data of the key that all randomness of training is folded from.
      loss_scale: the state of loss scaling, and the number of steps skipped.
      layout: how the leaves are laid out.

    A leaf whose cut dimension the number of devices does not divide is stored with zeros at that dimension's end.
    """

    step: jax.Array
    params: Any
    frozen: Any
    opt_state: Any
    variables: Any
    rng: jax.Array
    loss_scale: ScalerState
    layout: Layout = dataclasses.field(metadata={"static": True})


def check_not_given(state: Any) -> None:
    """Raises: UserError: if a step was given this state before."""
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise UserError(
            "this state was given to a step before, which reuses its memory; accepted: the state that step returned"
        )
