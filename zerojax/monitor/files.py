"""Files of a run that are whole at every moment, and whose faults are one line."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from zerojax.errors import RunError


class AppendedFile:
    """A file that grows. Nothing is held back: a killed run has told all, and closing has nothing left to fail at."""

    def __init__(self, path: Path):
        self._path = path
        with writing(path):
            self._file = open(path, "ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Appends `data`.

        Raises:
          RunError: if the disk is full, or the file cannot be written for another reason.
        """
        with writing(self._path):
            while data:  # a disk that is nearly full takes a part of it
                data = data[self._file.write(data) :]

    def close(self) -> None:
        self._file.close()


def replace_text(path: Path, text: str) -> None:
    """Writes a whole file in the place of the one before, which stays until the new one is complete.

    Raises:
      RunError: if it cannot be written.
    """
    new = path.with_name(path.name + ".tmp")
    with writing(path):
        with open(new, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(new, path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the file in what stops the writing of it."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
