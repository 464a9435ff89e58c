"""Which parameters are trained, and which variables have a row for each example."""

from typing import Any, Literal

import jax

from zerojax.adapters import Adapter
from zerojax.errors import UserError, shown
from zerojax.paths import path_name


def chosen(setting: Literal["trainable", "per_example"], choice: Any, adapter: Adapter, leaves: Any) -> Any:
    """Whether a setting of `Zero` chooses each leaf, in a tree of their structure; without one, all are trained and no
    variable has a row for each example.

    Raises:
      UserError: if the choice is neither a function nor a filter that the model's kind knows.
    """
    if choice is None:
        return jax.tree.map(lambda x: setting == "trainable", leaves)
    matches = getattr(adapter, "matches", None)
    if matches is not None and not _is_function(choice):
        return matches(choice, setting == "trainable")
    if not _is_function(choice):
        raise UserError(
            f"{setting} is {shown(choice)}; accepted: a function of a leaf's path and the leaf"
            + (", or an NNX filter" if matches is not None else "; NNX filters are for NNX models")
        )
    return jax.tree_util.tree_map_with_path(lambda path, x: bool(choice(path_name(path), x)), leaves)


def divide(params: Any, is_trained: Any) -> tuple[Any, Any]:
    """The trained parameters and the others, each with `None` in the place of the other's.

    >>> divide({"a": 1, "b": 2}, {"a": True, "b": False})
    ({'a': 1, 'b': None}, {'a': None, 'b': 2})
    """
    pick = lambda trained: jax.tree.map(lambda x, yes: x if yes is trained else None, params, is_trained)
    return pick(True), pick(False)


def _is_function(x: Any) -> bool:
    """Whether `x` is called with a path as text: NNX's filters are objects of its own, types, tags and lists."""
    return callable(x) and not isinstance(x, type) and not type(x).__module__.startswith("flax.")
