"""A parameter that becomes an array only where a layer uses it."""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

from zerojax.adapters.regather import all_but_gathered

F = TypeVar("F", bound=Callable[..., Any])

USE, NORM_USE = "zerojax.use", "zerojax.use_in_norm"

# Whether a normalisation is running whose kind is known only where it runs, as Linen's.
inside_norm: contextvars.ContextVar[bool] = contextvars.ContextVar("inside_norm", default=False)


@jax.tree_util.register_pytree_node_class
class Deferred:
    """Stands for a parameter in a model: a pytree of the arrays it is made from, and the function that makes it.

    As a pytree it passes through `scan`, `remat` and `vmap` like an array, its parts sliced like one.
    """

    def __init__(self, parts: tuple[jax.Array, ...], make: Callable[..., jax.Array], regathers: bool = False):
        """`regathers`: whether a `block` that reads it makes it anew for its backward pass instead of keeping it."""
        self.parts, self.make, self.regathers = parts, make, regathers
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

    def __getattr__(self, name: str) -> Any:
        # NNX looks an array's attributes up in the raw value, as in `self.kernel.T`.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.read(), name)

    def __jax_array__(self) -> jax.Array:
        return self.read()

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], tuple[Callable[..., jax.Array], bool]]:
        return self.parts, (self.make, self.regathers)

    @classmethod
    def tree_unflatten(cls, static: tuple[Callable[..., jax.Array], bool], parts: tuple[jax.Array, ...]) -> "Deferred":
        return cls(parts, *static)


def _forwarded(operator: str) -> Callable[..., Any]:
    return lambda self, *operands: getattr(self.read(), operator)(*operands)


# A model that takes a parameter by itself, past the framework that would read it, computes with it as with an array.
for _name in (
    "abs add eq floordiv ge getitem gt le len lt matmul mod mul ne neg pow radd rfloordiv rmatmul rmod rmul rpow rsub "
    "rtruediv sub truediv"
).split():
    setattr(Deferred, f"__{_name}__", _forwarded(f"__{_name}__"))


def is_deferred(x: Any) -> bool:
    return isinstance(x, Deferred)


def read(x: Any) -> Any:
    return x.read() if is_deferred(x) else x


def block(function: F) -> F:
    """Marks the function of a layer: the parameters among its arguments are gathered when it is entered.

    For models that are plain functions over pytrees. With stage 3, a layer's parameters then exist whole only while
    the layer runs, forward and again backward; parameters that enter no block are gathered when the model is entered.
    The block keeps what the layer computes for the backward pass; to have that computed again too, put
    `jax.checkpoint` around it: `jax.checkpoint(zerojax.block(layer))`.

    >>> import jax.numpy as jnp
    >>> @block
    ... def layer(weights, h):
    ...     return jnp.tanh(h @ weights["kernel"])
    >>> layer({"kernel": jnp.eye(2)}, jnp.zeros((1, 2))).shape
    (1, 2)
    """

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_deferred)
        traced = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array | Deferred)}

        def run(traced: dict[int, Any]) -> Any:
            enter = lambda x: mark_use(x) if isinstance(x, jax.Array) else read(x)
            args, kwargs = jax.tree.unflatten(tree, [enter(traced.get(i, x)) for i, x in enumerate(leaves)])
            return function(*args, **kwargs)

        shapes = {x.shape for x in traced.values() if isinstance(x, Deferred) and x.regathers}
        return (jax.checkpoint(run, policy=all_but_gathered(shapes)) if shapes else run)(traced)

    return entered  # type: ignore[return-value]


def mark_use(x: jax.Array) -> jax.Array:
    """`x`, its use, the shape it has there and whether that is in a norm named in the program, for the search for uses.

    A name, since traces are cached: what a search would note on the side, a cached trace would not tell again. It costs
    nothing when compiled.
    """
    return checkpoint_name(x, f"{NORM_USE if inside_norm.get() else USE} {'x'.join(map(str, x.shape))}")


def marked_shape(name: str) -> tuple[int, ...] | None:
    """The shape in a name that `mark_use` has given, `None` for other names.

    >>> marked_shape("zerojax.use 4x16"), marked_shape("zerojax.use "), marked_shape("attention")
    ((4, 16), (), None)
    """
    kind, _, shape = name.partition(" ")
    return tuple(int(n) for n in shape.split("x") if n) if kind in (USE, NORM_USE) else None


def is_marked_in_norm(name: str) -> bool:
    """Whether the use that `mark_use` has given a name was in a norm."""
    return name.startswith(NORM_USE)
