"""The manifest: what a checkpoint holds, in JSON, written last and checked first."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.names import named_leaves
from zerojax.errors import UserError

FILE = "manifest.json"
FORMAT = 1

_LISTED = 8


@dataclass(frozen=True)
class LeafRecord:
    """A leaf: logical shape, dtype, and the key of its array in the store (None: no elements, so nothing stored)."""

    shape: tuple[int, ...]
    dtype: str
    array: str | None


@dataclass(frozen=True)
class FileRecord:
    """A file of the checkpoint: length in bytes and CRC-32."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
      leaves: every leaf by name (see `named_leaves`).
      extra: what the caller wants to find again, as JSON.
      files: every file the arrays are read from, by its path relative to the checkpoint.
    """

    leaves: Mapping[str, LeafRecord]
    extra: Mapping[str, Any]
    files: Mapping[str, FileRecord] = field(default_factory=dict)


def leaf_records(logical: Any) -> dict[str, LeafRecord]:
    """The records of a tree of leaves with logical shape and dtype, by name."""
    records = {}
    for index, (name, leaf) in enumerate(named_leaves(logical).items()):
        shape = tuple(leaf.shape)
        records[name] = LeafRecord(shape, str(leaf.dtype), None if 0 in shape else str(index))
    return records


def encode(manifest: Manifest) -> str:
    """The text of a manifest: {"format", "crc32", "body"}, the checksum being of the other two.

    Every later format keeps these three fields, so that a reader can tell a newer format from a damaged file.
    """
    body = asdict(manifest)
    return json.dumps({"format": FORMAT, "crc32": _checksum(FORMAT, body), "body": body}, indent=1)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
      CheckpointError: if it is missing or damaged.
      UserError: if its format is newer than this version of zerojax reads.
    """
    try:
        text = (directory / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {directory}: {FILE} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint {directory}: {FILE} cannot be read: {error}") from error
    try:
        outer = json.loads(text)
        version, body = outer["format"], outer["body"]
        sound = outer["crc32"] == _checksum(version, body)
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise CheckpointError(f"checkpoint {directory}: {FILE} is damaged")
    if version > FORMAT:
        raise UserError(
            f"checkpoint {directory}: its format, {version}, is newer than this zerojax; accepted: {FORMAT} or older"
        )
    leaves = {name: LeafRecord(**leaf | {"shape": tuple(leaf["shape"])}) for name, leaf in body["leaves"].items()}
    files = {name: FileRecord(**entry) for name, entry in body["files"].items()}
    return Manifest(leaves, body["extra"], files)


def leaf_names(directory: Path) -> list[str]:
    """The names of the leaves of a checkpoint; raises as `read_manifest`."""
    return list(read_manifest(directory).leaves)


def check_same_model(directory: Path, stored: Mapping[str, LeafRecord], wanted: Mapping[str, LeafRecord]) -> None:
    """Compares the leaves of a checkpoint with those of the state it is to be restored into.

    Raises:
      UserError: one line that lists the names missing on either side, and the shapes and dtypes that differ.
    """
    lines = [f"{name} is not in the checkpoint" for name in wanted if name not in stored]
    lines += [f"{name} is in the checkpoint only" for name in stored if name not in wanted]
    for name in (name for name in wanted if name in stored):
        if stored[name].shape != wanted[name].shape:
            lines.append(f"{name} has shape {stored[name].shape} in the checkpoint, {wanted[name].shape} here")
        if stored[name].dtype != wanted[name].dtype:
            lines.append(f"{name} is {stored[name].dtype} in the checkpoint, {wanted[name].dtype} here")
    if lines:
        rest = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        raise UserError(
            f"checkpoint {directory} is of another model or optimizer: " + "; ".join(lines[:_LISTED] + rest)
        )


def _checksum(version: int, body: Any) -> int:
    return zlib.crc32(json.dumps([version, body], sort_keys=True).encode())
