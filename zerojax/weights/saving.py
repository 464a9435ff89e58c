"""Writing weights, one layer of one parameter at a time."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoint.errors import CheckpointError, first_line
from zerojax.checkpoint.processes import agreed, from_primary, is_primary
from zerojax.errors import UserError, shown
from zerojax.weights.files import (
    DTYPES,
    INDEX,
    SINGLE,
    SUFFIX,
    Shard,
    Spec,
    TensorWriter,
    dtype_name,
    index_of,
    plan_shards,
)
from zerojax.weights.formats import format_of
from zerojax.weights.pieces import Piece, pieces_of
from zerojax.weights.targets import Parameter, target_of
from zerojax.zero.partition import PINNED_HOST

TEMPORARY = ".tmp"


def save_weights(
    path: str | os.PathLike[str], state_or_model: Any, kind: str, *, dtype: Any = None, shard_bytes: int = 5 * 10**9
) -> None:
    """Writes the weights in Hugging Face's layout, for `load_weights` and for PyTorch's libraries.

    Every process of a run calls this; the first one writes. One layer of one parameter is gathered at a time. The
    files have their names when they are complete, the index last.

    Args:
        path: a directory, made if it is not there; or the name of one file that ends in ``.safetensors``, which then
            holds everything. Nothing is written over.
        state_or_model: a `zerojax.State` of one of our models, or the model itself.
        kind: the layout: "bert", "gpt2" or "llama".
        dtype: of the tensors, "float32" or "bfloat16" for example; None for that of each parameter.
        shard_bytes: a directory gets several files, and an index of them, where one would be longer than this.

    Raises:
        UserError: the path is taken, the kind has no place for a parameter, or a dtype or size is none.
        CheckpointError: the files could not be written.
    """
    path = Path(path)
    if shard_bytes < 1:
        raise UserError(f"shard_bytes={shard_bytes}: must be a positive number of bytes")
    target = target_of(state_or_model)
    form = format_of(kind, target.model)
    pieces = pieces_of(target.shapes, form.rules)
    homeless = [name for name, made_of in pieces.items() if not made_of]
    if homeless:
        raise UserError(f"kind={kind!r} has no place for the model's {', '.join(homeless)}; nothing is written")
    dtypes = {name: _dtype(dtype, parameter.array.dtype) for name, parameter in target.parameters.items()}
    specs = {
        form.written(name): Spec(shape, dtype_name(dtypes[piece.parameter]))
        for made_of in pieces.values()
        for piece in made_of
        for name, shape in piece.tensors.items()
    }
    single = path.name.endswith(SUFFIX)
    shards = [Shard(path.name, specs)] if single else plan_shards(specs, shard_bytes)
    folder = path.parent if single else path
    names = [shard.file for shard in shards] + ([] if single else [SINGLE, INDEX])
    taken = from_primary(lambda: [name for name in names if (folder / name).exists()])
    if taken:
        raise UserError(f"weights {folder / taken[0]}: exists already; accepted: a new name")
    writer = _Writer(folder, shards)
    agreed(f"weights {path}", writer.begin)
    for name, made_of in pieces.items():
        for piece in made_of:
            for tensor, value in _tensors(target.parameters[name], piece, dtypes[name]):
                writer.write(form.written(tensor), value)
    agreed(f"weights {path}", writer.finish)


def _dtype(asked: Any, own: np.dtype) -> np.dtype:
    try:
        dtype = jnp.dtype(own if asked is None else asked)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in DTYPES.values():
        raise UserError(f"dtype={shown(asked)}: must be one of {', '.join(DTYPES.values())}, or None")
    return dtype


def _tensors(parameter: Parameter, piece: Piece, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a piece by name, whole on this host."""
    array = _on_device(parameter.array)
    part = array if piece.layer is None else array[piece.layer]
    shape = parameter.shape if piece.layer is None else parameter.shape[1:]
    whole = np.asarray(part) if part.is_fully_addressable else multihost_utils.process_allgather(part, tiled=True)
    whole = whole[tuple(slice(0, n) for n in shape)].astype(dtype, copy=False)
    yield from zip(piece.tensors, piece.transform.split(whole), strict=True)


def _on_device(array: jax.Array) -> jax.Array:
    """The array in device memory, where it can be sliced and gathered."""
    if array.sharding.memory_kind != PINNED_HOST:
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("device"))


class _Writer:
    """Writes the shards of a model on the first process; what fails there is raised at the end, on every process."""

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self._folder, self._shards = folder, shards
        self._shard_of = {name: shard for shard in shards for name in shard.specs}
        self._writer: TensorWriter | None = None
        self._current: Shard | None = None
        self._fault: Exception | None = None

    def begin(self) -> None:
        if not is_primary():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error(error) from error

    def write(self, name: str, tensor: np.ndarray) -> None:
        if not is_primary() or self._fault is not None:
            return
        try:
            shard = self._shard_of[name]
            if shard is not self._current:
                self._close()
                self._current, self._writer = shard, TensorWriter(self._temporary(shard), shard.specs)
            assert self._writer is not None
            self._writer.write(name, tensor)
        except OSError as error:
            self._fault = error  # the other processes go on gathering, and this one with them

    def finish(self) -> None:
        if not is_primary():
            return
        try:
            self._close()
            if self._fault is not None:
                raise self._fault
            for shard in self._shards:
                self._temporary(shard).rename(self._folder / shard.file)
            if len(self._shards) > 1:
                (self._folder / INDEX).write_text(index_of(self._shards), encoding="utf-8")
        except OSError as error:
            for shard in self._shards:
                self._temporary(shard).unlink(missing_ok=True)
            raise self._error(self._fault or error) from error

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _temporary(self, shard: Shard) -> Path:
        return self._folder / (shard.file + TEMPORARY)

    def _error(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"weights {self._folder} were not written: {first_line(error)}")
