"""Micro-batches on their way into a step: checked, kept, and joined into the one batch that `Zero` takes."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zerojax.errors import UserError, shown
from zerojax.mesh import data_parallel_size


def check_rows(batch: Any, rows_of_device: int, mesh: Mesh) -> None:
    """Whether every leaf has the rows of a micro-batch: in a run of several processes, this process's share of them.

    Raises:
      UserError: if one has not, or there is none.
    """
    devices, processes = data_parallel_size(mesh), len({device.process_index for device in mesh.devices.flat})
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise UserError(f"a micro-batch is {shown(batch)}; accepted: arrays whose first axis is the rows")
    for path, x in leaves:
        name = _name(path)
        if np.ndim(x) == 0:
            raise UserError(f"micro-batch leaf {name!r} is {shown(x)}; accepted: arrays whose first axis is the rows")
        is_share = processes > 1 and not (isinstance(x, jax.Array) and not x.is_fully_addressable)
        wanted = rows_of_device * devices // (processes if is_share else 1)
        if np.shape(x)[0] != wanted:
            raise UserError(
                f"micro-batch leaf {name!r} has {np.shape(x)[0]} rows{' in this process' if is_share else ''}; "
                f"accepted: {wanted} ({rows_of_device} x {devices} devices"
                f"{f' / {processes} processes' if is_share else ''})"
            )


def check_alike(first: Any, batch: Any) -> None:
    """Whether two micro-batches can be of one step, which is one program.

    Raises:
      UserError: if they have other leaves, or a leaf has another shape or dtype.
    """
    structures: list[Any] = [jax.tree.structure(first), jax.tree.structure(batch)]
    if structures[0] != structures[1]:
        raise UserError(
            f"micro-batches of one step are {shown(structures[0])} and {shown(structures[1])}; accepted: one structure"
        )
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(batch), strict=True):
        kinds = [f"{jnp.result_type(z)}{list(np.shape(z))}" for z in (x, y)]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"micro-batch leaf {_name(path)!r} is {kinds[0]} and {kinds[1]} within one step; accepted: one shape "
                "and dtype (pad, or take one micro-batch in a step)"
            )


def kept(batch: Any) -> Any:
    """`batch` with arrays of the host copied: a loader may fill the same ones with its next batch."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.array(x), batch)


def interleaved(batches: Sequence[Any]) -> Any:
    """Micro-batches as the one batch whose every M-th row, from row i on, is micro-batch i.

    Arrays that are on devices are joined there: with rows split over devices, each joins its own.

    >>> interleaved([np.array([1, 2]), np.array([5, 6])]).tolist()
    [1, 5, 2, 6]
    """
    if len(batches) == 1:
        return batches[0]
    on_devices = lambda xs: all(isinstance(x, jax.Array) for x in xs)
    return jax.tree.map(lambda *xs: _joined_on_devices(xs) if on_devices(xs) else _joined(np, xs), *batches)


def next_of(data: Iterator[Any], count: int) -> Iterator[Any]:
    """The next micro-batches of an iterator.

    Raises:
      UserError: if it is no iterator, or ends before.
    """
    if not isinstance(data, Iterator):
        raise UserError(
            f"data_iter is {shown(data)}; accepted: an iterator, such as iter(loader): what begins anew at each call "
            "would give the same batches"
        )
    for i in range(count):
        try:
            yield next(data)
        except StopIteration:
            raise UserError(f"the data ended after {i} of {count} micro-batches; accepted: {count}") from None


def _joined(xp: Any, xs: Sequence[Any]) -> Any:
    return xp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:])


@jax.jit
def _joined_on_devices(xs: Sequence[jax.Array]) -> jax.Array:
    return _joined(jnp, xs)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "batch"
