"""Arrays in memory as a random-access dataset, and batches that hold every example of one once."""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerojax.data.loading import RandomAccess
from zerojax.data.shares import process_share
from zerojax.errors import UserError


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Examples that are rows of arrays.

    Attributes:
        arrays: by name, each with the examples along its first dim.

    Raises:
        UserError: there are no arrays, or they have different numbers of rows.

    >>> dataset = ArrayDataset({"x": np.arange(6).reshape(3, 2), "labels": np.array([0, 1, 0])})
    >>> len(dataset), dataset[1]["x"].tolist()
    (3, [2, 3])
    """

    arrays: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        rows = {name: len(array) for name, array in self.arrays.items()}
        if len(set(rows.values())) != 1:
            told = ", ".join(f"{name} has {n}" for name, n in rows.items()) or "there are no arrays"
            raise UserError(f"arrays need the same number of rows, one or more arrays: {told}")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: array[index] for name, array in self.arrays.items()}

    @functools.cached_property
    def fingerprint(self) -> dict[str, int | str]:
        """What makes two datasets the same one: equal for equal arrays under equal names."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
        return {"examples": len(self), "arrays": f"sha256:{digest.hexdigest()[:16]}"}


def batches_in_order(
    dataset: RandomAccess, batch_size: int, process_index: int | None = None, process_count: int | None = None
) -> Iterator[dict[str, Any]]:
    """Every example once, for an evaluation: of one shape all, the last batch filled up with copies of weight 0.

    Args:
        dataset: its examples are dicts of arrays.
        batch_size: rows of the global batch, a multiple of ``process_count``.
        process_index: this process; default ``jax.process_index()``.
        process_count: the number of processes; default ``jax.process_count()``.

    Yields:
        This process's rows, stacked, and ``weights`` (rows,) float32: 1 for an example, 0 for what fills up.

    Raises:
        UserError: the batch does not divide by the processes.

    >>> dataset = ArrayDataset({"x": np.arange(5)})
    >>> for batch in batches_in_order(dataset, batch_size=4, process_index=0, process_count=1):
    ...     print(batch["x"], batch["weights"])
    [0 1 2 3] [1. 1. 1. 1.]
    [4 4 4 4] [1. 0. 0. 0.]
    """
    share = process_share(batch_size, process_index, process_count)
    last = len(dataset) - 1
    for start in range(share.start, len(dataset) + share.start, batch_size):
        indices = range(start, start + share.rows)
        examples = [dataset[min(i, last)] for i in indices]
        batch = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
        yield batch | {"weights": np.array([i <= last for i in indices], np.float32)}
