"""What a person sees of a run, in a terminal and elsewhere."""

import io
import os
import pty
import re

import pytest

from zerojax.monitor import progress as module
from zerojax.monitor.progress import Progress


def drive(steps, **options):
    with Progress(start=steps[0] - 1, **options) as progress:
        progress.say("[bold] of 1,000 parameters")
        for step in steps:
            progress.update(step, {"loss": 6 / step}, tokens_per_second=1234.5)


def test_a_pipe_gets_plain_lines_and_the_last_step(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    drive(range(1, 4), total=3, file=file)
    assert file.getvalue() == "[bold] of 1,000 parameters\nstep 3/3  loss 2.0000  1,234 tokens/s  0:00:00 left\n"


def test_plain_lines_come_in_intervals_and_tell_the_time_left(monkeypatch):
    now = iter([100.0, 104.0, 111.0, 112.0, 122.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    file = io.StringIO()
    drive(range(11, 15), total=1010, file=file)
    lines = file.getvalue().splitlines()[1:]
    # Without the first step, which compiles: 1 step in 7 s leaves 998 for 6,986 s; 3 in 18 s leave 996 for 5,976 s.
    assert [line.split("  ")[0] for line in lines] == ["step 12/1010", "step 14/1010"]
    assert [line.split("  ")[-1] for line in lines] == ["1:56:26 left", "1:39:36 left"]


def test_quiet_says_nothing():
    file = io.StringIO()
    drive(range(1, 4), total=3, file=file, quiet=True)
    assert file.getvalue() == ""


def in_terminal(monkeypatch, columns, term="xterm-256color"):
    """What a terminal is sent."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", str(columns))  # rich asks the process's own terminal, not the file
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as file:
        drive(range(201, 601), total=600, file=file)
    sent = b""
    try:
        while part := os.read(reader, 1 << 16):
            sent += part
    except OSError:  # the other end is closed
        pass
    os.close(reader)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent.decode()).replace("\r", "\n").split("\n")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_terminal_gets_a_bar_that_fills_its_width(monkeypatch, columns):
    lines = [line for line in in_terminal(monkeypatch, columns) if line.strip()]
    assert lines[0].startswith("step 200/600")  # the bar begins where the run does
    assert "[bold] of 1,000 parameters" in [line.rstrip() for line in lines]
    assert re.fullmatch(r"step 600/600 ━+ loss 0\.0100  1,234 tokens/s [-\d]:[-\d]+:[-\d]+ left", lines[-1])
    assert len(lines[-1]) == columns


def test_a_terminal_without_cursor_gets_plain_lines(monkeypatch):
    lines = [line for line in in_terminal(monkeypatch, 80, term="dumb") if line]
    assert lines == ["[bold] of 1,000 parameters", "step 600/600  loss 0.0100  1,234 tokens/s  0:00:00 left"]
