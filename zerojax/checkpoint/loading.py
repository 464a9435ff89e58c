"""Reading one checkpoint: checked, then straight into the shards of the state it is wanted for."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint import arrays
from zerojax.checkpoint.checksums import verify_files
from zerojax.checkpoint.errors import CheckpointError, first_line
from zerojax.checkpoint.keys import from_key_data, key_target
from zerojax.checkpoint.manifest import LeafRecord, Manifest, check_same_model, leaf_records, read_manifest
from zerojax.checkpoint.names import named_leaves
from zerojax.checkpoint.processes import agreed
from zerojax.zero.disk import DiskArray, opened


def load(directory: Path, abstract: Any, logical: Any, leave_out: Sequence[str] = ()) -> tuple[Any, dict[str, Any]]:
    """Reads the checkpoint `directory` into the form of `abstract`; every process calls it.

    Every file is compared with its checksum before an array is read; the processes share that work.

    Args:
      directory: a checkpoint.
      abstract: a pytree of `jax.ShapeDtypeStruct` with shardings, and of `OnDisk`, for whose arrays files are made.
      logical: a tree of the same names with each leaf's logical shape and dtype. Beyond it, a leaf is zeros.
      leave_out: names at the top of the tree whose leaves in the checkpoint are not looked at.

    Returns:
      The tree with arrays for leaves, and the checkpoint's `extra`.

    Raises:
      CheckpointError: if the checkpoint is damaged.
      UserError: if it is of another model, or of a newer format.
    """
    what = f"checkpoint {directory}"
    manifest = agreed(what, lambda: read_manifest(directory))
    leaves = {name: leaf for name, leaf in manifest.leaves.items() if name.partition("/")[0] not in leave_out}
    manifest = dataclasses.replace(manifest, leaves=leaves)
    check_same_model(directory, manifest.leaves, leaf_records(logical))
    agreed(what, lambda: verify_files(directory, manifest.files, jax.process_index(), jax.process_count()))
    abstract = opened(abstract)
    arrays_read = agreed(what, lambda: _read(directory, manifest, named_leaves(abstract)))
    tree = jax.tree.unflatten(jax.tree.structure(abstract), arrays_read)
    return tree, dict(manifest.extra)


def _read(directory: Path, manifest: Manifest, wanted: dict[str, Any]) -> list[Any]:
    """The leaves; those in files are read and written one after the other."""
    in_files = {name: leaf for name, leaf in wanted.items() if isinstance(leaf, DiskArray)}
    read = _arrays(directory, manifest, {name: leaf for name, leaf in wanted.items() if name not in in_files})
    for name, leaf in in_files.items():
        leaf.write(_arrays(directory, manifest, {name: leaf})[name])
    return [read.get(name, leaf) for name, leaf in wanted.items()]


def _arrays(directory: Path, manifest: Manifest, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    records = {name: manifest.leaves[name] for name in wanted}
    stored = {record.array: key_target(wanted[name]) for name, record in records.items() if record.array}
    try:
        read = arrays.read(directory, stored)
    except Exception as error:
        raise CheckpointError(f"checkpoint {directory} cannot be read: {first_line(error)}") from error
    return {name: _leaf(read, records[name], leaf) for name, leaf in wanted.items()}


def _leaf(read: dict[str, jax.Array], record: LeafRecord, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    if record.array is not None:
        return from_key_data(read[record.array], wanted)
    target = key_target(wanted)
    zeros = np.zeros(target.shape, target.dtype)
    return from_key_data(jax.make_array_from_callback(target.shape, target.sharding, zeros.__getitem__), wanted)
