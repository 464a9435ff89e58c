"""The epochs of the engine's data loader."""

import jax
import numpy as np
import pytest

from zerojax.engine import EpochLoader
from zerojax.engine.loader import endless


def rows(loader):
    return [batch.tolist() for batch in loader]


def test_an_epoch_is_every_example_in_an_order_of_its_own():
    loader = EpochLoader(np.arange(12), 4, seed=3)
    epochs = [rows(loader) for _ in range(3)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4, 4, 4]
        assert sorted(sum(epoch, [])) == list(range(12))
    assert len({str(epoch) for epoch in epochs}) == 3
    assert [rows(again) for again in [EpochLoader(np.arange(12), 4, seed=3)] * 3] == epochs
    assert rows(EpochLoader(np.arange(12), 4, seed=-3)) != epochs[0]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_last_batch_that_is_not_full(drop_last):
    """Is filled up with the epoch's first examples, as torch's DistributedSampler fills its ranks; or left out."""
    loader = EpochLoader(np.arange(10), 4, drop_last=drop_last)
    epoch = rows(loader)
    assert len(epoch) == len(loader) == (2 if drop_last else 3)
    if not drop_last:
        assert epoch[2][2:] == epoch[0][:2]
        assert sorted(sum(epoch, [])[:10]) == list(range(10))


def test_batches_are_of_the_same_rows_for_any_number_of_processes(monkeypatch):
    want = rows(EpochLoader(np.arange(10), 4))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    parts = []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        parts.append(rows(EpochLoader(np.arange(10), 4)))
    assert [first + second for first, second in zip(*parts, strict=True)] == want


@pytest.mark.parametrize("drop_last", [False, True])
def test_it_goes_on_from_any_place(drop_last):
    """From the place at which a batch was given, with another size of batches too."""
    whole = EpochLoader(np.arange(10), 4, drop_last=drop_last)
    want, places = [], []
    for batch, _ in zip(endless(whole), range(7), strict=False):
        want.append(batch.tolist())
        places.append(whole.position)
    for i, place in enumerate(places):
        loader = EpochLoader(np.arange(10), 4, drop_last=drop_last)
        loader.seek(*place)
        assert [batch.tolist() for batch, _ in zip(endless(loader), range(6 - i), strict=False)] == want[i + 1 :]
    last = len(whole) - 1
    loader = EpochLoader(np.arange(10), 4, drop_last=drop_last)
    loader.seek(*places[last])  # at the end of an epoch, a loop begins the next one
    assert rows(loader)[:2] == want[last + 1 :][:2]
    loader = EpochLoader(np.arange(10), 2, drop_last=drop_last)
    loader.seek(*places[0])
    assert next(iter(loader)).tolist() == want[1][:2]


def test_examples_are_collated():
    examples = [{"x": np.full(3, i), "y": i} for i in range(4)]
    batch = next(iter(EpochLoader(examples, 2)))
    assert (batch["x"].shape, batch["y"].shape) == ((2, 3), (2,))
    np.testing.assert_array_equal(batch["x"][:, 0], batch["y"])
    assert list(EpochLoader(examples, 2, collate=len)) == [2, 2]


def test_a_loop_that_is_left_does_not_move_the_next_epoch():
    loader = EpochLoader(np.arange(12), 4)
    epochs = [rows(loader) for _ in range(2)]
    loader = EpochLoader(np.arange(12), 4)
    next(iter(loader))
    assert rows(loader) == epochs[1]
