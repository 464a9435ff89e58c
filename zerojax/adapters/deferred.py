"""A parameter that becomes an array only where a layer uses it."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

F = TypeVar("F", bound=Callable[..., Any])

BLOCK_ENTRY = "zerojax.block"


@jax.tree_util.register_pytree_node_class
class Deferred:
    """Stands for a parameter in a model: a pytree of the arrays it is made from, and the function that makes it.

    As a pytree it passes through `scan`, `remat` and `vmap` like an array, its parts sliced like one.
    """

    def __init__(self, parts: tuple[jax.Array, ...], make: Callable[..., jax.Array]):
        self.parts, self.make = parts, make
        self._memo: tuple[Any, jax.Array] | None = None

    def read(self) -> jax.Array:
        """The whole parameter; a second read in the same trace is the same array, made once."""
        trace = get_opaque_trace_state(convention="zerojax")
        if self._memo is None or self._memo[0] != trace:
            self._memo = trace, self.make(*self.parts)
        return self._memo[1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._abstract.shape

    @property
    def ndim(self) -> int:
        return self._abstract.ndim

    @property
    def size(self) -> int:
        return self._abstract.size

    @property
    def dtype(self) -> Any:
        return self._abstract.dtype

    @property
    def _abstract(self) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(self.make, *self.parts)

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], Callable[..., jax.Array]]:
        return self.parts, self.make

    @classmethod
    def tree_unflatten(cls, make: Callable[..., jax.Array], parts: tuple[jax.Array, ...]) -> "Deferred":
        return cls(parts, make)


def is_deferred(x: Any) -> bool:
    return isinstance(x, Deferred)


def read(x: Any) -> Any:
    return x.read() if is_deferred(x) else x


def block(function: F) -> F:
    """Marks the function of a layer: the parameters among its arguments are gathered when it is entered.

    For models that are plain functions over pytrees. With stage 3, a layer's parameters then exist whole only while
    the layer runs; parameters that enter no block are gathered when the model is entered. Under `jax.checkpoint` the
    block stands inside: `jax.checkpoint(zerojax.block(layer))`, so that the backward pass gathers again.

    >>> import jax.numpy as jnp
    >>> @block
    ... def layer(weights, h):
    ...     return jnp.tanh(h @ weights["kernel"])
    >>> layer({"kernel": jnp.eye(2)}, jnp.zeros((1, 2))).shape
    (1, 2)
    """

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(_enter, (args, kwargs), is_leaf=is_deferred)
        return function(*args, **kwargs)

    return entered  # type: ignore[return-value]


def _enter(x: Any) -> Any:
    # The name marks the entry in the traced program, for the search for uses; it costs nothing when compiled.
    return checkpoint_name(x, BLOCK_ENTRY) if isinstance(x, jax.Array) else read(x)
