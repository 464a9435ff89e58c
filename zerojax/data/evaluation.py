"""Batches in order that hold every target of a text once."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerojax.data.shares import Share, process_share
from zerojax.data.windows import TextDataset
from zerojax.errors import UserError


@dataclass(frozen=True, eq=False)
class EvaluationBatches:
    """A finite, repeatable sequence of batches ``{"tokens": (rows, T + 1) int32, "weights": (rows, T) float32}``.

    ``weights[r, t]`` is the weight of target ``tokens[r, t + 1]``: 1, or 0 in what pads the last window and the last
    batch. All batches have one shape. Iterating yields this process's rows.

    Attributes:
        dataset: the text.
        windows: the numbers of the windows, in order; the last window of the text may be a partial one.
        share: this process's rows of a batch.
    """

    dataset: TextDataset
    windows: np.ndarray
    share: Share

    def __len__(self) -> int:
        return -(-len(self.windows) // self._batch_size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for batch in range(len(self)):
            start = batch * self._batch_size + self.share.start
            yield self._rows(self.windows[start : start + self.share.rows])

    @property
    def _batch_size(self) -> int:
        return self.share.rows * self.share.count

    def _rows(self, windows: np.ndarray) -> dict[str, np.ndarray]:
        length = self.dataset.length
        tokens = np.zeros((self.share.rows, length + 1), np.int32)
        weights = np.zeros((self.share.rows, length), np.float32)
        for row, window in enumerate(windows):
            piece = self.dataset.tokens[window * length : (window + 1) * length + 1]
            tokens[row, : len(piece)] = piece
            weights[row, : len(piece) - 1] = 1.0
        return {"tokens": tokens, "weights": weights}


def evaluation_batches(
    dataset: TextDataset,
    batch_size: int,
    batches: int | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> EvaluationBatches:
    """The batches whose weighted mean loss is the loss over the text.

    Args:
        dataset: the text.
        batch_size: rows of the global batch, a multiple of ``process_count``.
        batches: how many; default as many as hold every target of the text (every token but the first) once. Fewer
            hold windows spread evenly over the text, the same ones each time.
        process_index: this process; default ``jax.process_index()``.
        process_count: the number of processes; default ``jax.process_count()``.

    Raises:
        UserError: the batch does not divide by the processes, or ``batches`` is less than 1.

    >>> from zerojax.data.windows import text_dataset
    >>> dataset = text_dataset("pydoc", length=100, split="validation")
    >>> batches = evaluation_batches(dataset, batch_size=8, process_index=0, process_count=1)
    >>> int(sum(batch["weights"].sum() for batch in batches)) == len(dataset.tokens) - 1
    True
    """
    if batches is not None and batches < 1:
        raise UserError(f"batches={batches} is too small: give 1 or more, or None for the whole text")
    share = process_share(batch_size, process_index, process_count)
    total = -(-(len(dataset.tokens) - 1) // dataset.length)
    count = total if batches is None else min(total, batches * batch_size)
    return EvaluationBatches(dataset, np.arange(count) * total // count, share)
