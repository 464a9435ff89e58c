"""Moving averages of gradients and of their squares."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

Coefficient = float | jax.Array | optax.Schedule


def moment(decay: Any, values: Any, average: Any) -> Any:
    """The next exponential moving average of `values`, ``decay * average + (1 - decay) * value``."""
    return jax.tree.map(lambda x, m: decay * m + (1 - decay) * x, values, average)


def correction(decay: Any, count: jax.Array) -> jax.Array:
    """1 - decay**count, without the digits that a difference from 1 loses.

    >>> f"{correction(0.999, jnp.array(1)):.9f}"
    '0.001000000'
    """
    log: Any = -math.inf
    if isinstance(decay, jax.Array):
        log = jnp.log(decay)
    elif decay > 0:
        log = math.log(decay)
    return -jnp.expm1(count.astype(jnp.float32) * log)
