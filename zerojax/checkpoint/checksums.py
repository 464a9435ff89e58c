"""Checksums of a checkpoint's files.

Orbax's array store checks its own index, but a flipped bit inside an array's data goes through unseen. So each process
reads back the files it has written and records a CRC-32 of each; restoring compares them before an array is read.
"""

import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.manifest import FileRecord

_BLOCK = 4 << 20
_THREADS = 8


def record_files(directory: Path, files: Iterable[Path]) -> dict[str, FileRecord]:
    """Length and CRC-32 of `files`, by their path relative to `directory`."""
    paths = sorted(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        records = pool.map(_record, paths)
        return {str(path.relative_to(directory)): record for path, record in zip(paths, records, strict=True)}


def verify_files(directory: Path, files: Mapping[str, FileRecord], share: int, shares: int) -> None:
    """Compares every `shares`-th file, from the `share`-th on, with its record.

    Raises:
      CheckpointError: naming the first file that is missing or differs.
    """
    mine = sorted(files)[share::shares]
    with ThreadPoolExecutor(_THREADS) as pool:
        for fault in pool.map(lambda name: _fault(directory / name, files[name]), mine):
            if fault:
                raise CheckpointError(f"checkpoint {directory}: {fault}")


def _fault(path: Path, expected: FileRecord) -> str | None:
    name = f"file {path.parent.name}/{path.name}"
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{name} has {size} bytes instead of {expected.size}"
        return None if _record(path) == expected else f"{name} is damaged (its checksum differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"


def _record(path: Path) -> FileRecord:
    size = checksum = 0
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return FileRecord(size, checksum)
