"""Which leaves of a model an optimizer changes, and what it computes in."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def on_floating_leaves(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """``inner``, which sees floating leaves alone; updates of others, such as integers, are zeros.

    >>> optimizer = on_floating_leaves(optax.sgd(0.5))
    >>> params = {"w": jnp.ones(2), "table": jnp.array([7, 2**30 + 1])}
    >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
    >>> optax.apply_updates(params, updates)["table"].tolist()
    [7, 1073741825]
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return inner.init(_where_floating(params, params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        leaves = updates if params is None else params
        seen = None if params is None else _where_floating(params, params)
        new, state = inner.update(_where_floating(leaves, updates), state, seen, **extra)
        return jax.tree.map(lambda x, u: u if _is_floating(x) else jnp.zeros_like(x), leaves, new), state

    return optax.GradientTransformationExtraArgs(init, update)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """``inner`` on floating leaves, with float32 in place of 16-bit floats: its state, its arithmetic, its updates.

    A moment of fp16 gradients overflows or vanishes, and a small update of bf16 parameters is rounded only once, where
    `optax.apply_updates` adds it. float64 stays float64.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return inner.init(_promoted(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return inner.update(_promoted(updates), state, None if params is None else _promoted(params), **extra)

    return on_floating_leaves(optax.GradientTransformationExtraArgs(init, update))


def _where_floating(leaves: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x, y: y if _is_floating(x) else None, leaves, tree)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x), jnp.floating)


def _promoted(tree: Any) -> Any:
    def promote(x: Any) -> Any:
        dtype = jnp.promote_types(jnp.result_type(x), jnp.float32)
        return x if jnp.result_type(x) == dtype else jnp.astype(x, dtype)

    return jax.tree.map(promote, tree)
