"""Parameters by their paths, and patterns of these."""

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax

from zerojax.errors import UserError, shown

PATHS_SHOWN = 5


def path_name(path: Any) -> str:
    """A leaf's path joined by "/", such as "blocks/attention/qkv/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns is that of the path ``name``.

    In a pattern, * stands for anything, also for slashes, ? for one character, [ab] for one of some.

    >>> matches("blocks/mlp/up/bias", ["*bias"]), matches("blocks/mlp/up/bias", ["bias", "blocks/*/kernel"])
    (True, False)
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def as_patterns(name: str, value: Any) -> Sequence[str]:
    """The setting ``name``, a pattern or a list of patterns, as a list.

    Raises:
        UserError: it is neither.
    """
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(pattern, str) for pattern in values):
        raise UserError(f"{name} is {shown(value)}; accepted: a pattern such as '*bias', or a list of patterns")
    return values


def require_matches(what: str, patterns: Sequence[str], names: Sequence[str], kind: str = "parameter") -> None:
    """Raises: UserError: one of the patterns is that of none of the paths ``names``, each of a ``kind``."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            some = ", ".join(map(repr, names[:PATHS_SHOWN])) + (", ..." if len(names) > PATHS_SHOWN else "")
            raise UserError(f"{what} {pattern!r} matches no {kind}; there are {some or 'none'}")
