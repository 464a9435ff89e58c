"""Parameters to optimize in tests, and a way to run an optimizer over them."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def params(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Matrices, stacks of layers, a hole and integers."""
    draw = np.random.default_rng(0).normal
    make = lambda *shape: jnp.asarray(draw(size=shape), dtype)
    return {
        "blocks": {"up": {"kernel": make(3, 8, 16), "bias": make(3, 8)}, "norm": {"scale": make(3, 8)}},
        "embedding": make(16, 8),
        "out": {"kernel": make(16, 8), "bias": None},
        "table": jnp.array([1, 2**30 + 1, -7]),
    }


def gradients(like: Any, steps: int, seed: int = 1) -> list[Any]:
    """For each step gradients of every leaf, integers too."""
    random = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(random.normal(size=x.shape) * 3, x.dtype)
    return [jax.tree.map(draw, like) for _ in range(steps)]


def trained(
    optimizer: optax.GradientTransformation,
    params: Any,
    gradients: Iterable[Any],
    wrap: Callable[[Any], Any] = lambda update: update,
) -> Any:
    """The parameters after an update for each of the gradients."""
    state = optimizer.init(params)
    update = wrap(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(got: Any, wanted: Any, rtol: float = 1e-6) -> None:
    """Every leaf, relative to its largest entry."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max())
