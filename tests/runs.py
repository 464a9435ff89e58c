"""A tiny run through the command, in this process or in others, and what it leaves in its directory."""

import csv
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from zerojax import Zero, cli
from zerojax.checkpoint import Checkpoints
from zerojax.models.gpt import GPT

ROOT = Path(__file__).parents[1]
TIMEOUT = 240

# Sizes that 8 devices do not divide, dropout, and a learning rate that does not depend on the number of steps.
CONFIG = f"""
include "{ROOT}/configs/base.gin"
LENGTH = 16
train.steps = 24
train.batch_size = 16
train.validate_every = 6
train.validation_batches = 2
train.save_every = 8
text_dataset.source = "pydoc"
GPT.vocab_size = 256
GPT.dim = 36
GPT.layers = 2
GPT.heads = 2
GPT.mlp_dim = 100
GPT.dropout = 0.1
optax.adamw.learning_rate = 1e-3
Zero.min_shard_size = 64
"""


def write_config(directory: Path, text: str = "") -> Path:
    """The tiny configuration with `text` after it, in a file."""
    path = directory / "tiny.gin"
    path.write_text(CONFIG + text)
    return path


def arguments(config: Path, run_dir: Path, *settings: str) -> list[str]:
    """The command's arguments; `settings` are bindings over the configuration's."""
    return ["train", str(config), "--run-dir", str(run_dir), *(f"--set={binding}" for binding in settings)]


def run(config: Path, run_dir: Path, *settings: str) -> int:
    """The exit code of the command in this process, on its eight devices."""
    return cli.main(arguments(config, run_dir, *settings))


def start(command: Sequence[str], devices: int) -> "subprocess.Popen[str]":
    """A Python process of its own with so many emulated devices."""
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "host_platform_device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    environ = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(processes: Sequence["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each process; none outlives this."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def run_alone(config: Path, run_dir: Path, *settings: str, devices: int) -> tuple[int, str, str]:
    """The command in one other process."""
    return finish([start(["-m", "zerojax.cli", *arguments(config, run_dir, *settings)], devices)])[0]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def table(path: Path) -> dict[str, list[float]]:
    """The columns of a CSV file, but for the speed, which no two runs share."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "tokens_per_second"}


def model(rngs: nnx.Rngs, dropout: float = 0.1) -> GPT:
    """The tiny configuration's model."""
    return GPT(
        vocab_size=256, dim=36, layers=2, heads=2, max_length=16, mlp_dim=100, dropout=dropout, rngs=rngs
    )


def make_model(key: jax.Array) -> GPT:
    return model(nnx.Rngs(key))


OPTIMIZER = optax.adamw(1e-3, b2=0.95, weight_decay=0.1)


def last_state(run_dir: Path, zero: Zero):
    """State and extra of a run's last checkpoint."""
    return Checkpoints(run_dir / "checkpoints").restore_latest(zero.abstract_state(make_model, OPTIMIZER))


def assert_same_arrays(got, want) -> None:
    """Every leaf of two trees equal bit for bit."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def events(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every scalar, as TensorBoard's own reader finds them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
