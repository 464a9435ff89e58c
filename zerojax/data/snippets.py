"""Sentences of film reviews, each labelled by whether people found it friendly."""

import tarfile
from typing import NamedTuple

import numpy as np

from zerojax.data.downloads import SourceDistribution, fetch
from zerojax.data.splits import check_split

# The lexicon of Hutto and Gilbert 2014. What they measured it on is in the source distribution alone.
SOURCE = SourceDistribution(
    "vaderSentiment==3.3.2",
    "vaderSentiment-3.3.2.tar.gz",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)
_ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
_TABLE = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"


class Snippets(NamedTuple):
    """Labelled sentences.

    Attributes:
        sentences: N texts.
        labels: (N,) int32, 1 where the mean of the ratings is above 0, else 0.
    """

    sentences: tuple[str, ...]
    labels: np.ndarray


def movie_snippets(split: str = "train") -> Snippets:
    """10,605 snippets of film reviews, rated from -4 to 4 by 20 people each (49 % are above 0).

    Held out is a fifth of each label's sentences, rounded down, 2,120 together: of the label's sentences in the file's
    order, those that come first in a permutation drawn by ``numpy.random.RandomState(0)``, whose stream never changes;
    label 0 draws before label 1. Each part is in the file's order.

    Source: Hutto and Gilbert 2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
    Text"; the sentences are from rottentomatoes.com (Pang and Lee 2005, arXiv:cs/0506075). They are in the source
    distribution of the package ``vaderSentiment`` (2.5 MB), which is downloaded at the first call.

    Args:
        split: "train", "validation" or "all".

    Raises:
        UserError: the split is unknown, or the download fails (see `zerojax.data.downloads.fetch`).
    """
    check_split(split)
    return _split(_read(), split)


def _read() -> Snippets:
    path = fetch(SOURCE)
    with tarfile.open(path) as outer, tarfile.open(fileobj=outer.extractfile(_ARCHIVE)) as inner:
        table = inner.extractfile(_TABLE)
        assert table is not None
        rows = [line.decode("utf-8").split("\t") for line in table.read().splitlines()]
    ratings = np.array([float(rating) for _, rating, _ in rows])
    return Snippets(tuple(sentence for *_, sentence in rows), (ratings > 0).astype(np.int32))


def _split(snippets: Snippets, split: str) -> Snippets:
    if split == "all":
        return snippets
    random = np.random.RandomState(0)
    held_out = np.zeros(len(snippets.labels), bool)
    for label in (0, 1):
        rows = np.flatnonzero(snippets.labels == label)
        held_out[random.permutation(rows)[: len(rows) // 5]] = True
    chosen = np.flatnonzero(held_out == (split == "validation"))
    return Snippets(tuple(snippets.sentences[i] for i in chosen), snippets.labels[chosen])
