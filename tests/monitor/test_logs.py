"""What a run's CSV and event files hold, and what becomes of it when the run is started again."""

import csv
import importlib.util

import numpy as np
import pytest

from tests.runs import events
from zerojax.monitor import RunLogs
from zerojax.monitor.logs import Table

COLUMNS = "step,loss,accuracy\n"


def test_values_come_back_exactly(tmp_path):
    values = {"loss": float(np.float32(1) / 3), "tiny": 1e-45, "nan": float("nan"), "speed": 12345.6}
    table = Table(tmp_path / "train.csv", start=0)
    table.write(1, values)
    table.close()
    with open(tmp_path / "train.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row.pop("step") == "1"
    np.testing.assert_equal({name: float(text) for name, text in row.items()}, values)


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (COLUMNS + "1,2.5,0\n2,2.25,0\n3,2.0,0\n", ["1,2.5,0", "2,2.25,0"]),  # the step after the last checkpoint
        (COLUMNS + "1,2.5,0\n2,2.2", ["1,2.5,0"]),  # a machine that stopped in the middle of a row
        (COLUMNS + "1,2.5,0\n2,2.25,0\n1", ["1,2.5,0", "2,2.25,0"]),  # in the middle of the number 10
        (COLUMNS + "1,2.5,0\n2,2.25,0\n1,9.0,9\n\0\0\0", ["1,2.5,0", "2,2.25,0"]),
        (COLUMNS, []),
        ("", []),
        ("something else\n1\n", []),
    ],
)
def test_a_run_that_goes_on_keeps_the_whole_rows_up_to_its_start(tmp_path, left, kept):
    path = tmp_path / "train.csv"
    path.write_bytes(left.encode())
    table = Table(path, start=2)
    table.write(3, {"loss": 1.0, "accuracy": 1})
    table.close()
    assert path.read_text().splitlines() == [COLUMNS.strip(), *kept, "3,1.0,1"]
    assert [found.name for found in tmp_path.iterdir()] == ["train.csv"]


def test_columns_are_those_of_the_first_row(tmp_path):
    table = Table(tmp_path / "train.csv", start=0)
    table.write(1, {"loss": 1.0, "accuracy": 0.5})
    table.write(2, {"more": 7.0, "loss": 2.0})
    table.close()
    assert (tmp_path / "train.csv").read_text() == "step,loss,accuracy\n1,1.0,0.5\n2,2.0,\n"


def write(directory, start, steps, scale):
    with RunLogs(directory, start) as logs:
        for step in range(start + 1, start + 1 + steps):
            logs.write("train", step, {"loss": scale / step, "grad_norm": scale})
        logs.write("validation", step, {"loss": scale})


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.parametrize("resumed_from", [0, 2])
def test_tensorboard_reads_what_the_csv_has_of_a_run_started_again(tmp_path, resumed_from):
    write(tmp_path, start=0, steps=5, scale=1.0)
    write(tmp_path, start=resumed_from, steps=2, scale=3.0)
    expected = {}
    for table in ("train", "validation"):
        with open(tmp_path / f"{table}.csv", newline="") as file:
            for row in csv.DictReader(file):
                for name in set(row) - {"step"}:
                    expected.setdefault(f"{table}/{name}", []).append((int(row["step"]), np.float32(row[name])))
    assert [step for step, _ in expected["train/loss"]] == list(range(1, resumed_from + 3))
    assert events(tmp_path) == expected


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_events_are_in_the_file_before_it_is_closed(tmp_path):
    logs = RunLogs(tmp_path, 0)
    logs.write("train", 1, {"loss": 0.5})
    assert events(tmp_path) == {"train/loss": [(1, 0.5)]}
    logs.close()


def test_without_tensorboard_there_is_the_csv(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write(tmp_path, start=0, steps=1, scale=1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.csv", "validation.csv"]
