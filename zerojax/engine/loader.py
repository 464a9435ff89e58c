"""A data loader of one epoch at a time, whose batches are micro-batches of all devices."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zerojax.data.shares import process_share
from zerojax.errors import UserError, shown


class EpochLoader:
    """Iterating over it gives one epoch, the next time another order of the examples.

    Micro-batch k of an epoch is the same examples for any number of processes, each of which gets its share of the
    rows.

    Args:
      dataset: examples by index, with a length.
      batch_size: rows of a micro-batch on all devices.
      collate: from a list of examples to a batch; stacks their arrays by default.
      seed: of the order.
      drop_last: whether rows that do not fill a micro-batch are left out of an epoch; else the epoch's first ones fill
        it up.

    Attributes:
      position: the epoch, and its rows given so far, for a checkpoint.

    Raises:
      UserError: if the dataset has no length, or fewer rows than a micro-batch.

    >>> loader = EpochLoader([{"x": i} for i in range(5)], batch_size=2)
    >>> len(loader), [batch["x"].shape for batch in loader]
    (3, [(2,), (2,), (2,)])
    >>> loader.position
    (0, 6)
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(f"training_data is {shown(dataset)}; accepted: examples by index, with a length")
        self.dataset, self._seed, self._drop_last = dataset, seed, drop_last
        self._collate = collate or (lambda rows: jax.tree.map(lambda *xs: np.stack(xs), *rows))
        self.set_batch_size(batch_size)
        self.position = self._begin = (0, 0)

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch on all devices."""
        return self._batch_size

    def set_batch_size(self, batch_size: int) -> None:
        """Another number of rows, from the next micro-batch on.

        Raises:
          UserError: if the dataset has fewer.
        """
        if len(self.dataset) < batch_size:
            raise UserError(
                f"training_data has {len(self.dataset)} examples; accepted: {batch_size} (a micro-batch) or more"
            )
        self._batch_size = batch_size

    def seek(self, epoch: int, row: int) -> None:
        """Where the next iteration begins: the rest of an epoch of which `row` rows were given, or the next epoch."""
        self.position = self._begin = (epoch, row) if self._gives_more(row) else (epoch + 1, 0)

    def __len__(self) -> int:
        """Micro-batches of an epoch."""
        rows = len(self.dataset)
        return rows // self.batch_size if self._drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self.position = epoch, row = self._begin
        self._begin = (epoch + 1, 0)
        return self._rest_of(epoch, row)

    def _rest_of(self, epoch: int, row: int) -> Iterator[Any]:
        order = np.random.default_rng((self._seed % 2**64, epoch)).permutation(len(self.dataset))
        while self._gives_more(row):
            share = process_share(self.batch_size, None, None)
            places = np.arange(row + share.start, row + share.start + share.rows) % len(order)
            row += self.batch_size
            self.position = (epoch, row)
            yield self._collate([self.dataset[int(i)] for i in order[places]])

    def _gives_more(self, row: int) -> bool:
        return row + (self.batch_size if self._drop_last else 1) <= len(self.dataset)


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader
