"""Keeping what the backward pass needs, but for what a gather point made: that is gathered again."""

import math
from collections.abc import Callable, Set
from typing import Any

GATHERED = "zerojax.gathered"

# Operations that only lay a gathered parameter out anew: to save their result would be to save the parameter.
LAYOUT_OPERATIONS = {
    "reshape",
    "transpose",
    "convert_element_type",
    "squeeze",
    "broadcast_in_dim",
    "slice",
    "copy",
    "name",
}


def all_but_gathered(sizes: Set[int], keep: Callable[..., bool] | None = None) -> Callable[..., bool]:
    """A policy for `jax.checkpoint`.

    Args:
      sizes: the numbers of elements of gathered parameters.
      keep: a policy for everything else; all of it is kept by default.
    """

    def policy(prim: Any, *avals: Any, **params: Any) -> bool:
        if prim.name == "all_gather" or params.get("name") == GATHERED:
            return False
        if prim.name in LAYOUT_OPERATIONS and _elements(prim, avals, params) in sizes:
            return False
        return keep is None or keep(prim, *avals, **params)

    return policy


def _elements(prim: Any, avals: Any, params: Any) -> int:
    if prim.name == "slice":  # of a parameter that was gathered with its padding
        return math.prod(
            end - start for start, end in zip(params["start_indices"], params["limit_indices"], strict=True)
        )
    return avals[0].size
