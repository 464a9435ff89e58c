import itertools

import numpy as np
import pytest

from zerojax.data import ArrayDataset, Augmented, RandomShift, loader
from zerojax.errors import UserError


@pytest.fixture
def images():
    # No pixel is 0, so that what comes in at an edge is told from the image.
    pixels = np.random.default_rng(0).uniform(0.5, 1, (6, 5, 4, 3)).astype(np.float32)
    return ArrayDataset({"images": pixels, "labels": np.arange(6)})


def shift_of(shifted, original):
    """How far an image was moved down and right, found by trying."""
    for down, right in itertools.product(range(-4, 5), range(-3, 4)):
        moved = np.zeros_like(original)
        height, width, _ = original.shape
        to, source = np.s_[max(down, 0) : height + min(down, 0)], np.s_[max(-down, 0) : height + min(-down, 0)]
        to2, source2 = np.s_[max(right, 0) : width + min(right, 0)], np.s_[max(-right, 0) : width + min(-right, 0)]
        moved[to, to2] = original[source, source2]
        if (moved == shifted).all():
            return down, right
    raise AssertionError("no shift of the original")


def test_every_shift_up_to_the_limit_is_about_as_frequent(images):
    copies = 600
    augmented = Augmented(images, RandomShift(1), copies)
    assert len(augmented) == 6 * copies
    seen = [shift_of(augmented[i]["images"], images[i % 6]["images"]) for i in range(len(augmented))]
    counts = [seen.count(shift) for shift in itertools.product((-1, 0, 1), repeat=2)]
    assert sum(counts) == len(seen)
    expected = len(seen) / 9
    assert sum((count - expected) ** 2 / expected for count in counts) < 26.1  # chi squared, 8 degrees: p = 0.001


def test_the_rest_of_an_example_stays(images):
    augmented = Augmented(images, RandomShift(2), copies=3)
    assert [int(augmented[i]["labels"]) for i in range(18)] == list(range(6)) * 3
    example = augmented[0]["images"]
    assert example.shape == (5, 4, 3) and example.dtype == np.float32


def test_no_shift_is_the_identity(images):
    np.testing.assert_array_equal(Augmented(images, RandomShift(0), copies=1)[2]["images"], images[2]["images"])


def test_an_example_depends_on_seed_and_index_alone(images):
    make = lambda seed=0: Augmented(images, RandomShift(2), copies=20, seed=seed)
    first, again, other = make(), make(), make(seed=1)
    order = np.random.default_rng(3).permutation(len(first))
    shuffled = {int(i): again[int(i)]["images"] for i in order}
    assert all((first[i]["images"] == shuffled[i]).all() for i in range(len(first)))
    assert sum((first[i]["images"] == other[i]["images"]).all() for i in range(len(first))) < 20  # 1 in 25 by chance


@pytest.mark.parametrize("process_count", [2, 4])
def test_batches_do_not_depend_on_the_number_of_processes(images, process_count):
    augmented = Augmented(images, RandomShift(2), copies=4)
    whole = loader(augmented, 8, seed=5, process_index=0, process_count=1)
    shares = [loader(augmented, 8, seed=5, process_index=i, process_count=process_count) for i in range(process_count)]
    for _ in range(4):
        parts = [next(share)["images"] for share in shares]
        np.testing.assert_array_equal(next(whole)["images"], np.concatenate(parts))


def test_a_resumed_loader_gives_the_same_images(images):
    make = lambda: loader(Augmented(images, RandomShift(2), copies=4), 4, process_index=0, process_count=1)
    first, second = make(), make()
    for _ in range(3):
        next(first)
    second.set_state(first.get_state())
    np.testing.assert_array_equal(next(first)["images"], next(second)["images"])


def test_a_position_belongs_to_its_augmentation(images):
    make = lambda *change: loader(Augmented(images, *change), 4, process_index=0, process_count=1)
    state = make(RandomShift(2), 4).get_state()
    for change in ((RandomShift(1), 4), (RandomShift(2), 5), (RandomShift(2), 4, 1)):
        with pytest.raises(UserError, match="belongs to other data"):
            make(*change).set_state(state)


def test_wrong_input_is_named(images):
    with pytest.raises(UserError, match="copies=0 is too small"):
        Augmented(images, RandomShift(1), copies=0)
    with pytest.raises(UserError, match="seed=-1 is negative"):
        Augmented(images, RandomShift(1), copies=1, seed=-1)
    with pytest.raises(UserError, match="pixels=-1 is negative"):
        RandomShift(-1)
    with pytest.raises(IndexError):
        Augmented(images, RandomShift(1), copies=1)[6]
