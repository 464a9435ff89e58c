"""Stable names for the leaves of a pytree."""

from collections.abc import Hashable
from numbers import Integral
from typing import Any
from urllib.parse import quote

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from zerojax.errors import UserError


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by name, in the order of flattening.

    A name is the path's entries joined by "/". A text entry (a dict's key, an attribute) is percent-escaped, so that
    a leaf "a.b", a leaf "a/b" and a leaf b inside a have three names; an integer entry is written [i]. An attribute
    and a dict's key of the same text have the same name: a dataclass and the dict of its fields name leaves alike.

    >>> named_leaves({"a.b": 1, "a": {"b": 2}, "a/b": 3, "layers": [4], "by_depth": {0: 5}})
    {'a/b': 2, 'a.b': 1, 'a%2Fb': 3, 'by_depth/[0]': 5, 'layers/[0]': 4}

    Raises:
      UserError: if two leaves would have one name.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = "/".join(_entry(key) for key in path)
        if name in named:
            raise UserError(
                f"two leaves of the state have the name {name!r} ({jax.tree_util.keystr(path)} is the second);"
                " accepted: keys that differ as text"
            )
        named[name] = leaf
    return named


def _entry(key: Any) -> str:
    match key:
        case SequenceKey(idx=index):
            return f"[{index}]"
        case GetAttrKey(name=text):
            return quote(text, safe="")
        case DictKey(key=inner) | FlattenedIndexKey(key=inner):
            return _key(inner)
    return _key(key)


def _key(key: Hashable) -> str:
    match key:
        case str():
            return quote(key, safe="")
        case Integral():
            return f"[{int(key)}]"
    return "(" + quote(repr(key), safe="") + ")"
