"""What an adapter does, whatever the kind of model."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from zerojax.adapters.blocks import Block, Module

NO_BLOCKS: Mapping[str, Block] = MappingProxyType({})


class Parts(NamedTuple):
    """A model taken apart.

    Attributes:
      params: the arrays to train, as a tree.
      variables: the arrays that are carried but not trained, as a tree.
      in_norms: for each parameter whether it is known to belong to a normalisation that returns `join`'s `compute`
        whatever the parameter's dtype, in a tree of their structure.
    """

    params: Any
    variables: Any
    in_norms: Any


class Adapter(Protocol):
    """Makes a model of one kind and one structure from its parts, inside or outside of a traced function.

    A parameter may be an array or a `Deferred`, which turns into an array where the model uses it.
    """

    finds_uses: bool
    """Whether every read of a parameter inside the model passes through `Deferred.read`; otherwise only entries into a
    `block` do, and a parameter that is used elsewhere has to be an array."""

    finds_norms: bool
    """Whether only a run of the model tells which parameters belong to normalisations (see `Use.in_norm`)."""

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
        """The model for a loss. `rng` seeds the random streams it holds itself; training leaves the mode it was made
        in. Over `batch_axes` of the mesh its normalisations by the batch take their statistics. With `compute`, a
        16-bit dtype, modules that would return float32 return that: normalisations, which compute in float32. The
        modules whose paths `blocks` has are rematerialised."""
        ...

    def modules(self) -> Mapping[str, Module]:
        """The modules that can be called, by path; without those that exist only where they are called."""
        ...

    def whole(self, params: Any, variables: Any, rng: jax.Array) -> Any:
        """The model as `make_model` returned it, from arrays."""
        ...

    def carried(self, model: Any, aux: Any) -> tuple[Any, Any]:
        """The carried arrays of `model` after it has run, and what remains of the loss function's aux."""
        ...


def is_trainable(x: Any) -> bool:
    """Whether `x` is an array of floating numbers."""
    return hasattr(x, "dtype") and hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.floating)
