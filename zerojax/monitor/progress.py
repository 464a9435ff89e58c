"""The line that a person watches: step, loss, tokens a second, time left."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

PLAIN_INTERVAL = 10.0  # seconds between lines where there is no terminal


class Progress:
    """A progress bar in a terminal; elsewhere a plain line every ten seconds, and for the last step.

    Args:
      total: the number of steps.
      start: the step that the run goes on from.
      file: where it is written, standard output by default.
      quiet: whether to write nothing, as processes other than the first do.

    >>> with Progress(total=2, start=0) as progress:
    ...     progress.update(2, {"loss": 1.5}, tokens_per_second=1000.0)
    step 2/2  loss 1.5000  1,000 tokens/s  0:00:00 left
    """

    def __init__(self, total: int, start: int, file: TextIO | None = None, quiet: bool = False):
        self._total, self._start, self._quiet = total, start, quiet
        self._file = file or sys.stdout
        self._began = self._last = time.monotonic()
        # Asked here, since rich lets variables such as FORCE_COLOR make a terminal of a pipe.
        terminal = self._file.isatty()
        console = Console(file=self._file, force_terminal=terminal)
        self._bar: Bar | None = None
        if terminal and not console.is_dumb_terminal and not quiet:
            self._bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),  # what the words leave
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task("train", total=total, completed=start, figures="")

    def update(self, step: int, metrics: Mapping[str, float], tokens_per_second: float) -> None:
        """Shows the figures of `step`."""
        now = time.monotonic()
        if step == self._start + 1:
            self._began = now  # the first step compiles, which says nothing of the others
        figures = f"loss {metrics['loss']:.4f}  {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
        elif not self._quiet:
            if step == self._total or now - self._last >= PLAIN_INTERVAL:
                self._last = now
                left = (now - self._began) / max(step - self._start - 1, 1) * (self._total - step)
                self.say(f"step {step}/{self._total}  {figures}  {_clock(left)} left")

    def say(self, line: str) -> None:
        """Writes a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        elif not self._quiet:
            print(line, file=self._file, flush=True)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
