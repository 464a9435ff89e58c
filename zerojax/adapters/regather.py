"""Keeping what the backward pass needs, but for what a gather point made: that is gathered again."""

import math
from collections.abc import Callable, Set
from typing import Any

GATHERED = "zerojax.gathered"

# Operations that only lay a gathered parameter out anew: to save their result would be to save the parameter.
LAYOUT_OPERATIONS = {
    "reshape",
    "transpose",
    "squeeze",
    "broadcast_in_dim",
    "slice",
    "copy",
    "name",
}


def all_but_gathered(shapes: Set[tuple[int, ...]], keep: Callable[..., bool] | None = None) -> Callable[..., bool]:
    """A policy for `jax.checkpoint`.

    A parameter that was laid out anew is known by its number of elements, and an activation may have as many. For most
    of these operations it is the same which side of them is kept. Not so for casts: what they narrow would be kept
    wide. So a cast is refused only if its dimensions, in any order, are a parameter's.

    Args:
      shapes: of gathered parameters.
      keep: a policy for everything else; all of it is kept by default.
    """
    sizes, dims = {math.prod(shape) for shape in shapes}, {_dims(shape) for shape in shapes}

    def policy(prim: Any, *avals: Any, **params: Any) -> bool:
        if prim.name == "all_gather" or params.get("name") == GATHERED:
            return False
        if prim.name == "convert_element_type":
            if _dims(avals[0].shape) in dims:
                return False
        elif prim.name in LAYOUT_OPERATIONS and _elements(prim, avals, params) in sizes:
            return False
        return keep is None or keep(prim, *avals, **params)

    return policy


def _dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(n for n in shape if n != 1))


def _elements(prim: Any, avals: Any, params: Any) -> int:
    if prim.name == "slice":  # of a parameter that was gathered with its padding
        return math.prod(
            end - start for start, end in zip(params["start_indices"], params["limit_indices"], strict=True)
        )
    return avals[0].size
