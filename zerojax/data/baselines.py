"""What a byte-level language model has to beat: the entropy of the text under unigram and bigram counts."""

import math
from typing import NamedTuple

import numpy as np

_BYTES = 256


class Baselines(NamedTuple):
    """Cross-entropies in bits per byte.

    Attributes:
        unigram: of a model that knows each byte's frequency.
        bigram: of a model that knows each byte's frequency after each other byte.
    """

    unigram: float
    bigram: float


def entropy_baselines(train: str, validation: str) -> Baselines:
    """Bits per byte of UTF-8 that count models of the training text need for the validation text.

    Each model's probabilities are the training text's counts with one added to each of the 256 outcomes (Laplace):
    ``p(b) = (n(b) + 1) / (n + 256)`` and ``p(b | a) = (n(ab) + 1) / (n(a) + 256)`` where n(a) counts a's that are
    followed by a byte. Both are means of ``-log2 p`` over the validation text's bytes but the first, which are the
    targets of ``zerojax.data.evaluation_batches`` too.

    Args:
        train: the text that is counted.
        validation: the text that is predicted, of at least 2 bytes.

    >>> baselines = entropy_baselines("ab" * 10_000, "ab" * 100)  # each letter half of the time, each after the other
    >>> round(baselines.unigram, 1), round(baselines.bigram, 1)
    (1.0, 0.0)
    """
    seen, told = _bytes(train), _bytes(validation)
    singles = np.bincount(seen, minlength=_BYTES)
    pairs = np.bincount(_BYTES * seen[:-1] + seen[1:], minlength=_BYTES**2).reshape(_BYTES, _BYTES)
    unigram = (singles + 1) / (singles.sum() + _BYTES)
    bigram = (pairs + 1) / (pairs.sum(axis=1, keepdims=True) + _BYTES)
    return Baselines(_mean_bits(unigram[told[1:]]), _mean_bits(bigram[told[:-1], told[1:]]))


def bits_per_byte(nats_per_token: float, bytes_per_token: float = 1.0) -> float:
    """A mean loss in nats per token as bits per byte: ``loss / (ln 2 * bytes_per_token)``.

    Args:
        nats_per_token: the mean cross-entropy loss.
        bytes_per_token: ``TextDataset.bytes_per_token`` of the text the loss was measured on; 1 for byte tokens.

    >>> bits_per_byte(math.log(256))
    8.0
    """
    return nats_per_token / (math.log(2) * bytes_per_token)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)


def _mean_bits(probabilities: np.ndarray) -> float:
    return float(-np.log2(probabilities).mean())
