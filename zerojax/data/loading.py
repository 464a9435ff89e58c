"""Endless shuffled training batches whose order does not depend on the number of processes."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from zerojax.data.requirements import require_module
from zerojax.data.shares import process_share
from zerojax.errors import UserError

_PREFETCHED_BATCHES = 4


class RandomAccess(Protocol):
    """A dataset: examples by index, each a pytree of arrays of the same shapes.

    An attribute ``fingerprint``, a mapping of names to integers and strings, takes the part of ``len`` in telling
    this dataset from another.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Loader:
    """An endless iterator over batches, with a position that can be saved and restored.

    The position is the number of global batches consumed. It is the same in every process, and a run of any other
    number of processes can go on from it.
    """

    def __init__(self, batches: Any, identity: Mapping[str, int | str]):
        """``batches``: a grain ``DatasetIterator`` whose state is ``{"next_index": position}``."""
        self._batches = batches
        self._identity = dict(identity)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def get_state(self) -> dict[str, int | str]:
        """The position and what it is a position in; integers and strings, so JSON holds it."""
        return {"position": self._batches.get_state()["next_index"], **self._identity}

    def set_state(self, state: Mapping[str, int | str]) -> None:
        """Goes to a saved position.

        Raises:
            UserError: it is a position in another stream of batches; the message names what differs.
        """
        saved = {name: value for name, value in state.items() if name != "position"}
        differing = [name for name in {**self._identity, **saved} if self._identity.get(name) != saved.get(name)]
        if differing:
            comparison = ", ".join(
                f"{name} is {self._identity.get(name)!r} and was {saved.get(name)!r}" for name in differing
            )
            raise UserError(f"the saved data position belongs to other data: {comparison}; keep what it was to resume")
        self._batches.set_state({"next_index": state["position"]})

    def close(self) -> None:
        """Ends the prefetching thread; the iterator cannot be used after it."""
        self._batches.close()


def loader(
    dataset: RandomAccess,
    batch_size: int,
    seed: int = 0,
    process_index: int | None = None,
    process_count: int | None = None,
) -> Loader:
    """Endless batches of this process's rows.

    Every epoch is another permutation of the examples, fixed by ``seed``; epochs follow each other without a gap, so
    a batch may hold the end of one and the start of the next. Global batch k holds examples k * batch_size to
    (k + 1) * batch_size of that order, and process p of P gets its rows p * batch_size / P to
    (p + 1) * batch_size / P: put together in the processes' order, the shares are the batch of a single process. A
    thread prepares the next batches.

    Args:
        dataset: random access to examples, such as ``zerojax.data.text_dataset`` gives; their arrays are stacked.
        batch_size: rows of the global batch, a multiple of ``process_count``.
        seed: of the order, 0 or more.
        process_index: this process; default ``jax.process_index()``.
        process_count: the number of processes; default ``jax.process_count()``.

    Raises:
        UserError: the batch does not divide by the processes, or grain is not installed.

    >>> batches = loader([{"x": i} for i in range(6)], batch_size=3, process_index=0, process_count=1)
    >>> sorted(int(x) for _ in range(2) for x in next(batches)["x"])
    [0, 1, 2, 3, 4, 5]
    >>> batches.get_state()
    {'position': 2, 'batch_size': 3, 'seed': 0, 'examples': 6}
    """
    grain = require_module("grain", "pip install grain")
    share = process_share(batch_size, process_index, process_count)
    if seed < 0:
        raise UserError(f"seed={seed} is negative: give 0 or more")
    shares = grain.MapDataset.source(dataset).seed(seed).shuffle().repeat().batch(share.rows)
    read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCHED_BATCHES)
    batches = iter(shares[share.index :: share.count].to_iter_dataset(read))
    fingerprint = getattr(dataset, "fingerprint", {"examples": len(dataset)})
    return Loader(batches, {"batch_size": batch_size, "seed": seed, **fingerprint})
