"""A training run from its first step to its last: data, steps, logs, validation, checkpoints."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from zerojax.checkpoint import Checkpoints
from zerojax.data import TextDataset, bits_per_byte, entropy_baselines, evaluation_batches, loader
from zerojax.errors import UserError
from zerojax.mesh import as_zero_mesh, data_parallel_size
from zerojax.monitor import RunLogs
from zerojax.monitor.files import replace_text
from zerojax.monitor.progress import Progress
from zerojax.precision import LossScale
from zerojax.zero import EvalStep, State, Zero
from zerojax.zero.loss_scale import ScalerState, check_not_exhausted, copied

STEPS_IN_FLIGHT = 2  # the host prepares a step while the devices compute the one before, and runs no further ahead


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
      step: the last step; `state.step` counts the updates applied.
      validation: figures of the last validation: "loss" in nats per token and, for text, "bits_per_byte"; empty
        without validation data.
      state: the final state.
    """

    step: int
    validation: Mapping[str, float]
    state: State


def train(
    *,
    model: Callable[..., nnx.Module],
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    dataset: TextDataset,
    batch_size: int,
    steps: int,
    run_dir: str,
    zero: Zero | None = None,
    validation: TextDataset | None = None,
    validate_every: int = 500,
    validation_batches: int | None = None,
    save_every: int = 500,
    keep: int = 3,
    seed: int = 0,
    config_text: str | None = None,
) -> Summary:
    """Trains a model; started again with the same run directory, goes on from the last checkpoint.

    Args:
      model: makes the model from `rngs=nnx.Rngs(...)`.
      loss_fn: function of (model, batch, rng), as for `Zero.train_step`.
      optimizer: any optax transformation.
      dataset: the examples, read by `zerojax.data.loader`.
      batch_size: examples in a step's global batch.
      steps: the number of steps of the whole run.
      run_dir: where logs, the configuration and checkpoints go.
      zero: stage, mesh, precision and the rest; `Zero()` by default.
      validation: text to validate on, or `None`.
      validate_every: steps between validations; there is one after the last step too.
      validation_batches: how many batches a validation reads, spread over the text; all of it by default.
      save_every: steps between checkpoints; there is one after the last step too.
      keep: how many checkpoints are kept.
      seed: of parameters, data order and all randomness.
      config_text: the resolved configuration, written beside the logs.

    Returns:
      How the run ended.

    Raises:
      UserError: if an argument is out of its range, or `run_dir` is another model's.
      RunError: if every checkpoint in `run_dir` is damaged, a file cannot be written, or gradients overflow at the
        smallest loss scale.
    """
    zero = zero or Zero()
    counts = {"steps": steps, "validate_every": validate_every, "save_every": save_every, "keep": keep}
    for name, value in (counts | {"validation_batches": validation_batches}).items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; accepted: a positive integer")
    _check_batch_size(batch_size, zero)
    _check_vocabulary(model, dataset)

    def make_model(key: jax.Array) -> nnx.Module:
        return model(rngs=nnx.Rngs(key))

    directory = _run_directory(run_dir)
    chief = jax.process_index() == 0
    with (
        contextlib.closing(loader(dataset, batch_size, seed=seed)) as batches,
        Checkpoints(directory / "checkpoints", keep=keep) as checkpoints,
    ):
        state = _start(zero, make_model, optimizer, seed, checkpoints, batches)
        start = int(state.loss_scale.steps)  # skipped ones too: the data has gone on
        step_fn = zero.train_step(loss_fn)
        validate = _validation(zero.eval_step(loss_fn), validation, batch_size, validation_batches)
        figures: dict[str, float] = {}
        with (
            RunLogs(directory, start) if chief else contextlib.nullcontext() as logs,
            Progress(steps, start, quiet=not chief) as progress,
        ):
            if chief and config_text is not None:
                replace_text(directory / "config.gin", config_text)
            progress.say(_opening(zero, state, steps))
            scaling = zero.policy.loss_scale
            reader = _Metrics(logs, progress, batch_size * dataset.length, scaling, state.loss_scale)
            for step in range(start + 1, steps + 1):
                state, metrics = step_fn(state, next(batches))
                reader.add(step, metrics, state.loss_scale)
                if step % validate_every == 0 or step == steps:
                    reader.drain()
                    figures = validate(state)
                    if figures:
                        progress.say(f"step {step}  validation " + _words(figures))
                        if logs:
                            logs.write("validation", step, figures)
                    reader.restart_clock()
                if step % save_every == 0 or step == steps:
                    reader.drain()  # the logs are never behind a checkpoint
                    checkpoints.save(state, {"data": batches.get_state()})
                    reader.restart_clock()
            if start >= steps:
                progress.say(f"{run_dir} is at step {start} of {steps} already: nothing is left to train")
                figures = validate(state)
            if figures and validation is not None:
                progress.say(_comparison(figures, dataset, validation))
    return Summary(max(start, steps), figures, state)


