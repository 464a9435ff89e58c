"""A data loader of one epoch at a time, whose batches are micro-batches of all devices."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zerojax.data.shares import process_share
from zerojax.errors import UserError


class EpochLoader:
    """Iterating over it gives one epoch, the next time another order of the examples.

    Micro-batch k of an epoch is the same examples for any number of processes, each of which gets its share of the
    rows. Rows that do not fill a micro-batch are left out: the next epoch's order is another.

    Args:
      dataset: examples by index, with a length.
      batch_size: rows of a micro-batch on all devices.
      collate: from a list of examples to a batch; stacks their arrays by default.
      seed: of the order.

    Raises:
      UserError: if the dataset has fewer rows than a micro-batch.

    >>> loader = EpochLoader([{"x": i} for i in range(5)], batch_size=2)
    >>> len(loader), [batch["x"].shape for batch in loader]
    (2, [(2,), (2,)])
    """

    def __init__(
        self, dataset: Any, batch_size: int, collate: Callable[[Sequence[Any]], Any] | None = None, seed: int = 0
    ):
        if len(dataset) < batch_size:
            raise UserError(
                f"training_data has {len(dataset)} examples; accepted: {batch_size} (a micro-batch) or more"
            )
        self.dataset, self.batch_size, self.seed, self.epoch = dataset, batch_size, seed, 0
        self._collate = collate or (lambda rows: jax.tree.map(lambda *xs: np.stack(xs), *rows))

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.dataset))
        self.epoch += 1
        share = process_share(self.batch_size, None, None)
        for k in range(len(self)):
            start = k * self.batch_size + share.index * share.rows
            yield self._collate([self.dataset[int(i)] for i in order[start : start + share.rows]])


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader
