import numpy as np
import pytest

from zerojax.data import sentence_dataset
from zerojax.errors import UserError

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers (extra data)")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fine", "film", "##s"]


@pytest.fixture
def tokenizer():
    """A WordPiece tokenizer that asks for padding and truncation, as BERT's files may."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.enable_padding(length=128)
    made.enable_truncation(128)
    return made


def test_sentences_are_cut_between_their_marks_and_padded(tokenizer):
    dataset = sentence_dataset(
        ["fine films", "a", "a fine film a fine film"], [1, 0, 1], tokenizer, classes=2, length=5
    )
    assert len(dataset) == 3
    assert dataset.arrays["tokens"].tolist() == [[2, 5, 6, 7, 3], [2, 4, 3, 0, 0], [2, 4, 5, 6, 3]]
    assert dataset.arrays["mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert dataset.arrays["labels"].tolist() == [1, 0, 1]
    assert {name: (x.dtype, x.shape) for name, x in dataset[0].items()} == {
        "tokens": (np.int32, (5,)),
        "mask": (np.int32, (5,)),
        "labels": (np.int32, ()),
    }


def test_the_tokenizer_is_left_as_it_is(tokenizer):
    sentence_dataset(["a"], [0], tokenizer, classes=1, length=4)
    assert len(tokenizer.encode("a").ids) == 128


def test_wrong_input_is_named(tokenizer):
    with pytest.raises(UserError, match=r"labels\[1\]=2: must lie in \[0, 2\)"):
        sentence_dataset(["a", "a"], [0, 2], tokenizer, classes=2)
    with pytest.raises(UserError, match="labels=.*must be integers"):
        sentence_dataset(["a", "a"], [0.0, 1.0], tokenizer, classes=2)
    with pytest.raises(UserError, match=r"labels have shape \(1,\); accepted: \(2,\), one for each sentence"):
        sentence_dataset(["a", "a"], [0], tokenizer, classes=2)
    with pytest.raises(UserError, match="length=2 is too small: 2 tokens mark the ends, give 3 or more"):
        sentence_dataset(["a"], [0], tokenizer, classes=2, length=2)
