"""A run's figures in files: CSV, and TensorBoard's event files where that package is installed."""

import csv
import importlib.util
import io
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from zerojax.monitor.files import AppendedFile, replace_text, writing

TRAIN, VALIDATION = "train", "validation"


class Table:
    """A CSV file of one row a step; the first row written names its columns.

    A run that goes on from step n forgets the rows after n, which it writes again, and a row that a crash cut short.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "train.csv")
    >>> table = Table(path, start=0)
    >>> table.write(1, {"loss": 2.5})
    >>> table.write(2, {"loss": 2.25})
    >>> table.close()
    >>> table = Table(path, start=1)
    >>> table.write(2, {"loss": 2.0})
    >>> path.read_text().split()
    ['step,loss', '1,2.5', '2,2.0']

    Raises:
      RunError: if the file cannot be written.
    """

    def __init__(self, path: Path, start: int):
        rows = _rows(path, start)
        self._columns = list(rows[0]) if rows else []
        replace_text(path, _lines([self._columns, *(row.values() for row in rows)]) if rows else "")
        self._file = AppendedFile(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a row; values of names that the first row did not have are left out."""
        row = {"step": step, **values}
        header = [] if self._columns else [list(row)]
        self._columns = self._columns or list(row)
        self._file.write(_lines([*header, [row.get(name, "") for name in self._columns]]).encode())

    def close(self) -> None:
        self._file.close()


class RunLogs:
    """`train.csv`, `validation.csv` and TensorBoard events in a run's directory, to be closed or used in a `with`.

    Args:
      directory: the run's directory.
      start: the step that the run goes on from; what is told of later ones is replaced.
      tables: whether the CSV files are written.
      events: whether TensorBoard's events are, where that package is installed.

    Raises:
      RunError: if a file cannot be written.
    """

    def __init__(self, directory: Path, start: int, tables: bool = True, events: bool = True):
        names = (TRAIN, VALIDATION) if tables else ()
        self._tables = {name: Table(directory / f"{name}.csv", start) for name in names}
        installed = importlib.util.find_spec("tensorboard") is not None
        self._events = _Events(directory / "tensorboard", start) if installed and events else None

    def write(self, table: str, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step to the table "train" or "validation"."""
        if self._tables:
            self._tables[table].write(step, values)
        if self._events is not None:
            self._events.write(step, {f"{table}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "RunLogs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Events:
    """TensorBoard's events; its own writer holds them back for minutes, and a killed run would lose them."""

    def __init__(self, directory: Path, start: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        with writing(directory):
            directory.mkdir(exist_ok=True)
        # A directory's files are read in the order of their names.
        self._file = RecordWriter(AppendedFile(directory / f"events.out.tfevents.{time.time_ns()}"))
        self._add(file_version="brain.Event:2")
        # Steps from here on replace those of the attempt before.
        self._add(step=start + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))

    def close(self) -> None:
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def _rows(path: Path, last: int) -> Sequence[Mapping[str, str]]:
    """The complete rows of a table up to the step `last`, in the order of their steps."""
    if not path.exists():
        return []
    rows: list[Mapping[str, str]] = []
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file):
            whole = None not in row and None not in row.values()
            step = int(row["step"]) if whole and row.get("step", "").isdecimal() else 0
            if (int(rows[-1]["step"]) if rows else 0) < step <= last:
                rows.append(row)
    return rows


def _lines(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
