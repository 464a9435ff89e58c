"""The engine: DeepSpeed's forward, backward and step, computed by one compiled step of `zerojax.Zero`."""

import atexit
import contextlib
import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.config.deepspeed import DeepSpeedConfig
from zerojax.engine import export, tags
from zerojax.engine.batches import check_alike, check_rows, interleaved, kept, next_of
from zerojax.engine.loader import EpochLoader, endless
from zerojax.engine.logs import EngineLogs
from zerojax.engine.loss import PendingLoss, Place, wait_for_all
from zerojax.engine.models import Source
from zerojax.engine.optimizers import Optimizer
from zerojax.engine.record import StepRecord
from zerojax.engine.schedule import Scheduler
from zerojax.errors import UserError, shown
from zerojax.mesh import data_parallel_size
from zerojax.weighted import Weighted
from zerojax.zero import EvalStep, LossStep, State, TrainStep, Zero
from zerojax.zero.loss_scale import copied, scale_of
from zerojax.zero.step import mean


class Engine:
    """Trains as DeepSpeed's engine does; made by `zerojax.initialize`.

    `engine(batch)` takes one micro-batch of all devices (in a multi-process run this process's share), `backward` its
    loss, and `step` applies the update once every `gradient_accumulation_steps` calls: then the micro-batches go
    through one step of `Zero`, so losses and parameters are those of `Zero` to the last bit.

    Attributes:
      config: the resolved configuration.
      zero: the settings of the step, with the accumulation steps as micro-batches.
      optimizer: the optax transformation.
      lr_scheduler: the `Scheduler`, or `None` where the learning rate is not known.
      training_dataloader: of the training data, or `None`.
      global_steps: steps taken, skipped ones too.
      global_samples: rows of these steps on all devices.
      micro_steps: micro-batches that `step` or `train_batch` has ended.
    """

    def __init__(
        self,
        *,
        config: DeepSpeedConfig,
        zero: Zero,
        model: Source,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        loader: EpochLoader | None,
        seed: int,
    ):
        self.config, self.zero, self.optimizer = config, zero, optimizer.transformation
        self.training_dataloader = loader
        self.lr_scheduler = Scheduler(optimizer.rates, self._updates) if optimizer.rates else None
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._logs = EngineLogs(config, optimizer.rates)
        self._states = itertools.count()
        self.state = model.init(zero, self.optimizer, seed)
        self._micro_batch_size = config.micro_batch_size
        self._make_model, self._loss_fn, self._groups = model.make_model, loss_fn, optimizer
        self._train_steps: dict[int, TrainStep] = {}
        self._training = True
        self._in_no_sync = False
        self._waiting: list[tuple[Any, PendingLoss]] = []  # forward and backward were called
        self._ended = 0  # the number of these that step was called for
        self._last: StepRecord | None = None
        self._applied = False
        self._data: Iterator[Any] | None = None
        if self._logs.wanted:  # which are a step behind
            atexit.register(self._logs.close)

    @property
    def state(self) -> State:
        """The training state. Another one of the same model may be put in its place between two steps."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state, self._state_number = state, next(self._states)
        self._updates_before: jax.Array | None = None  # known without waiting, where a step has made the state

    # The loop.

    def __call__(self, *batch: Any) -> Any:
        if len(batch) != 1:
            raise UserError(f"engine was called with {len(batch)} arguments; accepted: one batch, a tuple of its parts")
        return self.forward(*batch)

    def forward(self, batch: Any) -> Any:
        """The loss of one micro-batch: in training a `PendingLoss`, in evaluation a scalar on the device.

        Raises:
          UserError: if in training the batch has not the rows of a micro-batch.
        """
        if not self._training:
            return self._eval_step(self.state, batch)["loss"]
        self._check_rows(batch)
        return PendingLoss(self, batch, self._next_place, self._loss_alone)

    def backward(self, loss: PendingLoss) -> PendingLoss:
        """Takes the gradient of a loss that `engine(batch)` returned into the step to come.

        Raises:
          UserError: for anything else: a loss in JAX carries no graph that gradients could be taken through.
        """
        if not isinstance(loss, PendingLoss) or loss.owner is not self:
            given = "a loss of another engine" if isinstance(loss, PendingLoss) else shown(loss)
            raise UserError(
                f"backward was given {given}; "
                "accepted: the loss that this engine's forward returned, as it is (scale or add losses in loss_fn)"
            )
        if len(self._waiting) > self._ended:
            raise UserError(
                "backward was called twice before step; accepted: forward, backward, step for each micro-batch"
            )
        first = self._waiting[0][0] if self._waiting else None
        self._waiting.append((loss.take(self._next_place, functools.partial(self._as_next, first)), loss))
        return loss

    def step(self) -> None:
        """Ends a micro-batch; at the boundary applies the update.

        Raises:
          UserError: if there was no backward before, or inside of `no_sync`.
          RunError: if the step before overflowed with the loss scale at its minimum.
        """
        if self._in_no_sync:
            raise UserError("step was called inside of no_sync; accepted: outside of it")
        if len(self._waiting) == self._ended:
            raise UserError("step was called without a backward before it; accepted: forward, backward, step")
        before = self._last
        if self.is_gradient_accumulation_boundary():
            batches, losses = zip(*self._waiting, strict=True)
            values = self._update(batches)
            for i, loss in enumerate(losses):
                loss.settle(values, i)
            self._waiting, self._ended = [], 0
        else:
            self._ended += 1
            self._applied = False
        self.micro_steps += 1
        if before is not self._last and before is not None:
            before.check()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> jax.Array:
        """A whole step over the next `gradient_accumulation_steps` micro-batches; returns their mean loss.

        Args:
          data_iter: an iterator over micro-batches; by default over the training data, epoch after epoch.

        Raises:
          UserError: if there is no data, or it ends within the step.
          RunError: as `step`.
        """
        if self._waiting:
            raise UserError("train_batch was called between backward and the boundary; accepted: after a whole step")
        if self._in_no_sync:
            raise UserError("train_batch was called inside of no_sync; accepted: outside of it")
        if data_iter is None:
            if self.training_dataloader is None:
                raise UserError("train_batch has no data; accepted: an iterator, or initialize(..., training_data=...)")
            data_iter = self._data = self._data or endless(self.training_dataloader)
        batches: list[Any] = []
        for batch in next_of(data_iter, self.gradient_accumulation_steps()):
            self._check_rows(batch)
            batches.append(self._as_next(batches[0] if batches else None, batch))
        before = self._last
        self._update(batches)
        self.micro_steps += len(batches)
        if before is not None:
            before.check()
        assert self._last is not None
        return self._last.metrics["loss"]

    def eval_batch(self, data: Any) -> jax.Array:
        """The loss in evaluation mode: of a batch, or the mean over the next micro-batches of an iterator."""
        if not isinstance(data, Iterator):
            return self._eval_step(self.state, data)["loss"]
        batches = next_of(data, self.gradient_accumulation_steps())
        metrics = [self._eval_step(self.state, batch) for batch in batches]
        losses, weights = (jnp.stack([m[name] for m in metrics]) for name in ("loss", "weight"))
        return mean(Weighted(jnp.sum(losses * weights), jnp.sum(weights)))

    def train(self, mode: bool = True) -> "Engine":
        """Training mode: `engine(batch)` prepares a step. As torch's `train`."""
        self._training = mode
        return self

    def eval(self) -> "Engine":
        """Evaluation mode: `engine(batch)` computes the loss with the model in evaluation mode."""
        return self.train(False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside reduce nothing. That is so at stages 0 and 1 anyway: they reduce once a step.

        Raises:
          UserError: at stages 2 and 3, whose gradients are reduced where they arise, and inside of another `no_sync`.
        """
        if self.zero.stage >= 2:
            raise UserError(f"no_sync was called at stage {self.zero.stage}; accepted: stages 0 and 1")
        if self._in_no_sync:
            raise UserError("no_sync was called inside of no_sync; accepted: one at a time")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    # Where the accumulation stands.

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` applies the update."""
        return self._ended == self.gradient_accumulation_steps() - 1

    def gradient_accumulation_steps(self) -> int:
        return self.zero.micro_batches

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch_size

    def train_batch_size(self) -> int:
        """Rows of a step on all devices."""
        return self._micro_batch_size * self.zero.micro_batches * self._devices

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of accumulation steps, with the micro-batch as it is.

        Raises:
          UserError: between two boundaries, or if the micro-batches of all devices do not divide it.
        """
        rows = self._micro_batch_size * self._devices
        self._check_between_steps("set_train_batch_size")
        _check_positive("train_batch_size", train_batch_size)
        if train_batch_size % rows:
            raise UserError(
                f"train_batch_size is {train_batch_size}; accepted: a multiple of {rows} "
                f"({self._micro_batch_size} rows x {self._devices} devices)"
            )
        self.zero = dataclasses.replace(self.zero, micro_batches=train_batch_size // rows)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of rows in a device's micro-batch, with the accumulation steps as they are.

        Raises:
          UserError: between two boundaries, or if the training data has fewer rows than such a micro-batch.
        """
        self._check_between_steps("set_train_micro_batch_size")
        _check_positive("micro_batch_size", micro_batch_size)
        if self.training_dataloader is not None:
            self.training_dataloader.set_batch_size(micro_batch_size * self._devices)
        self._micro_batch_size = micro_batch_size

    # What the last step was.

    def get_lr(self) -> list[float]:
        """The learning rate of each group of parameters that the next update uses.

        Raises:
          UserError: if optimizer and schedule were given as one optax transformation, which does not tell it.
        """
        if self.lr_scheduler is None:
            raise UserError(
                "the learning rate is inside of the optimizer that was given; accepted: initialize(..., "
                "lr_scheduler=...) with the schedule it was made with"
            )
        return self.lr_scheduler.get_lr()

    def get_mom(self) -> list[Any]:
        """The momentum, or the two betas, of each group that the next update uses; 0 of an optimizer without.

        Raises:
          UserError: if an optax transformation was given, which does not tell it.
        """
        if not self._groups.momenta:
            raise UserError(
                "the momentum is inside of the optimizer that was given; accepted: an optimizer of the configuration"
            )
        return [momentum(self._updates()) for momentum in self._groups.momenta]

    def get_type(self) -> list[str]:
        """The optimizer's name in the configuration, for each group; of one that was given, none."""
        return list(self._groups.types)

    def get_global_grad_norm(self) -> float | None:
        """The gradients' L2 norm of the last step, unscaled and before clipping; `None` before the first."""
        return None if self._last is None else float(self._last.metrics["grad_norm"])

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the parameters: not between boundaries, and not where it overflowed."""
        return self._applied and self._last is not None and self._last.applied

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing since their gradients were not finite."""
        return int(self.state.loss_scale.skipped)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without scaling."""
        return float(scale_of(self.zero.policy.loss_scale, jax.device_get(self.state.loss_scale)))

    def zero_optimization_stage(self) -> int:
        return self.zero.stage

    def module_state_dict(self) -> dict[str, np.ndarray]:
        """Every parameter and carried array, whole and in the model's own dtype, by path ("blocks/mlp/up/kernel")."""
        return export.state_dict(self.state)

    @property
    def train_step(self) -> TrainStep:
        """The step that `Zero` compiles, which takes the micro-batches as one batch; `zero.report` asks for it."""
        count = self.zero.micro_batches
        if count not in self._train_steps:
            self._train_steps[count] = self.zero.train_step(self._loss_fn)
        return self._train_steps[count]

    @property
    def module(self) -> Any:
        """The whole model, of the kind it was made as."""
        return self.zero.gather(self.state)

    # Files.

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves `save_dir`/`tag` and, complete, names it in `save_dir`/latest; every process calls it.

        With the state go the counts of steps and the place in `training_dataloader`.

        Args:
          save_dir: a directory, shared by all processes.
          tag: "global_step" and the step's number by default; what had that name before is replaced.
          client_state: a dict as `json.dumps` writes it, given back by `load_checkpoint`.
          save_latest: whether `load_checkpoint` without a tag finds it.
          exclude_frozen_parameters: whether parameters that are not trained are left out.

        Raises:
          UserError: if `save_dir` is empty, or between two boundaries.
          CheckpointError: if it cannot be written.
        """
        self._check_between_steps("save_checkpoint")
        self._logs.flush()
        loader = self.training_dataloader
        progress = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.micro_steps,
            "loader": None if loader is None else list(loader.position),
        }
        tags.save_tag(
            save_dir,
            f"global_step{self.global_steps}" if tag is None else tag,
            self.state,
            {"client_state": dict(client_state or {}), "engine": progress},
            latest=save_latest,
            frozen=not exclude_frozen_parameters,
            validation=self.config.tag_validation,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Takes up a checkpoint of any stage, mesh, precision and number of processes; every process calls it.

        The next iteration over `training_dataloader` begins where the checkpoint's run had come to.

        Args:
          load_dir: as `save_dir`.
          tag: the one named in `load_dir`/latest by default.
          load_module_strict: True; names always have to match.
          load_optimizer_states: whether the optimizer's state, the schedule's position and the loss scale are taken
            too; without, the checkpoint may be of another optimizer.
          load_lr_scheduler_states: as `load_optimizer_states`, whose part the schedule's position is.
          load_module_only: whether nothing but parameters and variables is taken.

        Returns:
          The checkpoint's path and its `client_state`; `(None, None)`, with a warning, where nothing was ever saved.

        Raises:
          UserError: if there is no such tag, or it is of another model.
          CheckpointError: if it is damaged.
        """
        if not load_module_strict:
            raise UserError("load_module_strict is False; accepted: True, the names of a checkpoint have to match")
        if load_optimizer_states and not load_lr_scheduler_states and not load_module_only:
            raise UserError(
                "load_lr_scheduler_states is False beside load_optimizer_states True; accepted: both or neither, the "
                "schedule's position is in the optimizer's state"
            )
        path = tags.find_tag(load_dir, tag)
        if path is None:
            warnings.warn(f"{load_dir} has no file named latest: no checkpoint was loaded", stacklevel=2)
            return None, None
        with_optimizer = load_optimizer_states and not load_module_only
        restored, extra = tags.load_tag(
            path, self.zero, self._make_model, self.optimizer, self.state.frozen, with_optimizer
        )
        kept_fields: tuple[str, ...] = ()
        if load_module_only:
            kept_fields = "opt_state", "step", "loss_scale", "rng"
        elif not load_optimizer_states:
            kept_fields = "opt_state", "step", "loss_scale"
        self._logs.close()  # what the run tells from here on follows the checkpoint's step
        kept = {name: getattr(self.state, name) for name in (*kept_fields, "layout")}  # for which steps are compiled
        self.state = dataclasses.replace(restored, **kept)
        self._waiting, self._ended = [], 0
        self._last, self._applied = None, False
        if not load_module_only:
            progress = extra["engine"]
            self.global_steps = progress["global_steps"]
            self.global_samples = progress["global_samples"]
            self.micro_steps = progress["micro_steps"]
            if self.training_dataloader is not None and progress["loader"] is not None:
                self.training_dataloader.seek(*progress["loader"])
                self._data = None
        return str(path), extra["client_state"]

    def save_16bit_model(self, save_dir: str, save_filename: str = "model.safetensors") -> bool:
        """Writes parameters and carried arrays as one safetensors file, at any stage; every process calls it.

        Floating arrays are in the compute dtype if that has 16 bits, else in bfloat16, under their paths with dots.

        Raises:
          UserError: if a name is empty.
          CheckpointError: if it cannot be written.
        """
        compute = self.zero.policy.compute
        export.save_16bit(save_dir, save_filename, self.state, compute if compute.itemsize == 2 else jnp.bfloat16)
        return True

    def destroy(self) -> None:
        """Tells what the logs hold back, and closes them."""
        atexit.unregister(self._logs.close)
        self._logs.close()

    # Inside.

    @functools.cached_property
    def _devices(self) -> int:
        return data_parallel_size(self.state.layout.mesh)

    @functools.cached_property
    def _eval_step(self) -> EvalStep:
        return self.zero.eval_step(self._loss_fn)

    @functools.cached_property
    def _loss_step(self) -> LossStep:
        return self.zero.loss_step(self._loss_fn)

    def _updates(self) -> int:
        return int(self.state.step)

    @property
    def _next_place(self) -> Place:
        return Place(self._state_number, len(self._waiting))

    def _check_between_steps(self, method: str) -> None:
        if self._waiting:
            raise UserError(f"{method} was called between two boundaries; accepted: after a whole step")

    def _check_rows(self, batch: Any) -> None:
        check_rows(batch, self._micro_batch_size, self.state.layout.mesh)

    def _as_next(self, first: Any, batch: Any) -> Any:
        """A micro-batch as it is kept until its step; `first` is the step's first one, or `None`."""
        if self.gradient_accumulation_steps() == 1:
            return batch
        batch = kept(batch)
        if first is not None:
            check_alike(first, batch)
        return batch

    def _loss_alone(self, batch: Any, place: Place) -> jax.Array:
        """The loss of a micro-batch whose step is to come."""
        if place.state != self._state_number:
            raise UserError(
                "a loss was asked for when the parameters had changed, and was not part of the step that changed them; "
                "accepted: ask for it before, or give it to backward"
            )
        wait_for_all(place)
        return self._loss_step(self.state, batch, place.number)

    def _update(self, batches: Sequence[Any]) -> jax.Array:
        """One step over micro-batches; returns their losses, (M,)."""
        step, batch = self.train_step, interleaved(batches)
        scaling = self.zero.policy.loss_scale
        scaler = None if scaling is None else copied(self.state.loss_scale)
        before = self._updates() if self._updates_before is None else self._updates_before
        began = time.perf_counter()
        self.state, metrics, losses = step.run(self.state, batch)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        scalers = None if scaler is None else (scaler, copied(self.state.loss_scale))
        self._last = StepRecord(self.global_steps, self.global_samples, before, metrics, scaling, scalers, began)
        self._updates_before, self._applied = metrics["step"], True
        self._logs.step(self._last)
        return losses


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} is {shown(value)}; accepted: a positive integer")
