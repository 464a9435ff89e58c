"""From a file's tensors to a parameter and back, each way a pure function of NumPy arrays that changes no number.

PyTorch's kernels are (outputs, inputs), ours (inputs, outputs). Transposing leaves a bias of one dim as it is, so that
what joins kernels joins their biases too.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


class Transform(Protocol):
    """How tensors of a file make up one parameter."""

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Of the tensors that a parameter of ``shape`` is made of."""
        ...

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The parameter."""
        ...

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        """The tensors."""
        ...


@dataclasses.dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (shape,)

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        return tensors[0]

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return (parameter,)


@dataclasses.dataclass(frozen=True)
class Joined:
    """Transposed tensors of one shape, beside each other along the last dim.

    >>> Joined(2).join([np.array([[1, 2]]), np.array([[3, 4]])])
    array([[1, 3],
           [2, 4]])
    """

    parts: int = 1

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (_reversed((*shape[:-1], shape[-1] // self.parts)),) * self.parts

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([x.T for x in tensors], axis=-1)

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(x.T for x in np.split(parameter, self.parts, axis=-1))


@dataclasses.dataclass(frozen=True)
class Heads:
    """Transposed tensors of the queries, keys and values, group by group, ``[q ... q k v]`` for each key-value head.

    Attributes:
        kv_heads: number of key-value heads.
        group: number of queries for each of them.

    >>> q, k, v = np.array([1, 2]), np.array([3, 4]), np.array([5, 6])  # two heads of width 1
    >>> Heads(kv_heads=2, group=1).join([q, k, v])
    array([1, 3, 5, 2, 4, 6])
    """

    kv_heads: int
    group: int

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        keys = shape[-1] // (self.group + 2)
        return tuple(_reversed((*shape[:-1], n)) for n in (self.group * keys, keys, keys))

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        groups = [x.T.reshape(*x.T.shape[:-1], self.kv_heads, -1) for x in tensors]
        joined = np.concatenate(groups, axis=-1)
        return joined.reshape(*joined.shape[:-2], -1)

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        groups = parameter.reshape(*parameter.shape[:-1], self.kv_heads, self.group + 2, -1)
        parts = np.split(groups, (self.group, self.group + 1), axis=-2)
        return tuple(x.reshape(*parameter.shape[:-1], -1).T for x in parts)


@dataclasses.dataclass(frozen=True)
class JoinedHeads:
    """One tensor of all queries, all keys and all values along the last dim, (inputs, outputs) as ours; see `Heads`."""

    heads: Heads

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (shape,)

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        (tensor,) = tensors
        widths = [shape[0] for shape in self.heads.shapes(tensor.shape)]
        parts = np.split(tensor, list(itertools.accumulate(widths))[:-1], axis=-1)
        return self.heads.join([x.T for x in parts])

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.concatenate([x.T for x in self.heads.split(parameter)], axis=-1),)


def _reversed(shape: Shape) -> Shape:
    return shape[::-1]
