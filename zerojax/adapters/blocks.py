"""The modules of a model that are rematerialised, each by itself: which they are, and what their call does."""

import collections
import contextlib
import contextvars
import dataclasses
import fnmatch
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from zerojax.adapters.deferred import Deferred
from zerojax.errors import UserError, shown

SHOWN_PATHS = 5

# Whether a block is running: what lies inside of it is rematerialised with it.
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside_block", default=False)


@dataclasses.dataclass(frozen=True)
class Module:
    """A module that holds parameters.

    Attributes:
      kind: its type's name.
      sliced: whether it is called on a slice of its parameters, as inside of a scan; `None` where that is not known.
    """

    kind: str
    sliced: bool | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """How a module is rematerialised.

    Attributes:
      policy: of `jax.checkpoint`.
      sliced: whether only calls on a slice of its parameters are: what scans call of a module.
    """

    policy: Callable[..., Any]
    sliced: bool


def named_blocks(
    modules: Mapping[str, Module],
    patterns: Sequence[str],
    every: int,
    scanned: Collection[str],
    policy: Callable[..., Any],
    rest: Callable[..., Any] | None,
) -> dict[str, Block]:
    """The blocks that patterns choose.

    Args:
      modules: of the model, by path ("" for the model itself).
      patterns: of paths or of types' names.
      every: as `Remat.every`.
      scanned: paths of the parameters that are used a slice at a time.
      policy: of the blocks.
      rest: of those that `every` leaves out; `None` for no rematerialisation.

    Raises:
      UserError: if a pattern matches nothing, or `every` is to choose among the layers of one stack.
    """
    matched = [{path for path, module in modules.items() if _matches(path, module, pattern)} for pattern in patterns]
    for pattern, paths in zip(patterns, matched, strict=True):
        if not paths:
            known = sorted(filter(None, modules), key=lambda path: (path.count("/"), _natural(path)))[:SHOWN_PATHS]
            some = ", ".join(f"{path!r} ({modules[path].kind})" for path in known)
            accepted = f"patterns of paths or types' names, such as {some}" if some else "None, for lack of modules"
            raise UserError(f"Remat.blocks has {shown(pattern)}, which matches no module; accepted: {accepted}")
    chosen = set().union(*matched)
    outermost = [path for path in chosen if not any(outer in chosen for outer in _around(path))]
    stacks = holders(scanned)
    if every > 1 and (stacked := [path for path in outermost if path in stacks]):
        raise _every_of_a_stack(every, min(stacked))
    return _every_nth(outermost, every, lambda path: bool(modules[path].sliced), policy, rest)


def repeated_blocks(
    modules: Mapping[str, Module],
    every: int,
    scanned: Collection[str],
    own: Collection[str],
    policy: Callable[..., Any],
    rest: Callable[..., Any] | None,
) -> dict[str, Block]:
    """The repeated modules: numbered siblings of one type, and what scans call.

    Of siblings inside of siblings those are taken of which there are more; of modules inside of each other that are
    called in a scan, the outermost is the block when it is called.

    Args:
      own: paths of the parameters that are used inside of a `jax.checkpoint` of the model's own.
      modules, every, scanned, policy, rest: as for `named_blocks`.
    """
    stacks = scanned_blocks(modules, scanned, own, policy)
    if stacks and every > 1:
        within = [path for path in scanned if any(path.startswith(f"{stack}/") for stack in filter(None, stacks))]
        raise _every_of_a_stack(every, posixpath.dirname(posixpath.commonprefix([f"{path}/" for path in within])))
    taken = holders(scanned) | holders(own)
    siblings = collections.defaultdict(list)
    for path, module in modules.items():
        stem = path.rstrip("0123456789")
        if stem != path and path not in taken:
            siblings[stem, module.kind].append(path)
    chosen: set[str] = set()
    groups = (group for group in siblings.values() if len(group) > 1)
    for group in sorted(groups, key=lambda group: (-len(group), group[0].count("/"), _natural(group[0]))):
        around = {outer for path in chosen for outer in _around(path)}
        chosen |= {path for path in group if path not in around and not any(x in chosen for x in _around(path))}
    return stacks | _every_nth(chosen, every, lambda path: False, policy, rest)


def scanned_blocks(
    modules: Mapping[str, Module], scanned: Collection[str], own: Collection[str], policy: Callable[..., Any]
) -> dict[str, Block]:
    """What scans call: each module with parameters that are used a slice at a time, when it is called on one."""
    stacks = holders(scanned) - holders(own)
    called = (path for path, module in modules.items() if module.sliced is not False)
    return {path: Block(policy, sliced=True) for path in called if path in stacks}


def _matches(path: str, module: Module, pattern: str) -> bool:
    by_path = bool(path) and fnmatch.fnmatchcase(path, pattern)
    return by_path or fnmatch.fnmatchcase(module.kind, pattern)


def _every_nth(
    paths: Iterable[str],
    every: int,
    sliced: Callable[[str], bool],
    policy: Callable[..., Any],
    rest: Callable[..., Any] | None,
) -> dict[str, Block]:
    policies = ((path, rest if i % every else policy) for i, path in enumerate(sorted(paths, key=_natural)))
    return {path: Block(kept, sliced(path)) for path, kept in policies if kept is not None}


def _every_of_a_stack(every: int, path: str) -> UserError:
    return UserError(
        f"Remat.every is {every}, and the layers of {path or 'the model'!r} are one stack under a scan, whose turns "
        "are all the same; accepted: 1"
    )


def _around(path: str) -> Iterator[str]:
    """The paths of the modules around a module or a parameter, from the nearest out.

    >>> list(_around("blocks/0/mlp"))
    ['blocks/0', 'blocks', '']
    """
    while path:
        path = path.rpartition("/")[0]
        yield path


def holders(parameters: Iterable[str]) -> set[str]:
    """The paths of the modules around parameters.

    >>> sorted(holders(["mlp/up/kernel"]))
    ['', 'mlp', 'mlp/up']
    """
    return {path for parameter in parameters for path in _around(parameter)}


def _natural(path: str) -> list[Any]:
    """Sorts "layers/10" behind "layers/9"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def is_sliced(now: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether parameters with `now` dimensions each are slices of parameters with `whole` dimensions."""
    return len(now) == len(whole) and any(a < b for a, b in zip(now, whole, strict=True))


def applies(block: Block, now: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a call of a block's module, on parameters with `now` of `whole` dimensions, is rematerialised."""
    return not _inside.get() and (not block.sliced or is_sliced(now, whole))


@contextlib.contextmanager
def inside_block() -> Iterator[None]:
    """While a block runs."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def parted(tree: Any, kinds: tuple[type, ...]) -> tuple[dict[int, Any], Callable[[Mapping[int, Any]], Any]]:
    """The arrays of `tree`, and its parts of `kinds`, by number; and the function that puts their like back among what
    is neither (Python's numbers, texts, functions), which a traced function cannot take or return."""
    kinds = (jax.Array, Deferred, *kinds)
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, kinds))
    traced = {i: x for i, x in enumerate(leaves) if isinstance(x, kinds)}
    rest = [None if i in traced else x for i, x in enumerate(leaves)]
    return traced, lambda traced: jax.tree.unflatten(structure, [traced.get(i, x) for i, x in enumerate(rest)])
