"""A text's tokens as a random-access dataset of windows."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zerojax.data.texts import read_text
from zerojax.data.tokenizers import Tokenizer, make_tokenizer
from zerojax.errors import UserError


@dataclass(frozen=True, eq=False)
class TextDataset:
    """Windows of ``length + 1`` tokens over a stream of N tokens: inputs are ``[:-1]``, targets ``[1:]``.

    Window i starts at token ``i * length``. Neighbours share one token, so that each token but the first is a target
    exactly once. ``len(dataset)`` counts the full windows, (N - 1) // length; the fewer than ``length`` tokens after
    them are not trained on, and ``zerojax.data.evaluation_batches`` pads them.

    Attributes:
        tokens: (N,) unsigned integers, in memory.
        length: targets in a window.
        tokenizer: gives ``vocab_size`` and turns ids into text.
        source: what was read, after a missing package's replacement.
        split: "train", "validation" or "all".
    """

    tokens: np.ndarray
    length: int
    tokenizer: Tokenizer
    source: str
    split: str

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """``{"tokens": (length + 1,) int32}``."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        return {"tokens": self.tokens[start : start + self.length + 1].astype(np.int32)}

    @property
    def text(self) -> str:
        """The text itself."""
        return self.tokenizer.decode(self.tokens)

    @functools.cached_property
    def bytes_per_token(self) -> float:
        """Mean bytes of UTF-8 of a target (of every token but the first)."""
        counts = np.bincount(self.tokens[1:], minlength=self.tokenizer.vocab_size)
        return float(counts @ self.tokenizer.byte_lengths / counts.sum())

    @functools.cached_property
    def fingerprint(self) -> dict[str, int | str]:
        """What makes two datasets the same one: equal for equal tokens and windows, wherever they were read."""
        digest = hashlib.sha256(self.tokens.tobytes()).hexdigest()[:16]
        return {"tokenizer": self.tokenizer.name, "length": self.length, "text": f"sha256:{digest}"}


def text_dataset(
    source: str | Sequence[str] = "shakespeare", tokenizer: str = "bytes", length: int = 256, split: str = "train"
) -> TextDataset:
    """Reads one split of a text, encodes it and keeps it in memory.

    Args:
        source: "shakespeare", "pydoc", or paths or globs of text files; see ``zerojax.data.read_text``.
        tokenizer: "bytes" or "gpt2".
        length: targets in a window; a window has one token more.
        split: "train", "validation" or "all".

    Raises:
        UserError: an argument is not one of these, or the split is shorter than one window.

    >>> dataset = text_dataset("pydoc", length=16)
    >>> dataset[0]["tokens"].shape, dataset.tokenizer.vocab_size
    ((17,), 256)
    """
    if length < 1:
        raise UserError(f"length={length} is too small: give 1 or more")
    encoder = make_tokenizer(tokenizer)
    text = read_text(source, split)
    tokens = encoder.encode(text.text)
    if len(tokens) <= length:
        raise UserError(
            f"length={length} needs {length + 1} tokens, and the {split} split of {text.source!r} has {len(tokens)}: "
            "give a smaller length or more text"
        )
    return TextDataset(tokens, length, encoder, text.source, split)
