"""A loss that says what it weighs."""

from typing import NamedTuple

import jax


class Weighted(NamedTuple):
    """A sum of losses beside the sum of their weights.

    A mean of means is not the mean when micro-batches or devices hold different numbers of tokens. A loss function
    that returns its sum and its weight leaves the division to the one place that sees every micro-batch and every
    device: loss and gradients are those of ``sum(total) / sum(weight)`` over all of them.

    Attributes:
        total: scalar, the weighted sum of the examples' losses.
        weight: scalar, the sum of their weights; no gradient flows through it.

    >>> import jax.numpy as jnp
    >>> a, b = Weighted(jnp.float32(6.0), jnp.float32(2.0)), Weighted(jnp.float32(1.0), jnp.float32(1.0))
    >>> float((a.total + b.total) / (a.weight + b.weight))  # the mean of the means would be 2.0
    2.3333332538604736
    """

    total: jax.Array
    weight: jax.Array
