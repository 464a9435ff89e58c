"""Arrays that lie in files between steps, in a directory of their own that ends with them.

The files are scratch. A checkpoint never points into them, so a run that is killed while it writes has damaged nothing
that it could go on from; what it leaves is removed by the next run that uses the same path. The files are given all
their room on the disk when they are made, and written in place from then on.
"""

import contextlib
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from zerojax.errors import RunError, UserError
from zerojax.space import free_bytes, megabytes, says_full

PREFIX = "zerojax-"


class OnDisk:
    """The form of a `DiskArray` of which there are no files yet, as `jax.ShapeDtypeStruct` is an array's."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding, path: str):
        self.shape, self.dtype, self.sharding, self.path = shape, np.dtype(dtype), sharding, path

    def __repr__(self) -> str:
        return f"OnDisk({self.dtype}{list(self.shape)} in {self.path})"


class DiskArray:
    """A global array in files: one for each shard that this process's devices hold, copies of a shard in one.

    `numpy.asarray` and `read` give its values. It is deleted, as a donated `jax.Array` is, when a step takes the state
    that it belongs to.

    Attributes:
      shape, dtype: of the global array.
      sharding: on the devices, where `read` brings it.
      nbytes: of the global array.
      files: this process's, in the order of `parts`.
      parts: the indices of the shards in them.
    """

    def __init__(self, form: OnDisk, scratch: "Scratch", number: int):
        self.shape, self.dtype, self.sharding = form.shape, form.dtype, form.sharding
        self._scratch, self._number, self._deleted = scratch, number, False
        self._places = self.sharding.addressable_devices_indices_map(self.shape)
        self.parts = list({str(index): index for index in self._places.values()}.values())
        self.files = [scratch.directory / f"{number}.{i}" for i in range(len(self.parts))]

    nbytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)
    size = property(lambda self: math.prod(self.shape))
    ndim = property(lambda self: len(self.shape))

    @property
    def form_of_parts(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of each part."""
        return self.sharding.shard_shape(self.shape), self.dtype

    @property
    def file_bytes(self) -> int:
        """Bytes of each file."""
        return math.prod(self.form_of_parts[0]) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"DiskArray({self.dtype}{list(self.shape)} in {self._scratch.directory})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)

    def is_deleted(self) -> bool:
        return self._deleted

    def successor(self) -> "DiskArray":
        """The array that takes this one's place in the files; this one is deleted."""
        self._check()
        self._deleted = True
        return DiskArray(OnDisk(self.shape, self.dtype, self.sharding, ""), self._scratch, self._number)

    def read(self) -> jax.Array:
        """The array on the devices."""
        shards = [np.empty(*self.form_of_parts) for _ in self.parts]
        self.load(shards)
        return self.placed(shards)

    def load(self, shards: Sequence[np.ndarray]) -> None:
        """Reads the shards, in the order of `parts`.

        Raises:
          RunError: if they cannot be read.
        """
        self._check()
        try:
            for file, shard in zip(self.files, shards, strict=True):
                _read(file, shard)
        except OSError as error:
            raise self._scratch.failed(error) from error

    def placed(self, shards: Sequence[np.ndarray]) -> jax.Array:
        """What `load` has read, copied to the devices when this returns."""
        number = {str(index): i for i, index in enumerate(self.parts)}
        copy = lambda index, device: jax.device_put(shards[number[str(index)]], device, may_alias=False)
        arrays = [copy(index, device) for device, index in self._places.items()]
        return jax.block_until_ready(jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays))

    def write(self, array: jax.Array) -> None:
        """Puts an array of this shape, dtype and sharding into the files.

        Raises:
          RunError: if they cannot be written.
        """
        self._check()
        shards = {str(shard.index): shard.data for shard in array.addressable_shards}
        try:
            for index, file in zip(self.parts, self.files, strict=True):
                _write(file, np.asarray(shards[str(index)]))
        except OSError as error:
            raise self._scratch.failed(error) from error

    def _check(self) -> None:
        if self._deleted:
            raise UserError(f"{self!r} belongs to a state that was given to a step; accepted: the state it returned")


