"""A run's figures in files: CSV, and TensorBoard's event files where that package is installed."""

import csv
import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

TRAIN, VALIDATION = "train", "validation"


class Table:
    """A CSV file of one row a step, kept open; the first row written names its columns.

    A run that goes on from step n forgets rows after n: they are written again.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "train.csv")
    >>> with Table(path, start=0) as table:
    ...     table.write(1, {"loss": 2.5})
    ...     table.write(2, {"loss": 2.25})
    >>> with Table(path, start=1) as table:
    ...     table.write(2, {"loss": 2.0})
    >>> path.read_text().split()
    ['step,loss', '1,2.5', '2,2.0']
    """

    def __init__(self, path: Path, start: int):
        rows = []
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if (row["step"] or "").isdigit() and int(row["step"]) <= start]
        self._columns = list(rows[0]) if rows else []
        replacement = path.with_suffix(".tmp")
        with open(replacement, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            if rows:
                writer.writeheader()
                writer.writerows(rows)
        os.replace(replacement, path)
        self._file = open(path, "a", newline="", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a row; values of names that the first row did not have are left out."""
        row = {"step": step, **values}
        header = not self._columns
        self._columns = self._columns or list(row)
        writer = csv.DictWriter(self._file, self._columns, extrasaction="ignore")
        if header:
            writer.writeheader()
        writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class RunLogs:
    """`train.csv`, `validation.csv` and TensorBoard events in a run's directory.

    Args:
      directory: the run's directory.
      start: the step that the run goes on from; rows after it are dropped.
    """

    def __init__(self, directory: Path, start: int):
        self._tables = {name: Table(directory / f"{name}.csv", start) for name in (TRAIN, VALIDATION)}
        self._events = _event_writer(directory / "tensorboard", start)

    def write(self, table: str, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step to the table "train" or "validation"."""
        self._tables[table].write(step, values)
        for name, value in values.items():
            self._events.scalar(f"{table}/{name}", value, step)

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
        self._events.close()


class _NoEvents:
    """Stands where TensorBoard is not installed."""

    def scalar(self, name: str, value: float, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Events(_NoEvents):
    def __init__(self, directory: Path, start: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))
        if start:  # steps from here on replace those of the run before
            self._writer.add_event(Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)))

    def scalar(self, name: str, value: float, step: int) -> None:
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value)])
        self._writer.add_event(self._event(step=step, summary=summary, wall_time=time.time()))

    def close(self) -> None:
        self._writer.close()


def _event_writer(directory: Path, start: int) -> Any:
    installed = importlib.util.find_spec("tensorboard") is not None
    return _Events(directory, start) if installed else _NoEvents()
