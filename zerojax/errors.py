"""What goes wrong outside of the library: the user's input, and the machine a run is on."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any


def shown(value: Any) -> str:
    """`repr(value)` for an error's line: on one line, and cut short.

    >>> shown("adam"), len(shown(list(range(100))))
    ("'adam'", 80)
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, accepted: Collection[str]) -> str:
    """The end of a message about an unknown name.

    >>> nearest("stge", ["mesh", "stage"])
    '; nearest accepted: stage, mesh'
    """
    near = get_close_matches(name, accepted, n=3, cutoff=0.0)
    return f"; nearest accepted: {', '.join(near)}" if near else ""


class UserError(ValueError):
    """Wrong input: one line that names the thing, the value and what is accepted."""


class RunError(RuntimeError):
    """A run cannot go on, through no fault of its input (a full disk, damaged files): one line that says why."""


class OutOfMemoryError(RunError):
    """A device has too little memory: one line that says what for, and under it where the memory goes.

    Attributes:
      details: tables of what a device holds and of settings that would have fitted, in words for a terminal.
    """

    def __init__(self, line: str, details: str):
        super().__init__(f"{line}\n\n{details}")
        self.details = details
