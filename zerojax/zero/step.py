"""The compiled steps: one program each for training and evaluation."""

import abc
import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.errors import UserError, shown
from zerojax.mesh import data_axes, data_parallel_size
from zerojax.precision import Precision
from zerojax.remat import Policy, Remat
from zerojax.weighted import Weighted
from zerojax.zero.gradients import LocalLoss, local_gradients, local_loss, local_micro_loss
from zerojax.zero.loss_scale import scale_of
from zerojax.zero.stages import Stage
from zerojax.zero.state import Layout, State, check_not_given
from zerojax.zero.streamed import StreamedStep
from zerojax.zero.turns import Turn
from zerojax.zero.update import Gradients, apply_update, metrics_after
from zerojax.zero.uses import Uses

METRICS = ("loss", "grad_norm", "loss_scale", "skipped", "step")
EMULATED_STEPS_IN_FLIGHT = 2
EVALUATION_SALT = 0x65766C  # keeps the randomness of an evaluation apart from the training step's


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a step does: the row of the stage table, the dtypes, and the rest under `Zero`'s names."""

    stage: Stage
    precision: Precision
    micro_batches: int
    clip_norm: float | None
    remat: Remat | Policy | None
    batch_statistics: str


# Around each run of a step: a context made of the step, the layout of its state and its placed batch.
Watch = Callable[["Step", Layout, Any], contextlib.AbstractContextManager[None]]


