"""Labelled sentences as tokens of one length, for a classifier."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerojax.data.arrays import ArrayDataset
from zerojax.errors import UserError


def sentence_dataset(
    sentences: Sequence[str], labels: Sequence[int] | np.ndarray, tokenizer: Any, *, classes: int, length: int = 64
) -> ArrayDataset:
    """Sentences encoded, cut to ``length`` tokens with the tokenizer's own marks at both ends, and padded to it.

    Args:
        sentences: N texts.
        labels: N integers in [0, classes).
        tokenizer: a ``tokenizers.Tokenizer``, as `zerojax.weights.read_tokenizer` reads it; it is left as it is.
        classes: number of classes.
        length: tokens in an example, the marks among them.

    Returns:
        Examples ``{"tokens": (length,) int32, "mask": (length,) int32, "labels": () int32}``, as
        `zerojax.models.bert.classification_loss` takes them in batches; ``mask`` is 0 at padding.

    Raises:
        UserError: a label is out of range, there are not as many labels as sentences, or nothing fits between the
            marks.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> words = Tokenizer(models.WordLevel({"[UNK]": 0, "good": 1, "bad": 2}, unk_token="[UNK]"))
    >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> sentence_dataset(["good good", "bad"], [1, 0], words, classes=2, length=3).arrays["tokens"].tolist()
    [[1, 1, 0], [2, 0, 0]]
    """
    from zerojax.models.classification import check_labels  # imports flax, which texts do not need

    marks = tokenizer.num_special_tokens_to_add(False)
    if length <= marks:
        raise UserError(f"length={length} is too small: {marks} tokens mark the ends, give {marks + 1} or more")
    labels = np.asarray(labels)
    if labels.shape != (len(sentences),):
        raise UserError(f"labels have shape {labels.shape}; accepted: ({len(sentences)},), one for each sentence")
    check_labels(labels, classes)
    cutting = type(tokenizer).from_str(tokenizer.to_str())
    cutting.enable_truncation(length)
    cutting.no_padding()
    tokens, mask = np.zeros((2, len(sentences), length), np.int32)
    for row, encoded in enumerate(cutting.encode_batch(list(sentences))):
        tokens[row, : len(encoded.ids)] = encoded.ids
        mask[row, : len(encoded.ids)] = 1
    return ArrayDataset({"tokens": tokens, "mask": mask, "labels": labels.astype(np.int32)})
