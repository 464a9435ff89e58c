"""Examples changed at random, in a way that does not depend on when or where they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerojax.data.loading import RandomAccess
from zerojax.errors import UserError


@dataclass(frozen=True, eq=False)
class Augmented:
    """A dataset of ``copies`` versions of another's every example, each changed in a way of its own.

    Example i is example ``i % N`` of the N, changed by a generator seeded by ``(seed, i)``: what it is does not depend
    on the order, the process or the thread that reads it, and a resumed run reads the same. An epoch of a loader over
    it goes ``copies`` times through the examples, so give as many copies as the training has epochs.

    Attributes:
        dataset: examples by index, with a length.
        change: from an example and a generator to the changed example, such as `RandomShift`.
        copies: of each example.
        seed: of the changes, 0 or more.

    Raises:
        UserError: ``copies`` or ``seed`` is out of its range.

    >>> noisy = Augmented([0.0, 10.0], lambda x, random: x + random.normal(), copies=3)
    >>> len(noisy), noisy[1] == noisy[1], noisy[1] == noisy[3], round(noisy[3] / 10)
    (6, True, False, 1)
    """

    dataset: RandomAccess
    change: Callable[[Any, np.random.Generator], Any]
    copies: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.copies < 1:
            raise UserError(f"copies={self.copies} is too small: give 1 or more")
        if self.seed < 0:
            raise UserError(f"seed={self.seed} is negative: give 0 or more")

    def __len__(self) -> int:
        return self.copies * len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.change(self.dataset[index % len(self.dataset)], np.random.default_rng((self.seed, index)))

    @property
    def fingerprint(self) -> dict[str, int | str]:
        """That of the examples, and how they are changed."""
        inner = getattr(self.dataset, "fingerprint", {"examples": len(self.dataset)})
        change = getattr(self.change, "__qualname__", None) or repr(self.change)
        return {**inner, "change": change, "copies": self.copies, "change_seed": self.seed}


@dataclass(frozen=True)
class RandomShift:
    """Moves an example's image by up to ``pixels`` along height and width; zeros come in at the edges.

    It is the random crop of an image padded by ``pixels`` on each side (He et al. 2015, arXiv:1512.03385, section 4.2),
    with every one of the ``(2 * pixels + 1) ** 2`` places equally likely.

    Attributes:
        pixels: 0 or more.
        key: of the image (height, width, channels) in the example, a dict.

    Raises:
        UserError: ``pixels`` is negative.

    >>> shifted = RandomShift(1)({"images": np.ones((2, 2, 1))}, np.random.default_rng(0))
    >>> shifted["images"].shape
    (2, 2, 1)
    """

    pixels: int
    key: str = "images"

    def __post_init__(self) -> None:
        if self.pixels < 0:
            raise UserError(f"pixels={self.pixels} is negative: give 0 or more")

    def __call__(self, example: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        image = example[self.key]
        height, width, _ = image.shape
        padded = np.pad(image, ((self.pixels, self.pixels), (self.pixels, self.pixels), (0, 0)))
        top, left = random.integers(2 * self.pixels + 1, size=2)
        return {**example, self.key: padded[top : top + height, left : left + width]}
