"""What the engine tells: lines in the terminal, CSV files, TensorBoard's events."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from zerojax.config.deepspeed import DeepSpeedConfig
from zerojax.monitor import RunLogs


class EngineLogs:
    """Written by process 0, a step behind, so that the host does not wait for the newest step.

    Attributes:
      wanted: whether there is anything to tell.
    """

    def __init__(self, config: DeepSpeedConfig):
        chief = jax.process_index() == 0
        self._every, self._times = config.steps_per_print, config.wall_clock_breakdown
        self._files = [
            RunLogs(_directory(monitor), 0, tables=tables, events=not tables)
            for monitor, tables in ((config.csv_monitor, True), (config.tensorboard, False))
            if chief and monitor.enabled
        ]
        self.wanted = chief and bool(self._files or self._every or self._times)
        self._waiting: tuple[Any, ...] | None = None

    def step(
        self, step: int, samples: int, metrics: dict[str, jax.Array], rates: Sequence[float], began: float
    ) -> None:
        """Takes the figures of a step that began at `began` (`time.perf_counter`); tells those of the one before."""
        if self.wanted:
            self.flush()
            self._waiting = step, samples, metrics, rates, began

    def flush(self) -> None:
        """Tells what waits."""
        if self._waiting is None:
            return
        step, samples, metrics, rates, began = self._waiting
        self._waiting = None
        values = {name: float(x) for name, x in jax.device_get(metrics).items() if name != "step"}
        seconds = time.perf_counter() - began
        values |= {"lr" if i == 0 else f"lr_{i}": rate for i, rate in enumerate(rates)} | {"samples": samples}
        for file in self._files:
            file.write("train", step, values)
        if self._every and step % self._every == 0:
            told = ", ".join(f"{rate:.3g}" for rate in rates) or "inside of the optimizer"
            print(f"step {step}  loss {values['loss']:.5g}  learning rate {told}  skipped {values['skipped']:.0f}")
        if self._times:
            print(f"step {step}  {1e3 * seconds:.1f} ms from its start to its figures")

    def close(self) -> None:
        self.flush()
        for file in self._files:
            file.close()


def _directory(monitor: Any) -> Path:
    directory = Path(monitor.output_path or ".") / monitor.job_name
    directory.mkdir(parents=True, exist_ok=True)
    return directory