def _check_batch_size(batch_size: int, zero: Zero) -> None:
    devices = data_parallel_size(as_zero_mesh(zero.mesh))
    if batch_size < 1 or batch_size % (devices * zero.micro_batches):
        raise UserError(
            f"batch_size is {batch_size}; accepted: a multiple of {devices * zero.micro_batches} "
            f"({devices} data-parallel devices x {zero.micro_batches} micro-batches)"
        )


def _check_vocabulary(model: Callable[..., nnx.Module], dataset: TextDataset) -> None:
    """A token beyond the embedding's rows would train to NaN."""
    rows = getattr(nnx.eval_shape(lambda: model(rngs=nnx.Rngs(0))), "vocab_size", None)
    if rows is not None and rows < dataset.tokenizer.vocab_size:
        raise UserError(
            f"the model's vocab_size is {rows}; accepted: {dataset.tokenizer.vocab_size} or more, "
            f"as tokenizer {dataset.tokenizer.name!r} has"
        )


def _run_directory(run_dir: str) -> Path:
    directory = Path(run_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir is {run_dir!r}: {error.strerror}; accepted: a directory, or a path for one") from None
    return directory


def _start(zero: Zero, make_model: Any, optimizer: Any, seed: int, checkpoints: Checkpoints, batches: Any) -> State:
    """The last checkpoint's state, with the data at its position, or a new one."""
    restored = checkpoints.restore_latest(zero.abstract_state(make_model, optimizer))
    if restored is None:
        return zero.init(make_model, optimizer, seed=seed)
    state, extra = restored
    batches.set_state(extra["data"])
    return state


def _validation(
    evaluate: EvalStep, dataset: TextDataset | None, batch_size: int, batches: int | None
) -> Callable[[State], dict[str, float]]:
    """A function of the state that gives the figures over the validation text."""
    if dataset is None:
        return lambda state: {}
    examples = evaluation_batches(dataset, batch_size, batches)

    def validate(state: State) -> dict[str, float]:
        total = weight = 0.0
        for batch in examples:
            metrics = jax.device_get(evaluate(state, batch))
            total += float(metrics["loss"]) * float(metrics["weight"])
            weight += float(metrics["weight"])
        loss = total / weight
        return {"loss": loss, "bits_per_byte": bits_per_byte(loss, dataset.bytes_per_token)}

    return validate


class _Metrics:
    """Brings metrics from the devices to the logs, a step behind, so that the host never waits for the newest."""

    def __init__(
        self, logs: RunLogs | None, progress: Progress, tokens: int, scaling: LossScale | None, scaler: ScalerState
    ):
        self._logs, self._progress, self._tokens = logs, progress, tokens
        self._scaling, self._scaler = scaling, jax.device_get(scaler)
        self._waiting: list[tuple[int, dict[str, jax.Array], ScalerState | None, float | None]] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out of the speed what was not training."""
        self._clock = time.perf_counter()

    def add(self, step: int, metrics: dict[str, jax.Array], scaler: ScalerState) -> None:
        waited = metrics["loss"].is_ready()  # type: ignore[attr-defined]  # as a step does whose state is in files
        ended = time.perf_counter() if waited else None
        self._waiting.append((step, metrics, None if self._scaling is None else copied(scaler), ended))
        if len(self._waiting) >= STEPS_IN_FLIGHT:
            self._read()

    def drain(self) -> None:
        """Waits for every step that was begun."""
        while self._waiting:
            self._read()

    def _read(self) -> None:
        """Raises: RunError: if the step overflowed at the smallest loss scale."""
        step, metrics, scaler, ended = self._waiting.pop(0)
        values = {name: float(x) for name, x in jax.device_get(metrics).items() if name != "step"}
        now = ended or time.perf_counter()
        speed = self._tokens / (now - self._clock)
        self._clock = now
        if self._logs:
            self._logs.write("train", step, {**values, "tokens_per_second": round(speed, 1)})
        self._progress.update(step, values, speed)
        if scaler is not None:
            before, self._scaler = self._scaler, jax.device_get(scaler)
            check_not_exhausted(self._scaling, before, self._scaler)


def _opening(zero: Zero, state: State, steps: int) -> str:
    parameters = sum(leaf.size for leaf in state.layout.param_leaves)
    mesh = " x ".join(f"{name} {size}" for name, size in state.layout.mesh.shape.items())
    begin = int(state.loss_scale.steps)
    resumed = f"going on from step {begin}" if begin else "from the beginning"
    return f"{parameters:,} parameters, stage {zero.stage} on {mesh}, {steps} steps, {resumed}"


def _words(figures: Mapping[str, float]) -> str:
    return f"loss {figures['loss']:.4f}  {figures['bits_per_byte']:.4f} bits per byte"


def _comparison(figures: Mapping[str, float], dataset: TextDataset, validation: TextDataset) -> str:
    baselines = entropy_baselines(dataset.text, validation.text)
    return (
        f"validation: {figures['bits_per_byte']:.3f} bits per byte; counting bytes gives {baselines.unigram:.3f} "
        f"(unigram), counting pairs {baselines.bigram:.3f} (bigram)"
    )
