"""Room on disks: how much there is, and how the operating system says that there is none."""

import shutil
from pathlib import Path

# In whatever exception it arrives.
_FULL = ("No space left on device", "Disk quota exceeded", "File too large")


def says_full(error: BaseException) -> bool:
    """Whether an error says that a file system, a quota or a limit on a file's size is exhausted."""
    return any(phrase in str(error) for phrase in _FULL)


def free_bytes(path: Path) -> int:
    """Bytes that are free where `path` is or will be."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def megabytes(count: int) -> str:
    """A number of bytes in words.

    >>> megabytes(1_234_567)
    '1.2 MB'
    """
    return f"{count / 1e6:,.1f} MB"
