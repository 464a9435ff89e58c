"""The model's arrays by name, whole on the host: for a dict, or for a file of safetensors."""

import functools
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.names import named_leaves
from zerojax.checkpoint.processes import is_primary
from zerojax.engine.tags import directory_of, on_primary
from zerojax.errors import UserError, shown
from zerojax.zero import State


def state_dict(state: State) -> dict[str, np.ndarray]:
    """Parameters and carried arrays by path, parameters in the model's own dtypes."""
    dtypes = named_leaves(state.layout.model_dtypes)
    return {name: np.asarray(x).astype(dtypes.get(name, x.dtype), copy=False) for name, x in whole_leaves(state)}


def save_16bit(save_dir: str, filename: str, state: State, dtype: Any) -> None:
    """Writes parameters and carried arrays as one safetensors file, floating ones in `dtype`, under paths with dots.

    Raises:
      UserError: if `save_dir` or `filename` is empty.
      CheckpointError: if it cannot be written.
    """
    from safetensors.numpy import save_file

    directory = directory_of("save_dir", save_dir)
    if not isinstance(filename, str) or not filename:
        raise UserError(f"save_filename is {shown(filename)}; accepted: the name of a file")
    tensors = {}
    for name, x in whole_leaves(state):
        if is_primary():  # the others gather along
            floating = jnp.issubdtype(x.dtype, jnp.floating)
            tensors[name.replace("/", ".")] = np.ascontiguousarray(np.asarray(x).astype(dtype if floating else x.dtype))
    unfinished = directory / f"{filename}.tmp"

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, metadata={"format": "np"})
        os.replace(unfinished, directory / filename)

    on_primary(f"model {directory / filename}", write)


def whole_leaves(state: State) -> Iterator[tuple[str, jax.Array]]:
    """Parameters, trained and frozen, and carried arrays one by one by name, whole on every device."""
    for field in ("params", "frozen", "variables"):
        values, leaves = named_leaves(getattr(state, field)), named_leaves(state.layout.leaves[field])
        for name, leaf in leaves.items():
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                whole = _gathering(state.layout.replicated)(values[name]).addressable_data(0)
                yield name, whole[tuple(map(slice, leaf.shape))]


@functools.lru_cache(maxsize=8)
def _gathering(whole: Any) -> Any:
    return jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device), out_shardings=whole)
