import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from zerojax.data.loading import loader
from zerojax.data.windows import text_dataset
from zerojax.errors import UserError

pytest.importorskip("grain")
LENGTH = 3


@pytest.fixture
def dataset(tmp_path):
    """20 windows; window i starts with the token 3 i."""
    path = tmp_path / "numbers.txt"
    path.write_bytes(bytes(range(61)))
    return text_dataset(str(path), length=LENGTH, split="all")


def make(dataset, batch_size=8, seed=0, index=0, count=1):
    return loader(dataset, batch_size, seed=seed, process_index=index, process_count=count)


def take(batches, n):
    return np.stack([next(batches)["tokens"] for _ in range(n)])


def order(batches, n):
    return (take(batches, n)[..., 0] // LENGTH).ravel()


def test_batches_are_windows(dataset):
    batch = next(make(dataset))
    assert list(batch) == ["tokens"] and batch["tokens"].shape == (8, LENGTH + 1) and batch["tokens"].dtype == np.int32
    np.testing.assert_array_equal(batch["tokens"], batch["tokens"][:, :1] + np.arange(LENGTH + 1))


def test_an_epoch_is_a_permutation_and_epochs_differ(dataset):
    epochs = order(make(dataset, batch_size=4), 15).reshape(3, 20)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(20), (3, 1)))
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(20))}) == 4


def test_a_seed_is_an_order(dataset):
    np.testing.assert_array_equal(order(make(dataset, seed=7), 10), order(make(dataset, seed=7), 10))
    assert (order(make(dataset, seed=7), 10) != order(make(dataset, seed=8), 10)).any()


def test_seeds_do_not_share_epochs(dataset):
    of_seed = {tuple(epoch) for epoch in order(make(dataset, batch_size=4, seed=0), 25).reshape(5, 20)}
    of_next = {tuple(epoch) for epoch in order(make(dataset, batch_size=4, seed=1), 25).reshape(5, 20)}
    assert not of_seed & of_next


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shares_put_together_are_the_global_batch(dataset, count):
    whole = take(make(dataset), 8)  # 64 windows: three epochs, whose ends are inside batches
    shares = [take(make(dataset, index=index, count=count), 8) for index in range(count)]
    assert shares[0].shape == (8, 8 // count, LENGTH + 1)
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), whole)


@pytest.mark.parametrize("consumed", [0, 1, 2, 7])
def test_resuming_goes_on_exactly_with_any_number_of_processes(dataset, consumed):
    uninterrupted = take(make(dataset), 12)
    first = make(dataset)
    for _ in range(consumed):
        next(first)
    saved = json.loads(json.dumps(first.get_state()))
    assert saved["position"] == consumed
    shares = []
    for index in range(2):
        resumed = make(dataset, index=index, count=2)
        next(resumed)
        resumed.set_state(saved)
        assert resumed.get_state() == saved
        shares.append(take(resumed, 12 - consumed))
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), uninterrupted[consumed:])


def test_a_position_in_other_data_is_refused(dataset, tmp_path):
    batches = make(dataset)
    next(batches)
    saved = batches.get_state()
    with pytest.raises(UserError, match="batch_size is 4 and was 8; "):
        make(dataset, batch_size=4).set_state(saved)
    with pytest.raises(UserError, match="seed is 1 and was 0; "):
        make(dataset, seed=1).set_state(saved)
    shorter = text_dataset(dataset.source, length=2, split="all")
    with pytest.raises(UserError, match="length is 2 and was 3; "):
        make(shorter).set_state(saved)
    (tmp_path / "other.txt").write_bytes(bytes(range(1, 62)))
    other = text_dataset(str(tmp_path / "other.txt"), length=LENGTH, split="all")
    with pytest.raises(UserError, match="text is 'sha256:[0-9a-f]+' and was 'sha256:[0-9a-f]+'; "):
        make(other).set_state(saved)
    with pytest.raises(UserError, match="tokenizer is None and was 'bytes'"):
        make([{"x": 1}]).set_state(saved)


def test_any_random_access_dataset_will_do():
    examples = [{"image": np.full((2, 2), i), "label": i} for i in range(5)]
    batch = next(make(examples, batch_size=5))
    assert batch["image"].shape == (5, 2, 2)
    np.testing.assert_array_equal(np.sort(batch["label"]), np.arange(5))


def test_a_batch_may_be_larger_than_the_dataset(dataset):
    np.testing.assert_array_equal(np.bincount(order(make(dataset, batch_size=60), 1)), np.full(20, 3))


def test_processes_default_to_those_of_jax(dataset, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    np.testing.assert_array_equal(take(loader(dataset, 8), 3), take(make(dataset, index=1, count=2), 3))


def test_wrong_input_is_named(dataset, monkeypatch):
    with pytest.raises(UserError, match="batch_size=6 does not divide by the number of processes, 4"):
        make(dataset, batch_size=6, count=4)
    with pytest.raises(UserError, match="batch_size=0"):
        make(dataset, batch_size=0)
    with pytest.raises(UserError, match="process_index=2"):
        make(dataset, index=2, count=2)
    with pytest.raises(UserError, match="seed=-1"):
        make(dataset, seed=-1)
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(UserError, match="'grain' is not installed: pip install grain"):
        make(dataset)


def test_importing_the_package_loads_no_heavy_library():
    code = "import sys, zerojax.data; print(sorted({'grain', 'tokenizers', 'pydoc_data.topics'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
