"""Is a model trained in shards the model trained on one device? Two steps of both, compared leaf by leaf."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.errors import UserError
from zerojax.mesh import data_parallel_size, make_mesh
from zerojax.zero.partition import Leaf
from zerojax.zero.state import State

STEPS = 2
# Shares of the largest gradient: a leaf below the first is compared on that scale; below the second a gradient is
# rounding, which an optimizer may blow up to a whole step.
SMALLEST, ROUNDING = 1e-2, 1e-5


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something that is not the same on one device and on the mesh.

    Attributes:
      what: "loss", "gradient", "parameter" or "variable".
      name: of the leaf, as in "blocks/mlp/up/kernel"; empty for a loss.
      step: after which step, from 1.
      relative: the largest difference over the largest entry on one device.
    """

    what: str
    name: str
    step: int
    relative: float


@dataclasses.dataclass(frozen=True)
class Verification:
    """What two steps on one device and on the mesh gave.

    Attributes:
      losses: of each step, on one device and on the mesh.
      differences: everything that differs, step by step.
      cause: the likely cause in words, and what to do; empty if nothing differs.
    """

    losses: tuple[tuple[float, float], ...]
    differences: tuple[Difference, ...]
    cause: str

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        lines = [
            f"step {i}: loss {a:.7g} on one device, {b:.7g} on the mesh" for i, (a, b) in enumerate(self.losses, 1)
        ]
        lines += [
            f"step {d.step}: {d.what}{f' {d.name}' if d.name else ''} differs by {d.relative:.1e} of its largest entry"
            for d in self.differences
        ]
        return "\n".join([*lines, f"likely cause: {self.cause}" if self.cause else "nothing differs"])


class _Run(NamedTuple):
    """What a step gave: a loss, and trees of whole arrays by name."""

    loss: float
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    variables: dict[str, np.ndarray]


def verify(
    zero: Any,
    make_model: Callable[[jax.Array], Any],
    optimizer: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    seed: int = 0,
    tolerance: float = 1e-4,
) -> Verification:
    """As `zerojax.Zero.verify`."""
    if jax.process_count() > 1:
        raise UserError(
            f"verify runs in {jax.process_count()} processes; accepted: one, which may emulate the devices of many"
        )
    zero = dataclasses.replace(zero, precision="fp32", offload_path=None)
    single = dataclasses.replace(zero, stage=0, mesh=make_mesh(devices=zero.mesh.devices.flat[:1]))
    optimizer = optax.chain(_recorded(), optimizer)
    states = [settings.init(make_model, optimizer, seed) for settings in (single, zero)]
    steps = [settings.train_step(loss_fn) for settings in (single, zero)]
    runs: tuple[list[_Run], list[_Run]] = ([], [])
    for _ in range(STEPS):
        for i, of_one in enumerate(runs):
            states[i], metrics = steps[i](states[i], batch)
            of_one.append(_run(float(metrics["loss"]), states[i]))
        # The next step starts from equal states: an optimizer may have made whole steps of rounding (Adam of the zero
        # gradient of a bias in front of a BatchNorm), which are no difference of the step.
        states[1] = _moved(states[0], states[1])
    differences = tuple(_differences(*runs, tolerance))
    cause = _Cause(single, make_model, optimizer, loss_fn, batch, seed, tolerance)
    parts = data_parallel_size(zero.mesh) * zero.micro_batches
    return Verification(
        tuple((a.loss, b.loss) for a, b in zip(*runs, strict=True)),
        differences,
        cause.of(runs[0][0].loss, differences, parts, zero.batch_statistics) if differences else "",
    )


def _moved(source: State, like: State) -> State:
    """The state `source` in the layout of `like`."""

    def move(x: jax.Array, old: Leaf, new: Leaf) -> jax.Array:
        if not _is_numeric(x):
            return jax.device_put(x, new.sharding(like.layout.mesh))
        logical = np.asarray(x)[tuple(map(slice, old.shape))]
        stored = np.zeros(new.stored_shape, new.dtype)
        stored[tuple(map(slice, old.shape))] = logical
        return jax.device_put(stored, new.sharding(like.layout.mesh))

    fields = like.layout.leaves
    moved = {
        name: jax.tree.map(move, getattr(source, name), source.layout.leaves[name], fields[name]) for name in fields
    }
    return State(**moved, layout=like.layout)


def _recorded() -> optax.GradientTransformation:
    """Keeps the gradients it is given as its state."""
    init = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, updates))


def _run(loss: float, state: State) -> _Run:
    return _Run(loss, *(_whole(state, field) for field in ("opt_state", "params", "variables")))


