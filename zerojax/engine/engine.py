"""The engine: DeepSpeed's forward, backward and step, computed by one compiled step of `zerojax.Zero`."""

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.config.deepspeed import DeepSpeedConfig
from zerojax.engine import files
from zerojax.engine.loader import endless
from zerojax.engine.logs import EngineLogs
from zerojax.engine.loss import PendingLoss
from zerojax.engine.schedule import Scheduler
from zerojax.errors import RunError, UserError, shown
from zerojax.mesh import data_parallel_size
from zerojax.zero import EvalStep, LossStep, State, TrainStep, Zero


class Engine:
    """Trains as DeepSpeed's engine does; made by `zerojax.initialize`.

    `engine(batch)` takes one micro-batch of all devices (in a multi-process run this process's share), `backward` its
    loss, and `step` applies the update once every `gradient_accumulation_steps` calls: then the micro-batches go
    through one step of `Zero`, so losses and parameters are those of `Zero` to the last bit.

    Attributes:
      config: the resolved configuration.
      zero: the settings of the step, with the accumulation steps as micro-batches.
      state: the training state.
      optimizer: the optax transformation.
      lr_scheduler: the `Scheduler`, or `None` where the learning rate is not known.
      training_dataloader: of the training data, or `None`.
      global_steps: steps taken, skipped ones too.
      global_samples: rows of these steps on all devices.
      micro_steps: calls of `step`.
    """

    def __init__(
        self,
        *,
        config: DeepSpeedConfig,
        zero: Zero,
        make_model: Callable[[jax.Array], Any],
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        schedules: Sequence[optax.Schedule],
        momentum: Sequence[Callable[[int], Any]],
        loader: Any,
        seed: int,
    ):
        self.config, self.zero, self.optimizer = config, zero, optimizer
        self.training_dataloader = loader
        self.state: State = zero.init(make_model, optimizer, seed)
        self.lr_scheduler = Scheduler(schedules, self._updates) if schedules else None
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._micro_batch_size = config.micro_batch_size
        self._make_model, self._loss_fn, self._momentum = make_model, loss_fn, tuple(momentum)
        self._training = True
        self._in_no_sync = False
        self._waiting: list[tuple[Any, PendingLoss]] = []  # forward and backward were called
        self._metrics: dict[str, jax.Array] | None = None
        self._skipped_before: jax.Array | int = 0
        self._applied = False
        self._data: Iterator[Any] | None = None
        self._logs = EngineLogs(config)

    # The loop.

    def __call__(self, batch: Any) -> Any:
        return self.forward(batch)

    def forward(self, batch: Any) -> Any:
        """The loss of one micro-batch: in training a `PendingLoss`, in evaluation a scalar on the device."""
        self._check_rows(batch)
        if not self._training:
            return self._eval_step(self.state, batch)["loss"]
        index = len(self._waiting)
        return PendingLoss(self, batch, lambda batch: self._loss_step(self.state, batch, index))

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
        if len(self._waiting) > self.micro_steps % self.gradient_accumulation_steps():
            raise UserError(
                "backward was called twice before step; accepted: forward, backward, step for each micro-batch"
            )
        self._waiting.append((loss.take_batch(), loss))
        return loss

    def step(self) -> None:
        """Ends a micro-batch; at the boundary applies the update.

        Raises:
          UserError: if there was no backward before, or inside of `no_sync`.
          RunError: if the loss scale was at its minimum when another step overflowed.
        """
        if self._in_no_sync:
            raise UserError("step was called inside of no_sync; accepted: outside of it")
        done, accumulation = len(self._waiting), self.gradient_accumulation_steps()
        if done != self.micro_steps % accumulation + 1:
            raise UserError("step was called without a backward before it; accepted: forward, backward, step")
        at_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        if at_boundary:
            batches, losses = zip(*self._waiting, strict=True)
            self._waiting = []
            values = self._update(batches)
            for i, loss in enumerate(losses):
                loss.settle(functools.partial(_entry, values, i))

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> jax.Array:
        """A whole step over the next `gradient_accumulation_steps` micro-batches; returns their mean loss.

        Args:
          data_iter: an iterator over micro-batches; by default over the training data, epoch after epoch.

        Raises:
          UserError: if there is no data, or it ends within the step.
        """
        if self._waiting:
            raise UserError("train_batch was called between backward and the boundary; accepted: after a whole step")
        if data_iter is None:
            if self.training_dataloader is None:
                raise UserError("train_batch has no data; accepted: an iterator, or initialize(..., training_data=...)")
            data_iter = self._data = self._data or endless(self.training_dataloader)
        n = self.gradient_accumulation_steps()
        batches = [batch for _, batch in zip(range(n), data_iter, strict=False)]
        if len(batches) < n:
            raise UserError(f"the data ended after {len(batches)} of a step's {n} micro-batches; accepted: {n}")
        for batch in batches:
            self._check_rows(batch)
        self.micro_steps += n
        self._update(batches)
        assert self._metrics is not None
        return self._metrics["loss"]

    def eval_batch(self, data: Any) -> jax.Array:
        """The loss in evaluation mode: of a batch, or the mean over the next micro-batches of an iterator."""
        if not isinstance(data, Iterator):
            return self._eval_step(self.state, data)["loss"]
        n = self.gradient_accumulation_steps()
        metrics = [self._eval_step(self.state, batch) for _, batch in zip(range(n), data, strict=False)]
        if len(metrics) < n:
            raise UserError(f"the data ended after {len(metrics)} of {n} micro-batches; accepted: {n}")
        losses, weights = (jnp.stack([m[name] for m in metrics]) for name in ("loss", "weight"))
        return jnp.sum(losses * weights) / jnp.sum(weights)

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
        return self.micro_steps % self.gradient_accumulation_steps() == self.gradient_accumulation_steps() - 1

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
        if self._waiting:
            raise UserError("set_train_batch_size was called between two boundaries; accepted: after a whole step")
        if isinstance(train_batch_size, bool) or not isinstance(train_batch_size, int) or train_batch_size < 1:
            raise UserError(f"train_batch_size is {shown(train_batch_size)}; accepted: a positive integer")
        if train_batch_size % rows:
            raise UserError(
                f"train_batch_size is {train_batch_size}; accepted: a multiple of {rows} "
                f"({self._micro_batch_size} rows x {self._devices} devices)"
            )
        self.zero = dataclasses.replace(self.zero, micro_batches=train_batch_size // rows)
        self.micro_steps = self.global_steps * self.zero.micro_batches

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of rows in a device's micro-batch, with the accumulation steps as they are."""
        if self._waiting:
            raise UserError(
                "set_train_micro_batch_size was called between two boundaries; accepted: after a whole step"
            )
        if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise UserError(f"micro_batch_size is {shown(micro_batch_size)}; accepted: a positive integer")
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
        """The momentum, or the two betas, of each group that the next update uses."""
        return [momentum(self._updates()) for momentum in self._momentum]

    def get_type(self) -> list[str]:
        """The optimizer's name in the configuration."""
        return [] if self.config.optimizer is None else [self.config.optimizer.type]

    def get_global_grad_norm(self) -> float | None:
        """The gradients' L2 norm of the last step, unscaled and before clipping; `None` before the first."""
        return None if self._metrics is None else float(self._metrics["grad_norm"])

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the parameters: not between boundaries, and not where it overflowed."""
        return self._applied and self.skipped_steps == int(self._skipped_before)

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing since their gradients were not finite."""
        return int(self.state.loss_scale.skipped)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without scaling."""
        from zerojax.zero.loss_scale import scale_of

        return float(scale_of(self.zero.policy.loss_scale, self.state.loss_scale))

    def zero_optimization_stage(self) -> int:
        return self.zero.stage

    def module_state_dict(self) -> dict[str, np.ndarray]:
        """Every parameter, whole and in the model's own dtype, by its path ("blocks/mlp/up/kernel")."""
        return dict(files.whole_leaves(self.state))

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
        if self._waiting:
            raise UserError("save_checkpoint was called between two boundaries; accepted: after a whole step")
        self._logs.flush()
        files.save_tag(
            save_dir,
            tag if tag is not None else f"global_step{self.global_steps}",
            self.state,
            {"client_state": dict(client_state or {}), "engine": self._counters()},
            latest=save_latest,
            frozen=not exclude_frozen_parameters,
            validation=self.config.tag_validation,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Takes up a checkpoint of any stage, mesh, precision and number of processes.

        Args:
          load_dir: as `save_dir`.
          tag: the one named in `load_dir`/latest by default.
          load_optimizer_states: whether the optimizer's state, with it the schedule's position, is taken too.
          load_module_only: whether nothing but parameters and variables is taken.

        Returns:
          The checkpoint's path and its `client_state`; `(None, None)`, with a warning, where nothing was ever saved.

        Raises:
          UserError: if there is no such tag, or it is of another model.
          CheckpointError: if it is damaged.
        """
        path = files.find_tag(load_dir, tag)
        if path is None:
            warnings.warn(f"{load_dir} has no file named latest: no checkpoint was loaded", stacklevel=2)
            return None, None
        restored, extra = files.load_tag(path, self.zero, self._make_model, self.optimizer, self.state.frozen)
        kept: dict[str, Any] = {}
        if load_module_only or not load_optimizer_states:
            kept["opt_state"] = self.state.opt_state
        if load_module_only:
            kept |= {name: getattr(self.state, name) for name in ("step", "rng", "loss_scale")}
        self.state = dataclasses.replace(restored, **kept)
        self._waiting = []
        if not load_module_only:
            for name, value in extra["engine"].items():
                setattr(self, name, value)
            self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        return str(path), extra["client_state"]

    def save_16bit_model(self, save_dir: str, save_filename: str = "model.safetensors") -> bool:
        """Writes the parameters in 16 bit, in the compute dtype or bf16, as one safetensors file, at any stage."""
        compute = self.zero.policy.compute
        files.save_16bit(save_dir, save_filename, self.state, compute if compute.itemsize == 2 else "bfloat16")
        return True

    def destroy(self) -> None:
        """Closes the logs."""
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

    @functools.cache  # noqa: B019  # an engine lives as long as its run
    def _train_step(self, micro_batches: int) -> TrainStep:
        return dataclasses.replace(self.zero, micro_batches=micro_batches).train_step(self._loss_fn)

    def _updates(self) -> int:
        return int(self.state.step)

    def _counters(self) -> dict[str, int]:
        return {"global_steps": self.global_steps, "global_samples": self.global_samples}

    def _check_rows(self, batch: Any) -> None:
        wanted = self._micro_batch_size * self._devices // jax.process_count()
        rows = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
        if rows != {wanted}:
            raise UserError(
                f"a micro-batch has {' or '.join(map(str, sorted(rows))) or 'no'} rows in this process; accepted: "
                f"{wanted} ({self._micro_batch_size} x {self._devices} devices"
                + (f" / {jax.process_count()} processes)" if jax.process_count() > 1 else ")")
            )

    def _update(self, batches: Sequence[Any]) -> jax.Array:
        """One step over micro-batches; returns their losses, (M,)."""
        self._check_scale()
        step = self._train_step(len(batches))
        self._skipped_before = 0 if self._metrics is None else self._metrics["skipped"]
        rate = self.lr_scheduler.get_lr() if self.lr_scheduler is not None and self._logs.wanted else []
        began = time.perf_counter()
        self.state, self._metrics, losses = step.run(self.state, interleaved(batches))
        self._applied = True
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._logs.step(self.global_steps, self.global_samples, self._metrics, rate, began)
        return losses

    def _check_scale(self) -> None:
        """Stops a run whose last step overflowed at the smallest loss scale."""
        policy = self.zero.policy.loss_scale
        if policy is None or policy.static is not None or self._metrics is None:
            return
        overflowed = int(self._metrics["skipped"]) > int(self._skipped_before)
        if (
            overflowed
            and float(self._metrics["loss_scale"]) <= policy.minimum
            and int(self.state.loss_scale.hysteresis) == 1
        ):
            raise RunError(
                f"step {self.global_steps} overflowed at the smallest loss scale, {policy.minimum:g}: gradients are "
                "not finite; lower the learning rate, or use bf16"
            )


def interleaved(batches: Sequence[Any]) -> Any:
    """Micro-batches as the one batch whose every M-th row, from row i on, is micro-batch i.

    >>> interleaved([np.array([1, 2]), np.array([5, 6])]).tolist()
    [1, 5, 2, 6]
    """
    if len(batches) == 1:
        return batches[0]
    join = lambda *xs: np.stack([np.asarray(x) for x in xs], axis=1).reshape(-1, *np.shape(xs[0])[1:])
    return jax.tree.map(join, *batches)


def _entry(values: jax.Array, i: int) -> jax.Array:
    return values[i]
