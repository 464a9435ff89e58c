"""What the engine tells: lines in the terminal, CSV files, TensorBoard's events."""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import optax

from zerojax.config.deepspeed import DeepSpeedConfig
from zerojax.config.deepspeed.resolved import Monitor
from zerojax.engine.record import StepRecord
from zerojax.errors import UserError
from zerojax.monitor import RunLogs
from zerojax.monitor.files import writing


class EngineLogs:
    """Written by process 0, a step behind, so that the host does not wait for the newest step.

    A run that goes on from a checkpoint keeps the rows up to its step, and writes anew what was after it.

    Args:
      config: the configuration.
      rates: the learning rate of each group, as a function of the number of updates applied.

    Attributes:
      wanted: whether there is anything to tell.

    Raises:
      UserError: if TensorBoard's events are wanted, and that package is not installed.
    """

    def __init__(self, config: DeepSpeedConfig, rates: Sequence[optax.Schedule]):
        chief = jax.process_index() == 0
        if config.tensorboard.enabled and importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                f"{config.source}: tensorboard.enabled is True, and tensorboard is not installed; accepted: "
                "pip install tensorboard, or csv_monitor"
            )
        self._every, self._times = config.steps_per_print, config.wall_clock_breakdown
        self._monitors = [
            (monitor, tables)
            for monitor, tables in ((config.csv_monitor, True), (config.tensorboard, False))
            if monitor.enabled
        ]
        self.wanted = chief and bool(self._monitors or self._every or self._times)
        self._rates = rates
        self._files: list[RunLogs] = []
        self._waiting: StepRecord | None = None

    def step(self, record: StepRecord) -> None:
        """Takes the figures of a step, and tells those of the one before: of this one where times are wanted."""
        if self.wanted:
            self.flush()
            self._waiting = record
        if self._times:
            self.flush()

    def flush(self) -> None:
        """Tells what waits."""
        record, self._waiting = self._waiting, None
        if record is None:
            return
        values = {name: float(x) for name, x in jax.device_get(record.metrics).items() if name != "step"}
        seconds = time.perf_counter() - record.began
        rates = [float(rate(int(record.updates_before))) for rate in self._rates]
        values |= {"lr" if i == 0 else f"lr_{i}": rate for i, rate in enumerate(rates)} | {"samples": record.samples}
        if not self._files:
            self._files = [_open(monitor, tables, record.number - 1) for monitor, tables in self._monitors]
        for file in self._files:
            file.write("train", record.number, values)
        if self._every and record.number % self._every == 0:
            told = ", ".join(f"{rate:.3g}" for rate in rates) or "inside of the optimizer"
            print(
                f"step {record.number}  loss {values['loss']:.5g}  learning rate {told}  "
                f"skipped {values['skipped']:.0f}",
                flush=True,
            )
        if self._times:
            print(f"step {record.number}  {1e3 * seconds:.1f} ms", flush=True)

    def close(self) -> None:
        """Tells what waits, and closes the files; a later step opens them again."""
        self.flush()
        for file in self._files:
            file.close()
        self._files = []


def _open(monitor: Monitor, tables: bool, start: int) -> RunLogs:
    directory = Path(monitor.output_path or ".") / monitor.job_name
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return RunLogs(directory, start, tables=tables, events=not tables)