class Scratch:
    """A directory for the files of one state of one process, removed when nothing refers to it any more.

    Its lock, which the operating system drops when the process ends in whatever way, tells it from what is left over.
    """

    def __init__(self, path: str):
        self._path, self._needed = Path(path), 0
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with _locked(self._path):  # one process at a time, so that none finds a directory before it is locked
                _remove_left_over(self._path)
                self.directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._path))
                lock = _lock(self.directory)
        except OSError as error:
            raise UserError(
                f"offload_path is {str(path)!r}: {error.strerror}; accepted: a directory to write in"
            ) from None
        weakref.finalize(self, _remove, self.directory, lock, os.getpid())

    def allocate(self, arrays: Sequence[DiskArray]) -> None:
        """Makes the files of arrays, with all the room that they will ever need.

        Raises:
          RunError: if there is not as much.
        """
        self._needed = sum(array.file_bytes * len(array.files) for array in arrays)
        if free_bytes(self._path) < self._needed:
            raise self._full()
        try:
            for array in arrays:
                for file in array.files:
                    _make(file, array.file_bytes)
        except OSError as error:
            raise self.failed(error) from error

    def failed(self, error: OSError) -> RunError:
        """The one-line form of what stopped the reading or writing."""
        if says_full(error):
            return self._full()
        return RunError(
            f"optimizer state in offload_path {self._path}: {error.strerror}: {error.filename}; "
            "checkpoints are intact, go on from the last one"
        )

    def _full(self) -> RunError:
        return RunError(
            f"offload_path {self._path}: the disk, a quota or a limit on a file's size is exhausted: "
            f"{megabytes(free_bytes(self._path))} free, {megabytes(self._needed)} needed for the optimizer's state; "
            "checkpoints are intact, go on from the last one"
        )


def opened(tree: Any) -> Any:
    """A tree with a `DiskArray`, whose values are not written yet, for each `OnDisk`: files in one new directory.

    Raises:
      UserError: if the directory cannot be made.
      RunError: if the disk has no room for them.
    """
    leaves, structure = jax.tree.flatten(tree)
    paths = {leaf.path for leaf in leaves if isinstance(leaf, OnDisk)}
    if not paths:
        return tree
    (path,) = paths
    scratch = Scratch(path)
    leaves = [DiskArray(leaf, scratch, i) if isinstance(leaf, OnDisk) else leaf for i, leaf in enumerate(leaves)]
    scratch.allocate([leaf for leaf in leaves if isinstance(leaf, DiskArray)])
    return jax.tree.unflatten(structure, leaves)


def _make(file: Path, size: int) -> None:
    with _open(file, os.O_RDWR | os.O_CREAT) as descriptor:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)


def _read(file: Path, array: np.ndarray) -> None:
    left = array.reshape(-1).view(np.uint8).data
    offset = 0
    with _open(file, os.O_RDONLY) as descriptor:
        while count := os.preadv(descriptor, [left], offset):
            left, offset = left[count:], offset + count
    if left:
        raise OSError(0, "cut short", str(file))


def _write(file: Path, array: np.ndarray) -> None:
    left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    offset = 0
    with _open(file, os.O_WRONLY) as descriptor:
        while left:
            count = os.pwrite(descriptor, left, offset)
            left, offset = left[count:], offset + count


@contextlib.contextmanager
def _open(file: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(file, flags | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        yield descriptor
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
    finally:
        os.close(descriptor)


def _lock(directory: Path, *, wait: bool = True) -> int:
    """An open descriptor of a directory, locked for this process until it is closed.

    Raises:
      OSError: where it is not waited for, if another one has the lock.
    """
    import fcntl  # not on every system that zerojax is imported on

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = _lock(directory)
    try:
        yield
    finally:
        os.close(descriptor)


def _remove_left_over(path: Path) -> None:
    """Removes the directories of processes that have ended without removing them."""
    for directory in path.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another one's that runs
            _remove(directory, _lock(directory, wait=False), os.getpid())


def _remove(directory: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of its process
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
