"""Which parameters are trained, and which stay as they are."""

from typing import Any

import jax

from zerojax.adapters import Adapter
from zerojax.errors import UserError, shown


def chosen(trainable: Any, adapter: Adapter, params: Any) -> Any:
    """Whether each parameter is trained, in a tree of their structure; `trainable` as for `Zero`.

    Raises:
      UserError: if `trainable` is neither a function nor a filter that the model's kind knows.
    """
    if trainable is None:
        return jax.tree.map(lambda x: True, params)
    matches = getattr(adapter, "matches", None)
    if matches is not None and not _is_function(trainable):
        return matches(trainable)
    if not callable(trainable):
        raise UserError(
            f"trainable is {shown(trainable)}; accepted: a function of a parameter's path and the parameter"
            + (", or an NNX filter" if matches is not None else "; NNX filters are for NNX models")
        )
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(lambda path, x: bool(trainable(name(path), x)), params)


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
