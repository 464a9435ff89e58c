"""Turns over files: read ahead and written behind the computing, few of them in memory at a time."""

import collections
import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np

AT_ONCE = 3  # turns in memory: one that is read, one that is computed, one that is written
ALIGNMENT = 64  # bytes


class Room:
    """Memory for the arrays of one turn after the other; it grows to the largest."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, shapes: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
        """Arrays of some shapes and dtypes, which take the place of those before.

        >>> room = Room()
        >>> a, b = room.arrays([((2,), np.dtype("float32")), ((3, 4), np.dtype("int8"))])
        >>> a.shape, b.shape, b.ctypes.data - a.ctypes.data
        ((2,), (3, 4), 64)
        """
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes]
        ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes], dtype=int).tolist()
        if ends and ends[-1] > self._bytes.size:
            self._bytes = np.empty(0, np.uint8)  # let go of first
            self._bytes = np.empty(ends[-1], np.uint8)
        parts = [self._bytes[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]
        return [part.view(dtype).reshape(shape) for part, (shape, dtype) in zip(parts, shapes, strict=True)]


class Stream:
    """Readings and writings of turns, each in the order given and in a thread of its own.

    Of each turn, `read` gives what its reading returned, and `write` says how it is written. A turn has a room from the
    start of its reading to the end of its writing. Leaving the `with` statement waits for the writing, and raises what
    stopped it; after an error nothing more is begun.

    Args:
      reads: the reading of each turn, into a room.
      rooms: `AT_ONCE` of them, so that as many turns are in memory at most.

    >>> written = []
    >>> with Stream([lambda room: 1, lambda room: 2], [Room()]) as stream:
    ...     for _ in range(2):
    ...         value = stream.read()
    ...         stream.write(lambda value=value: written.append(10 * value))
    >>> written
    [10, 20]
    """

    def __init__(self, reads: Iterable[Callable[[Room], Any]], rooms: Iterable[Room]):
        self._free: queue.SimpleQueue[Room | None] = queue.SimpleQueue()  # `None` for a reading that is not to begin
        for room in rooms:
            self._free.put(room)
        self._stopped = False
        self._reader = ThreadPoolExecutor(1, "zerojax-disk-read")
        self._writer = ThreadPoolExecutor(1, "zerojax-disk-write")
        self._reads = collections.deque(self._reader.submit(self._begin, read) for read in reads)
        self._writes: list[Future[None]] = []

    def read(self) -> Any:
        """What the next turn's reading returned, when it has."""
        self._room, value = self._reads.popleft().result()
        return value

    def write(self, write: Callable[[], None]) -> None:
        """Writes the turn that was read last, in the background."""
        self._writes.append(self._writer.submit(self._end, write, self._room))

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stop()
        self._writer.shutdown()
        self._stop()
        self._reader.shutdown(cancel_futures=True)
        for write in self._writes:  # its error is the cause of one that a reading has raised
            write.result()

    def _begin(self, read: Callable[[Room], Any]) -> tuple[Room, Any]:
        room = self._free.get()
        if room is None or self._stopped:
            self._free.put(None)
            raise RuntimeError("the stream has been stopped")
        return room, read(room)

    def _end(self, write: Callable[[], None], room: Room) -> None:
        try:
            if not self._stopped:
                write()
        except BaseException:
            self._stop()
            raise
        finally:
            self._free.put(room)

    def _stop(self) -> None:
        self._stopped = True
        self._free.put(None)
