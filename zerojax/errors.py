"""What goes wrong outside of the library: the user's input, and the machine a run is on."""


from typing import Any


def shown(value: Any) -> str:
    """`repr(value)` for an error's line: on one line, and cut short.

    >>> shown("adam"), len(shown(list(range(100))))
    ("'adam'", 80)
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


class UserError(ValueError):
    """Wrong input: one line that names the thing, the value and what is accepted."""


class RunError(RuntimeError):
    """A run cannot go on, through no fault of its input (a full disk, damaged files): one line that says why."""
