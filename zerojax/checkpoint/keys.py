"""Typed random keys as the integers they are stored as."""

from typing import Any

import jax

_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key (`jax.random.key`)."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_data(leaf: jax.Array) -> jax.Array:
    """The array to store for a leaf: a typed key's integers, any other array itself."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def key_target(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The array to read for an abstract leaf, with its sharding."""
    if not is_key(leaf):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def from_key_data(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """What was read, as the abstract leaf wants it."""
    if not is_key(leaf):
        return array
    implementation = next(name for name in _IMPLEMENTATIONS if jax.random.key(0, impl=name).dtype == leaf.dtype)
    return jax.random.wrap_key_data(array, impl=implementation)