def unwatched(step: "Step", layout: Layout, batch: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Step(abc.ABC):
    """A compiled function of a state and a batch; compiled once for each layout and shape of batch.

    Attributes:
      settings: of the loss and of the update.
      watched: the context in which it runs.
      uses: how the loss uses the parameters, for each layout that was traced at stages 2 and 3.
      turns: in which turns the update brings offloaded leaves to the device, for each such layout that was traced.
    """

    def __init__(self, loss_fn: Callable[..., Any], settings: Settings, watched: Watch = unwatched):
        if not callable(loss_fn):
            raise UserError(f"loss_fn is {shown(loss_fn)}; accepted: a function of (model, batch, rng)")
        self.loss_fn, self.settings = loss_fn, settings
        self.watched = watched
        self.jitted = functools.cache(self._jit)
        self.uses: dict[Layout, Uses] = {}
        self.turns: dict[Layout, tuple[Turn, ...]] = {}
        self._ran: set[Any] = set()
        self._in_flight: collections.deque[jax.Array] = collections.deque()

    def run(self, state: State, batch: Any) -> Any:
        """All that the compiled function returns."""
        if not isinstance(state, State):
            raise UserError(
                f"the first argument is {shown(state)}; accepted: a state, as zero.init makes, then a batch"
            )
        check_not_given(state)
        layout, placed = state.layout, self.place(state.layout, batch)
        program = layout, tuple((x.shape, x.dtype) for x in jax.tree.leaves(placed))
        with self.watched(self, layout, placed):
            out = self.jitted(layout)(self._given(state), placed)
            if program not in self._ran:  # an allocation that fails may be told only to who waits for the result
                jax.block_until_ready(out)
                self._ran.add(program)
        self._pace(layout, out)
        return out

    def _pace(self, layout: Layout, out: Any) -> None:
        """Lets few steps be in flight on emulated devices, where nothing else does and XLA's collectives lock up when
        many are; accelerators queue steps by themselves, and no call waits there."""
        if layout.mesh.size > 1 and layout.mesh.devices.flat[0].platform == "cpu":
            self._in_flight.append(jax.tree.leaves(out)[-1])
            if len(self._in_flight) > EMULATED_STEPS_IN_FLIGHT:
                jax.block_until_ready(self._in_flight.popleft())

    def lower(self, state: State, batch: Any) -> jax.stages.Lowered:
        """As `jax.jit(...).lower`; state and batch may be of `jax.ShapeDtypeStruct`s."""
        return self.jitted(state.layout).lower(self._given(state), self.place(state.layout, batch))

    def _given(self, state: State) -> State:
        """What the compiled function is given of a state."""
        return state.layout.in_memory(state)

    def local_loss(self, layout: Layout, *, training: bool) -> LocalLoss:
        settings = self.settings
        tell = functools.partial(self.uses.__setitem__, layout)
        return LocalLoss(
            self.loss_fn,
            layout,
            settings.stage,
            settings.precision,
            settings.remat,
            training,
            data_axes(layout.mesh) if settings.batch_statistics == "global" else (),
            tell,
        )

    def place(self, layout: Layout, batch: Any) -> Any:
        """The batch as global arrays, split over the data axes along the first axis; in a multi-process run from each
        process's share."""
        sharding = NamedSharding(layout.mesh, PartitionSpec(data_axes(layout.mesh)))
        processes = len({d.process_index for d in layout.mesh.devices.flat})
        parts = data_parallel_size(layout.mesh) * self.micro_batches
        sizes = set()

        def place_leaf(path: Any, x: Any) -> Any:
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "batch"
            if np.ndim(x) == 0:
                raise UserError(f"batch leaf {name!r} is {shown(x)}; accepted: arrays whose first axis is the batch")
            if isinstance(x, np.ndarray) and x.dtype.kind in "OSUMm":
                raise UserError(f"batch leaf {name!r} has dtype {x.dtype}; accepted: arrays of numbers")
            is_global = isinstance(x, jax.ShapeDtypeStruct) or (
                isinstance(x, jax.Array) and (processes == 1 or not x.is_fully_addressable)
            )
            examples = x.shape[0] if is_global else x.shape[0] * processes
            sizes.add(examples)
            if examples == 0 or examples % parts:
                raise UserError(
                    f"batch leaf {name!r} has {examples} examples over all processes; accepted: a multiple of {parts} "
                    f"({data_parallel_size(layout.mesh)} data-parallel devices x {self.micro_batches} micro-batches)"
                )
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            if is_global:
                return x if x.sharding == sharding else jax.device_put(x, sharding)
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))

        placed = jax.tree_util.tree_map_with_path(place_leaf, batch)
        if len(sizes) != 1:
            raise UserError(f"batch leaves have {sorted(sizes)} examples; accepted: one array or more, all of one size")
        return placed

    def manual(self, layout: Layout, function: Callable[..., Any], wholes: int, out_specs: Any) -> Callable[..., Any]:
        """`function` of (parameters, frozen ones, variables, `wholes` operands that are whole, shard index, batch), as
        one of all but the shard index, manual over the data axes."""
        axes = data_axes(layout.mesh)
        split, whole = PartitionSpec(axes), PartitionSpec()
        index = jnp.arange(data_parallel_size(layout.mesh), dtype=jnp.uint32)
        specs = [[leaf.spec for leaf in leaves] for leaves in (layout.param_leaves, layout.frozen_leaves)]
        mapped = jax.shard_map(
            function,
            mesh=layout.mesh,
            in_specs=(*specs, layout.variable_specs, *[whole] * wholes, split, split),
            out_specs=out_specs,
            axis_names=set(axes),
            check_vma=False,
        )
        return lambda params, frozen, *operands: mapped(
            jax.tree.leaves(params), jax.tree.leaves(frozen), *operands[:-1], index, operands[-1]
        )

    @property
    @abc.abstractmethod
    def micro_batches(self) -> int:
        """The number of parts that a device's rows are computed in."""

    @abc.abstractmethod
    def _jit(self, layout: Layout) -> Any:
        """The jitted function of (state, batch) for a layout."""