def _is_numeric(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_


def _whole(state: State, field: str) -> dict[str, np.ndarray]:
    """The leaves of a field without padding, by name; of the optimizer's state, the recorded gradients."""
    values, leaves = getattr(state, field), state.layout.leaves[field]
    if field == "opt_state":
        values, leaves = values[0], leaves[0]
    pairs = zip(jax.tree_util.tree_leaves_with_path(values), jax.tree.leaves(leaves), strict=True)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x)[tuple(map(slice, leaf.shape))]
        for (path, x), leaf in pairs
        if _is_numeric(x)
    }


def _differences(one: list[_Run], mesh: list[_Run], tolerance: float) -> Iterator[Difference]:
    for step, (a, b) in enumerate(zip(one, mesh, strict=True), 1):
        if not np.isfinite(a.loss):
            yield Difference("loss", "", step, float("inf"))
        elif (relative := _relative(np.array(a.loss), np.array(b.loss))) > tolerance:
            yield Difference("loss", "", step, relative)
        largest = max((np.abs(g).max(initial=0) for g in a.gradients.values()), default=0.0)
        differing = set()
        for name, g in a.gradients.items():
            if (relative := _relative(g, b.gradients[name], SMALLEST * largest)) > tolerance:
                differing.add(name)
                yield Difference("gradient", name, step, relative)
        for name, p in a.params.items():
            is_rounding = np.abs(a.gradients[name]).max(initial=0) <= ROUNDING * largest
            if (
                name not in differing
                and not is_rounding
                and (relative := _relative(p, b.params[name])) > 100 * tolerance
            ):
                yield Difference("parameter", name, step, relative)
        for name, v in a.variables.items():
            if (relative := _relative(v, b.variables[name])) > tolerance:
                yield Difference("variable", name, step, relative)


def _relative(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> float:
    """The largest difference over the largest entry of `a`; infinite where only one of them is finite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.size == 0:
        return 0.0
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(a)
    difference = np.abs(np.where(finite, a - b, 0.0)).max()
    return float(difference / max(np.abs(np.where(finite, a, 0.0)).max(), floor, 1e-12))


@dataclasses.dataclass(frozen=True)
class _Cause:
    """Looks for a cause by asking, on one device, what the loss of parts of the batch is."""

    single: Any
    make_model: Any
    optimizer: Any
    loss_fn: Any
    batch: Any
    seed: int
    tolerance: float

    def of(self, whole: float, differences: tuple[Difference, ...], parts: int, statistics: str) -> str:
        if not np.isfinite(whole):
            return "the loss is not finite on one device already"
        if self._differ(whole, self._loss(self.batch, another_key=True)):
            return (
                "the loss draws random numbers, and each device and micro-batch draws its own; "
                "verify with dropout and other randomness off"
            )
        split = [jax.tree.map(lambda x, i=i: x[i::parts], self.batch) for i in range(parts)]
        losses = [self._loss(part) for part in split]
        if self._differ(whole, float(np.mean(losses))):
            if not self._differ(whole, float(np.sum(losses))):
                return "the loss is a sum over its rows; return their mean, or zerojax.Weighted(total, weight)"
            repeated = jax.tree.map(lambda x: np.concatenate([np.asarray(x)] * parts), split[0])
            if self._differ(losses[0], self._loss(repeated)):
                return (
                    "the loss compares the examples of a batch with each other, and a device sees its own ones; "
                    "gather what is compared with zerojax.all_examples"
                )
            hint = " (batch_statistics is 'per_device')" if statistics == "per_device" else ""
            return (
                "the loss of a batch is not the mean of its parts' losses. Either examples weigh differently: return "
                "zerojax.Weighted(total, weight). Or the model takes a statistic over the batch, and a device sees its "
                f"own rows{hint}: use BatchNorm of NNX, Linen or Equinox with batch_statistics='global', or take it "
                "over zerojax.all_examples"
            )
        first = differences[0].step
        kinds = {d.what for d in differences if d.step == first}
        if kinds == {"variable"}:
            return (
                "a module updates a variable from the rows of one device, and the mean over devices is not that of the "
                "batch (a variance is not); use BatchNorm with batch_statistics='global', or zerojax.all_examples"
            )
        if kinds == {"parameter"}:
            return (
                "the optimizer's update differs for equal gradients: it draws random numbers or is numerically unstable"
            )
        return (
            "the losses of parts of the batch agree, their gradients do not: look for a custom derivative in the model"
        )

    def _loss(self, batch: Any, another_key: bool = False) -> float:
        """The loss of the first step; a part of the batch is one micro-batch."""
        single = self.single if another_key else dataclasses.replace(self.single, micro_batches=1)
        state = single.init(self.make_model, self.optimizer, self.seed)
        if another_key:
            state = dataclasses.replace(state, rng=jax.random.key_data(jax.random.key(self.seed + 1)))
        return float(single.train_step(self.loss_fn)(state, batch)[1]["loss"])

    def _differ(self, a: float, b: float) -> bool:
        return _relative(np.array(a), np.array(b)) > self.tolerance
