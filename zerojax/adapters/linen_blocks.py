"""Linen modules that are rematerialised, and the search for them.

A Linen module is made where it is called, inside the user's function, so it is met there.
"""

import contextlib
import contextvars
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from zerojax.adapters.blocks import Block, Module, applies, inside_block, is_sliced, parted

PARAMS = "params"

# The path of the module whose method is running, and its parameters as the outermost module holds them.
_running: contextvars.ContextVar[tuple[tuple[str, ...], Any]] = contextvars.ContextVar("running", default=((), {}))


@contextlib.contextmanager
def linen_modules_met() -> Iterator[dict[str, Module]]:
    """The modules with parameters that are called meanwhile. A scan has the path of the layer that it calls."""
    met: dict[str, Module] = {}

    def meet(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if module.scope is None:  # without variables, and without a path
            return call(*args, **kwargs)
        with _runs(module) as (now, whole):
            if now and context.method_name == "__call__":
                met["/".join(module.path)] = Module(type(module).__name__, is_sliced(now, whole))
            return call(*args, **kwargs)

    linen: Any = _linen()
    with linen.intercept_methods(meet) if linen else contextlib.nullcontext():
        yield met


@contextlib.contextmanager
def linen_blocks(blocks: Mapping[str, Block]) -> Iterator[None]:
    """The modules whose paths `blocks` has are rematerialised where they are called meanwhile."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if module.scope is None:
            return call(*args, **kwargs)
        with _runs(module) as (now, whole):
            block = blocks.get("/".join(module.path)) if context.method_name == "__call__" else None
            if block is None or not applies(block, now, whole):
                return call(*args, **kwargs)
            return _rematerialised(module, args, kwargs, block, prevent_cse=not is_sliced(now, whole))

    linen: Any = _linen()
    with linen.intercept_methods(intercept) if linen and blocks else contextlib.nullcontext():
        yield


def _linen() -> Any:
    """Flax's module of that name; where it was never imported, no module of its kind is called."""
    return sys.modules.get("flax.linen")


def _rematerialised(module: Any, args: Any, kwargs: Any, block: Block, prevent_cse: bool) -> Any:
    linen: Any = _linen()
    given, put_back = parted((args, kwargs), (linen.Module, linen.Variable))
    outs = []

    def run(module: Any, given: dict[int, Any]) -> dict[int, Any]:
        args, kwargs = put_back(given)
        with inside_block():
            returned, out = parted(module(*args, **kwargs), ())
        outs.append(out)
        return returned

    returned = linen.remat(run, policy=block.policy, prevent_cse=prevent_cse)(module, given)
    return outs[-1](returned)


@contextlib.contextmanager
def _runs(module: Any) -> Iterator[tuple[list[int], list[int]]]:
    """While a method of `module` runs; yields the numbers of dimensions of its parameters, as they are there and as the
    outermost module holds them."""
    path, whole = _running.get()
    now = module.variables.get(PARAMS, {})
    for name in module.path[len(path) :] if module.path[: len(path)] == path else ("",):
        whole = whole.get(name, {}) if isinstance(whole, Mapping) else {}
    of = lambda params: [x.ndim for x in jax.tree.leaves(params)]
    if len(of(whole)) != len(of(now)):  # another model's, applied inside of this one
        whole = now
    token = _running.set((module.path, whole))
    try:
        yield of(now), of(whole)
    finally:
        _running.reset(token)
