"""`Zero`: the settings of sharded training, and what they make."""

import contextlib
import dataclasses
import functools
import numbers
import os
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.adapters import Adapter, take_apart
from zerojax.errors import UserError, shown
from zerojax.mesh import as_zero_mesh
from zerojax.paths import require_matches
from zerojax.precision import Precision
from zerojax.remat import Policy, Remat
from zerojax.zero.disk import opened
from zerojax.zero.loss_scale import initial_state
from zerojax.zero.notes import leaf_notes
from zerojax.zero.offload import names_of, path_of
from zerojax.zero.out_of_memory import explained, init_details, step_details
from zerojax.zero.partition import Leaf
from zerojax.zero.placement import Placement
from zerojax.zero.report import Report, make_report
from zerojax.zero.stages import Stage, stage_of
from zerojax.zero.state import Layout, State
from zerojax.zero.step import EvalStep, LossStep, Settings, Step, TrainStep
from zerojax.zero.streamed import new_opt_state
from zerojax.zero.trainable import chosen, divide
from zerojax.zero.verify import Verification, verify

TRAINING_SALT = 0x7A65726F  # keeps the randomness of training apart from the initialisation's


@dataclasses.dataclass(frozen=True)
class Zero:
    """Settings of training whose parameters, gradients and optimizer state are partitioned over devices.

    Attributes:
      stage: 0 to 3, a row of the stage table (`zerojax.zero.stages`).
      mesh: the devices, as `make_mesh` makes them; all of them on one "data" axis by default. Partitions lie along
        "data", copies of them along "replica", further axes are the model's.
      precision: "fp32", "bf16", "fp16", a list such as "bf16,reduce=float32" (see `Precision.of`), or a `Precision`.
      micro_batches: number of parts that each device's rows of a batch are computed in, their gradients accumulated.
      clip_norm: the global L2 norm that gradients are scaled down to, or `None`. The reported norm is the one before.
      remat: what the backward pass computes again instead of keeping it: "full", "dots", "offload" or "none", or a
        `Remat`, for each block of the model by itself; a policy of `jax.checkpoint_policies`, for the whole loss; or
        `None` to leave that to the model.
      min_shard_size: leaves with fewer elements stay whole on every device.
      offload: what lies in pinned host memory between steps: "optimizer", the optimizer's state; "params", the master
        parameters and those that are not trained; one of them, or a tuple. Leaves of fewer than `min_shard_size`
        elements stay on the device. A step brings it to the device part by part, and computes the same.
      offload_path: a directory; what `offload` names as "optimizer" lies in files there instead, each process's shards
        in its own, for a state larger than host memory. They are scratch, no checkpoint: what they hold ends with the
        process. Parameters lie in no files.
      trainable: which parameters are trained: a function of a parameter's path ("blocks/mlp/up/kernel") and the
        parameter, or for an NNX model an NNX filter such as `nnx.LoRAParam`; all of them by default. The others have no
        gradient, no optimizer state and no master copy, keep their dtype, and lie in shards like the rest.
      per_example: which variables have a row for each example of a batch, such as what a recurrent model remembers of
        each row from step to step; chosen as by `trainable`, none by default. They are split over devices and
        micro-batches with the batch.
      batch_statistics: "global": modules that normalise by the batch (BatchNorm of NNX, Linen and Equinox) do so over
        the whole micro-batch, as on one device; "per_device": over each device's rows of it.

    Raises:
      UserError: if a setting is out of its range.

    >>> import jax.numpy as jnp, optax
    >>> zero = Zero(stage=3)
    >>> state = zero.init(lambda rng: {"w": jax.random.normal(rng, (64, 32))}, optax.adamw(1e-3))
    >>> step = zero.train_step(lambda model, batch, rng: jnp.mean((batch @ model["w"]) ** 2))
    >>> state, metrics = step(state, jnp.ones((16, 64)))
    >>> int(metrics["step"])
    1
    """

    stage: int = 3
    mesh: Mesh | None = None
    precision: str | Precision = "fp32"
    micro_batches: int = 1
    clip_norm: float | None = None
    remat: str | Remat | Policy | None = None
    min_shard_size: int = 1024
    offload: str | tuple[str, ...] = ()
    offload_path: str | os.PathLike[str] | None = None
    trainable: Any = None
    per_example: Any = None
    batch_statistics: Literal["global", "per_device"] = "global"

    def __post_init__(self) -> None:
        stage_of(self.stage)
        object.__setattr__(self, "mesh", as_zero_mesh(self.mesh))
        Precision.of(self.precision)
        _check("micro_batches", self.micro_batches, numbers.Integral, lambda n: n >= 1, "a positive integer")
        _check("min_shard_size", self.min_shard_size, numbers.Integral, lambda n: n >= 0, "an integer of at least 0")
        object.__setattr__(self, "offload", names_of(self.offload))
        object.__setattr__(self, "offload_path", path_of(self.offload_path, names_of(self.offload)))
        if self.clip_norm is not None:
            _check("clip_norm", self.clip_norm, numbers.Real, lambda norm: norm > 0, "a positive number, or None")
        remat = Remat.of(self.remat)
        if isinstance(remat, Remat):
            remat.check_devices(as_zero_mesh(self.mesh).devices.flat)
        if self.batch_statistics not in ("global", "per_device"):
            raise UserError(f"batch_statistics is {shown(self.batch_statistics)}; accepted: 'global' or 'per_device'")

    @property
    def row(self) -> Stage:
        """The stage's row of the table."""
        return stage_of(self.stage)

    @property
    def policy(self) -> Precision:
        """The precision as a `Precision`."""
        return Precision.of(self.precision)

    @property
    def placement(self) -> Placement:
        """What decides where the leaves of a state lie."""
        mesh = as_zero_mesh(self.mesh)
        offload = names_of(self.offload)
        path = path_of(self.offload_path, offload)
        return Placement(mesh, self.stage, offload, path, self.min_shard_size, self.micro_batches)

    @property
    def step_settings(self) -> Settings:
        """What a step does."""
        remat = Remat.of(self.remat)
        return Settings(self.row, self.policy, self.micro_batches, self.clip_norm, remat, self.batch_statistics)

    def init(
        self, make_model: Callable[[jax.Array], Any], optimizer: optax.GradientTransformation, seed: int = 0
    ) -> State:
        """A new state; every leaf is born in its shard, inside one compiled program.

        Args:
          make_model: from a key (`jax.random.key(seed)`) to an `nnx.Module`, Linen variables (what `module.init`
            returns), an Equinox module, or any pytree of arrays.
          optimizer: any optax transformation.
          seed: of the parameters and of all randomness in training.

        Raises:
          UserError: if the model has no floating parameters, the optimizer is no optax transformation, or nothing can
            be written at `offload_path`.
          RunError: if there is too little room.
        """
        _check("seed", seed, numbers.Integral, lambda n: True, "an integer")
        lower = lambda zero: zero._init(make_model, optimizer).lower(jax.random.key(seed))
        details = lambda: init_details(self, lower, self.abstract_state(make_model, optimizer))
        with explained("the state", details):
            return jax.block_until_ready(self._init(make_model, optimizer)(jax.random.key(seed)))

    def abstract_state(self, make_model: Callable[[jax.Array], Any], optimizer: optax.GradientTransformation) -> State:
        """The state that `init` would make, as `jax.ShapeDtypeStruct`s with shardings; nothing is allocated."""
        return self._plan(make_model, optimizer)[0].abstract

    def train_step(self, loss_fn: Callable[..., Any]) -> TrainStep:
        """The compiled training step.

        Where a state lies (shards, host memory, files) is what the `Zero` that made it says; a step leaves it there.

        Args:
          loss_fn: function of (model, batch, rng) that returns a loss, or a pair of a loss and a dict of scalars. A
            loss is a scalar, the mean over its examples, or `Weighted`. A random key `rng` depends on the seed, the
            step, the micro-batch and the device's place on the data axes. The model's params are in the compute dtype,
            but for those that `Precision` keeps in float32.

        Returns:
          A function `(state, batch) -> (state, metrics)` that donates the state, and has jit's `lower`. A batch is a
          pytree of arrays whose first axis is the global batch (in a multi-process run, this process's share of it).
          Metrics are scalars on the device: "loss", "grad_norm" (before clipping), "loss_scale", "skipped", "step"
          (updates applied), and the dict's, averaged over micro-batches and devices.
        """
        return TrainStep(loss_fn, self.step_settings, self._watched)

    def eval_step(self, loss_fn: Callable[..., Any]) -> EvalStep:
        """The compiled evaluation `(state, batch) -> metrics` with "loss", its "weight", and the dict's scalars."""
        return EvalStep(loss_fn, self.step_settings, self._watched)

    def loss_step(self, loss_fn: Callable[..., Any]) -> LossStep:
        """The compiled loss `(state, batch, i) -> loss` of a training step's micro-batch i, without the update."""
        return LossStep(loss_fn, self.step_settings, self._watched)

    def gather(self, state: State) -> Any:
        """The whole model, of the kind and the dtypes that `make_model` returned, on every device."""
        layout = state.layout
        params, variables = _gathering(layout)(state.params, state.frozen, state.variables)
        return layout.adapter.whole(params, variables, jax.random.wrap_key_data(_local(state.rng)))

    def verify(
        self,
        make_model: Callable[[jax.Array], Any],
        optimizer: optax.GradientTransformation,
        loss_fn: Callable[..., Any],
        batch: Any,
        *,
        seed: int = 0,
        tolerance: float = 1e-4,
    ) -> Verification:
        """Two steps on one device and on the mesh, in fp32: what differs, and the likely cause.

        Args:
          make_model, optimizer, loss_fn: as for `init` and `train_step`.
          batch: one global batch; both steps take it.
          seed: as for `init`.
          tolerance: the relative difference of a loss, a gradient or a variable that counts.

        Returns:
          `ok`, the losses, each leaf that differs, and the cause; `print` gives them in words.

        Raises:
          UserError: in a run of several processes.

        >>> import jax.numpy as jnp, optax
        >>> make_model = lambda rng: {"w": jax.random.normal(rng, (8, 4))}
        >>> loss_fn = lambda model, batch, rng: jnp.mean((batch @ model["w"]) ** 2)
        >>> Zero(stage=3).verify(make_model, optax.adamw(1e-3), loss_fn, jnp.ones((16, 8))).ok
        True
        """
        return verify(self, make_model, optimizer, loss_fn, batch, seed=seed, tolerance=tolerance)

    def report(self, state: State, step: TrainStep, batch: Any) -> Report:
        """What a training step costs each device, as compiled, beside ZeRO's formulas.

        Args:
          state: the state, or `abstract_state`'s.
          step: of `train_step`.
          batch: arrays or `jax.ShapeDtypeStruct`s.

        Returns:
          Bytes of parameters, optimizer state, gradients, activations and temporaries, the largest buffers with the
          lines that made them, every collective, and each leaf that is not simply in shards; `print` gives a table,
          `as_dict` plain data.
        """
        compiled, layout = step.lower(state, batch).compile(), state.layout
        loss = step.local_loss(layout, training=True).knowing(step.uses.get(layout))
        leaves = (*layout.param_leaves, *layout.frozen_leaves)
        return make_report(
            compiled=compiled,
            state=state,
            mesh=layout.mesh,
            stage=step.settings.stage.number,
            precision=loss.precision,
            micro_batches=step.settings.micro_batches,
            kept={leaf.path for leaf in leaves if loss.compute_of(leaf) != loss.precision.compute},
            notes=leaf_notes(layout, step.settings.stage, step.uses.get(layout), self.min_shard_size),
            offloaded=jax.tree.map(lambda leaf: leaf.offloaded or leaf.directory is not None, layout.leaves),
            in_files=layout.uses_files,
            turns=step.turns.get(layout, ()),
            activations=step.activations(state, batch),
        )

    def _watched(self, step: Step, layout: Layout, batch: Any) -> contextlib.AbstractContextManager[None]:
        """The context of a step's run, in which an allocation that fails is explained."""
        what = {TrainStep: "a training step", EvalStep: "an evaluation"}.get(type(step), "a loss")
        return explained(what, functools.partial(step_details, self, step, layout, batch))

    def _init(self, make_model: Callable[[jax.Array], Any], optimizer: optax.GradientTransformation) -> Any:
        """The function of a key that builds a state, compiled but for what lies in files."""
        layout, build = self._plan(make_model, optimizer)
        if not layout.uses_files:
            return jax.jit(build, out_shardings=layout.shardings)
        places = opened(layout.abstract.opt_state)
        without = lambda state: dataclasses.replace(state, opt_state=None)
        build_rest = jax.jit(lambda key: without(build(key)), out_shardings=without(layout.shardings))

        def build_all(key: jax.Array) -> State:
            state = build_rest(key)
            return dataclasses.replace(state, opt_state=new_opt_state(layout, state.params, places))

        return build_all

    def _plan(
        self, make_model: Callable[[jax.Array], Any], optimizer: optax.GradientTransformation
    ) -> tuple[Layout, Callable[[jax.Array], State]]:
        """The layout of a new state, and the function of a key that builds it."""
        if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
            raise UserError(f"optimizer is {shown(optimizer)}; accepted: an optax.GradientTransformation")
        if not callable(make_model):
            raise UserError(f"make_model is {shown(make_model)}; accepted: a function from a random key to a model")
        master = self.policy.master
        made: list[tuple[Adapter, Any, Any, Any]] = []

        def logical(key: jax.Array) -> dict[str, Any]:
            adapter, parts = take_apart(make_model(key))
            trained, frozen = divide(parts.params, chosen("trainable", self.trainable, adapter, parts.params))
            rows = chosen("per_example", self.per_example, adapter, parts.variables)
            made.append((adapter, jax.tree.map(lambda x: jnp.dtype(x.dtype), trained), rows, parts.in_norms))
            params = jax.tree.map(lambda x: jnp.asarray(x, master), trained)
            training_key = jax.random.fold_in(key, TRAINING_SALT)
            return {
                "step": jnp.zeros((), jnp.int32),
                "params": params,
                "frozen": jax.tree.map(jnp.asarray, frozen),
                "opt_state": optimizer.init(params),
                "variables": jax.tree.map(jnp.asarray, parts.variables),
                "rng": jax.random.key_data(training_key),
                "loss_scale": initial_state(),
            }

        shapes = jax.eval_shape(logical, jax.random.key(0))
        if not jax.tree.leaves(shapes["params"]):
            if jax.tree.leaves(shapes["frozen"]):
                raise UserError(
                    f"trainable is {shown(self.trainable)}, which no parameter matches; accepted: one that does"
                )
            raise UserError("make_model returned a model without floating parameters; accepted: at least one")
        adapter, dtypes, rows, in_norms = made[0]
        leaves = self.placement.leaves(shapes, rows)
        for field in ("params", "frozen"):
            leaves[field] = jax.tree.map(_with_norm, leaves[field], in_norms, is_leaf=lambda x: x is None)
        layout = Layout(self.placement.mesh, adapter, optimizer, leaves, dtypes)
        paths = [leaf.path for leaf in (*layout.param_leaves, *layout.frozen_leaves)]
        require_matches("Precision.keep", self.policy.keep, paths)

        def build(key: jax.Array) -> State:
            return State(**{field: layout.store(field, x) for field, x in logical(key).items()}, layout=layout)

        return layout, build


def _with_norm(leaf: Leaf | None, in_norm: bool) -> Leaf | None:
    """The leaf of a parameter, marked if it belongs to a normalisation."""
    return leaf and dataclasses.replace(leaf, in_norm=in_norm)


@functools.lru_cache(maxsize=8)
def _gathering(layout: Layout) -> Any:
    """The compiled function of stored parameters and variables that makes them whole, in the model's own dtypes."""

    def whole(params: Any, frozen: Any, variables: Any) -> Any:
        view = lambda field, tree: layout.view(field, layout.fetch(field, tree))
        params, frozen = view("params", params), view("frozen", frozen)
        params = jax.tree.map(lambda x, dtype: x.astype(dtype), params, layout.model_dtypes)
        return layout.join_params(jax.tree.leaves(params), jax.tree.leaves(frozen)), variables

    return jax.jit(whole, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))


def _local(x: jax.Array) -> jax.Array:
    """This process's copy of an array that is whole on every device."""
    return x.addressable_data(0)


def _check(name: str, value: Any, kind: Any, holds: Callable[[Any], bool], accepted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
        raise UserError(f"{name} is {shown(value)}; accepted: {accepted}")
