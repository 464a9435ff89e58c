import numpy as np
import pytest

from zerojax.data import ArrayDataset, batches_in_order, loader
from zerojax.errors import UserError


@pytest.fixture
def dataset():
    return ArrayDataset({"x": np.arange(14, dtype=np.float32).reshape(7, 2), "labels": np.arange(7)})


def test_an_example_is_a_row_of_every_array(dataset):
    assert len(dataset) == 7
    assert dataset[3]["x"].tolist() == [6.0, 7.0] and dataset[3]["labels"] == 3
    for outside in (-1, 7):
        with pytest.raises(IndexError):
            dataset[outside]


def test_arrays_have_as_many_rows():
    with pytest.raises(UserError, match="x has 3, labels has 4"):
        ArrayDataset({"x": np.zeros(3), "labels": np.zeros(4)})
    with pytest.raises(UserError, match="there are no arrays"):
        ArrayDataset({})


def test_equal_data_have_equal_fingerprints(dataset):
    same = ArrayDataset({"labels": np.arange(7), "x": dataset.arrays["x"].copy()})
    assert same.fingerprint == dataset.fingerprint
    for x in (dataset.arrays["x"] + 1, dataset.arrays["x"].astype(np.float64), dataset.arrays["x"].reshape(7, 1, 2)):
        assert ArrayDataset({**dataset.arrays, "x": x}).fingerprint != dataset.fingerprint


def test_a_saved_position_belongs_to_its_data(dataset):
    batches = loader(dataset, batch_size=2, process_index=0, process_count=1)
    other = ArrayDataset({**dataset.arrays, "labels": np.zeros(7, int)})
    with pytest.raises(UserError, match="arrays is .* and was"):
        loader(other, batch_size=2, process_index=0, process_count=1).set_state(batches.get_state())


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 8, 10])
def test_in_order_every_example_weighs_one_once(dataset, batch_size):
    batches = list(batches_in_order(dataset, batch_size, process_index=0, process_count=1))
    assert len(batches) == -(-7 // batch_size)
    assert {batch["x"].shape for batch in batches} == {(batch_size, 2)}
    rows = np.concatenate([batch["labels"] for batch in batches])
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert rows[weights == 1].tolist() == list(range(7)) and set(weights.tolist()) <= {0.0, 1.0}


def test_shares_in_order_make_up_the_whole(dataset):
    whole, *shares = (list(batches_in_order(dataset, 4, *process)) for process in ((0, 1), (0, 2), (1, 2)))
    assert len(whole) == len(shares[0]) == len(shares[1])
    for batch, *parts in zip(whole, *shares, strict=True):
        for name, array in batch.items():
            np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]))


def test_in_order_processes_divide_the_batch(dataset):
    with pytest.raises(UserError, match="batch_size=3 does not divide by the number of processes, 2"):
        next(batches_in_order(dataset, 3, 0, 2))
