import numpy as np
import pytest

from zerojax.data.evaluation import evaluation_batches
from zerojax.data.windows import text_dataset
from zerojax.errors import UserError


@pytest.fixture(params=[61, 60, 62, 81, 4])
def dataset(request, tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_bytes(bytes(range(request.param)))
    return text_dataset(str(path), length=3, split="all")


def make(dataset, batch_size=8, batches=None, index=0, count=1):
    return evaluation_batches(dataset, batch_size, batches, process_index=index, process_count=count)


def test_every_target_counts_once_in_order(dataset):
    batches = list(make(dataset))
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert set(np.unique(weights)) <= {0.0, 1.0} and weights.dtype == np.float32 and tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens[:, 1:][weights == 1], dataset.tokens[1:])
    np.testing.assert_array_equal(tokens[:, :-1][weights == 1], dataset.tokens[:-1])


def test_all_batches_have_one_shape_and_repeat(dataset):
    batches = make(dataset)
    shapes = {(batch["tokens"].shape, batch["weights"].shape) for batch in batches}
    assert shapes == {((8, 4), (8, 3))}
    assert len(batches) == len(list(batches)) == len(list(batches))


@pytest.mark.parametrize("count", [2, 4])
def test_shares_put_together_are_the_global_batch(dataset, count):
    shares = [list(make(dataset, index=index, count=count)) for index in range(count)]
    for whole, *parts in zip(make(dataset), *shares, strict=True):
        for name in whole:
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def test_fewer_batches_are_spread_over_the_text(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_bytes(bytes(i // 3 for i in range(300)) + b"\x7f")
    dataset = text_dataset(str(path), length=3, split="all")  # 100 windows, window i starts with token i
    batches = list(make(dataset, batch_size=5, batches=2))
    assert np.concatenate([b["tokens"][:, 0] for b in batches]).tolist() == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert len(make(dataset, batch_size=5, batches=1000)) == 20


def test_wrong_input_is_named(dataset):
    with pytest.raises(UserError, match="batch_size=6 does not divide by the number of processes, 4"):
        make(dataset, batch_size=6, count=4)
    with pytest.raises(UserError, match="batches=0"):
        make(dataset, batches=0)