class TrainStep(Step):
    """`(state, batch) -> (state, metrics)`. The state given is donated: use the one returned.

    `run` returns each micro-batch's loss beside these, (M,).
    """

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        return self.run(state, batch)[:2]

    def _given(self, state: State) -> State:
        return state

    @property
    def micro_batches(self) -> int:
        return self.settings.micro_batches

    def activations(self, state: State, batch: Any) -> int:
        """Bytes per device that the forward pass of a micro-batch keeps for its backward pass, as traced."""
        told: list[int] = []
        loss = dataclasses.replace(self.local_loss(state.layout, training=True), tell_kept=told.append)
        key, scale = jax.random.key_data(jax.random.key(0)), jnp.ones((), jnp.float32)
        jax.eval_shape(
            self._gradients(state.layout, loss),
            state.params, state.frozen, state.variables, key, scale, self.place(state.layout, batch),
        )  # fmt: skip
        return told[0]

    def _gradients(self, layout: Layout, loss: LocalLoss) -> Callable[..., Any]:
        """`local_gradients` as a function of global arrays."""
        specs = [leaf.spec for leaf in layout.param_leaves]
        whole = PartitionSpec()
        local = functools.partial(local_gradients, loss, self.micro_batches)
        return self.manual(layout, local, 2, (whole, whole, specs, layout.variable_specs))

    def _jit(self, layout: Layout) -> Any:
        gradients_of = self._gradients(layout, self.local_loss(layout, training=True))

        def gradients_in(state: State, batch: Any) -> Gradients:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
            scale = scale_of(self.settings.precision.loss_scale, state.loss_scale)
            losses, aux, gradients, variables = gradients_of(
                state.params, state.frozen, state.variables, jax.random.key_data(key), scale, batch
            )
            total = Weighted(losses.total.sum(), losses.weight.sum())
            inverse = jnp.where(total.weight == 0, 0.0, 1.0 / total.weight)  # a batch of no weight changes nothing
            gradients = [g * inverse.astype(g.dtype) for g in gradients]
            gradients = jax.tree.unflatten(jax.tree.structure(state.params), gradients)
            metrics = metrics_of(total, aux, reserved=METRICS) | {"loss_scale": scale}
            return Gradients(gradients, variables, mean(total), mean(losses), metrics)

        tell = functools.partial(self.turns.__setitem__, layout)
        if layout.uses_files:
            return StreamedStep(layout, gradients_in, self.settings, tell)

        def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array], jax.Array]:
            new = gradients_in(state, batch)
            state, norm = apply_update(layout, state, new.gradients, new.variables, new.loss, self.settings, tell)
            return state, new.metrics | metrics_after(state.step, state.loss_scale, norm), new.losses

        everywhere = NamedSharding(layout.mesh, PartitionSpec())
        return jax.jit(train_step, donate_argnums=0, out_shardings=(layout.shardings, everywhere, everywhere))


class EvalStep(Step):
    """`(state, batch) -> metrics`: the loss and the aux scalars over the batch, with the model in evaluation mode."""

    def __call__(self, state: State, batch: Any) -> dict[str, jax.Array]:
        return self.run(state, batch)

    @property
    def micro_batches(self) -> int:
        return 1

    def _jit(self, layout: Layout) -> Any:
        loss = self.local_loss(layout, training=False)
        losses_of = self.manual(layout, functools.partial(local_loss, loss), 1, PartitionSpec())

        def eval_step(state: State, batch: Any) -> dict[str, jax.Array]:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), EVALUATION_SALT)
            total, aux = losses_of(state.params, state.frozen, state.variables, jax.random.key_data(key), batch)
            return metrics_of(total, aux, reserved=("loss", "weight")) | {"weight": total.weight}

        return jax.jit(eval_step, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))


class LossStep(Step):
    """`(state, batch, i) -> loss`: the loss that a training step would have on `batch` as its micro-batch i."""

    def __call__(self, state: State, batch: Any, i: int) -> jax.Array:
        return self.run(state, {"batch": batch, "i": np.full(jax.tree.leaves(batch)[0].shape[0], i)})

    @property
    def micro_batches(self) -> int:
        return 1

    def _jit(self, layout: Layout) -> Any:
        loss = self.local_loss(layout, training=True)
        local = functools.partial(local_micro_loss, loss, self.settings.micro_batches)
        loss_of = self.manual(layout, local, 2, PartitionSpec())

        def loss_step(state: State, placed: Any) -> jax.Array:
            key = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step))
            number = placed["i"][0]
            return mean(loss_of(state.params, state.frozen, state.variables, key, number, placed["batch"]))

        return jax.jit(loss_step, out_shardings=layout.replicated)


def mean(sums: Weighted) -> jax.Array:
    """Total over weight, elementwise; 0 where nothing weighs."""
    return jnp.where(sums.weight == 0, 0.0, sums.total / jnp.where(sums.weight == 0, 1.0, sums.weight))


def metrics_of(total: Weighted, aux: dict[str, Weighted], reserved: tuple[str, ...]) -> dict[str, jax.Array]:
    taken = sorted(set(aux) & set(reserved))
    if taken:
        raise UserError(f"loss_fn's aux names {taken}, which the step's own metrics are called; accepted: other names")
    return {"loss": mean(total)} | {name: mean(sums) for name, sums in aux.items()}
