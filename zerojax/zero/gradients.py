"""Loss and gradients of one step: the four places of the stage table, on one device's part of everything."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.adapters import Adapter, Deferred
from zerojax.adapters.regather import all_but_gathered
from zerojax.errors import UserError, shown
from zerojax.mesh import REPLICA_AXIS, data_axes
from zerojax.precision import Precision
from zerojax.weighted import Weighted
from zerojax.zero.gather import GatherAtUse, Point, UseGathered, loss_running
from zerojax.zero.partition import Leaf
from zerojax.zero.stages import Gather, Reduce, Stage
from zerojax.zero.state import Layout
from zerojax.zero.uses import MarkUse, Uses, find_uses


@dataclasses.dataclass(frozen=True)
class LocalLoss:
    """The loss of one device, as a function of its parts of the parameters.

    Attributes:
      loss_fn: the user's function of model, batch and rng.
      layout: the state's layout.
      stage: the row of the stage table.
      precision: the dtypes.
      remat: a policy of `jax.checkpoint` for the whole loss, or `None`.
      training: whether the model is in its training mode.
      tell_uses: called with what tracing the loss has found.
    """

    loss_fn: Callable[..., Any]
    layout: Layout
    stage: Stage
    precision: Precision
    remat: Callable[..., bool] | None = None
    training: bool = True
    tell_uses: Callable[[Uses], None] = lambda uses: None

    @property
    def leaves(self) -> list[Leaf]:
        return self.layout.param_leaves

    def point(self, leaf: Leaf) -> Point:
        return Point(leaf.cut, self.precision.compute, self.precision.reduce)

    def compute_copies(self, params: Sequence[jax.Array]) -> list[jax.Array]:
        """The whole parameters in the compute dtype."""
        return [
            self.point(leaf).gather(p) if leaf.cut.dim is not None else p.astype(self.precision.compute)
            for leaf, p in zip(self.leaves, params, strict=True)
        ]

    def shards(self, params: Sequence[jax.Array]) -> list[jax.Array]:
        """What gradients are taken of where they are reduced at use: shards of cut leaves, compute copies of others."""
        return [
            p if leaf.cut.dim is not None else p.astype(self.precision.compute)
            for leaf, p in zip(self.leaves, params, strict=True)
        ]

    def at_use(self, params: Sequence[jax.Array], gathered: Sequence[jax.Array] | None, uses: Uses) -> list[Any]:
        """The model's parameters from operands: cut leaves made whole where they are used, others as they are."""

        def present(i: int, leaf: Leaf, operand: jax.Array) -> Any:
            if leaf.cut.dim is None:
                return operand
            if gathered is None:
                regathers = not any(uses.params[i].in_remat)
                deferred = Deferred((operand,), GatherAtUse(self.point(leaf)), regathers)
            else:
                deferred = Deferred((operand, gathered[i]), UseGathered(self.point(leaf)))
            return deferred.read() if on_entry(leaf, uses, i) else deferred

        return [present(i, leaf, operand) for i, (leaf, operand) in enumerate(zip(self.leaves, params, strict=True))]

    def run(self, params: Sequence[Any], variables: Any, key: jax.Array, batch: Any) -> tuple[jax.Array, "Outcome"]:
        """The loss's total, and the rest of what one micro-batch gives."""
        adapter = self.layout.adapter
        tree = jax.tree.unflatten(jax.tree.structure(self.layout.leaves["params"]), params)
        model = adapter.join(tree, variables, key, training=self.training)
        with loss_running():
            loss, aux = split_aux(self.loss_fn(model, batch, key))
        return loss.total, Outcome(loss, aux, adapter.variables(model))

    def find_uses(self, variables: Any, key: jax.Array, batch: Any) -> Uses:
        adapter: Adapter = self.layout.adapter

        def marked(params: Sequence[jax.Array]) -> Any:
            presented = [Deferred((p,), MarkUse()) for p in params] if adapter.finds_uses else params
            return self.run(presented, variables, key, batch)

        whole = [jax.ShapeDtypeStruct(leaf.shape, self.precision.compute) for leaf in self.leaves]
        uses = find_uses(marked, whole)
        self.tell_uses(uses)
        return uses

    def rematerialised(self, function: Callable[..., Any], uses: Uses | None) -> Callable[..., Any]:
        """`function` under the policy asked for; at stage 3 what was gathered is gathered again in the backward pass.

        A block sees to that itself. So does a model that rematerialises: its gather points are inside, and a policy
        around it would take precedence over its own and keep what it drops.
        """
        finds_uses = self.layout.adapter.finds_uses
        regather = self.stage.gather is Gather.AT_USE and finds_uses and uses is not None and not uses.remats
        if self.remat is None and not regather:
            return function
        sizes = gathered_sizes(self.leaves, uses) if regather and uses is not None else set()
        return jax.checkpoint(function, policy=all_but_gathered(sizes, self.remat))


def gathered_sizes(leaves: Sequence[Leaf], uses: Uses) -> set[int]:
    """The numbers of elements that gather points make: of whole leaves, or of a scan's slices of them."""
    return {
        math.prod(shape[-ndim:])
        for leaf, use in zip(leaves, uses.params, strict=True)
        for ndim in (*map(len, use.shapes), len(leaf.shape))
        for shape in (leaf.shape, leaf.stored_shape)
        if leaf.cut.dim is not None
    }


def on_entry(leaf: Leaf, uses: Uses, i: int) -> bool:
    """Whether a cut leaf has to be whole before the model runs, since something other than a gather point sees it."""
    use = uses.params[i]
    return use.outside is not None or any(not leaf.cut.survives(leaf.shape, seen) for seen in use.shapes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["loss", "aux", "variables"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a micro-batch gives beside the gradients; loss and aux are sums that add up over micro-batches."""

    loss: Weighted
    aux: dict[str, Weighted]
    variables: Any


def split_aux(out: Any) -> tuple[Weighted, dict[str, Weighted]]:
    """What a loss function returned, as float32 sums and weights."""
    has_aux = isinstance(out, tuple) and not isinstance(out, Weighted)
    if has_aux and len(out) != 2:
        raise UserError(f"loss_fn returned {len(out)} values; accepted: a loss, or a pair (loss, aux)")
    loss, aux = out if has_aux else (out, {})
    if not isinstance(aux, dict):
        raise UserError(f"loss_fn returned aux of type {type(aux).__name__}; accepted: a dict of names and scalars")
    return _as_weighted("loss", loss), {name: _as_weighted(f"aux {name!r}", value) for name, value in aux.items()}


def _as_weighted(name: str, value: Any) -> Weighted:
    value = value if isinstance(value, Weighted) else Weighted(value, jnp.ones(()))
    for part, x in zip(("", "'s weight"), value, strict=True):
        if not (hasattr(x, "dtype") or isinstance(x, int | float | complex)):
            raise UserError(f"{name}{part} is {shown(x)}; accepted: a scalar, or zerojax.Weighted(total, weight)")
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if shape != () or not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
            raise UserError(
                f"{name}{part} has shape {shape} and dtype {dtype}; "
                "accepted: a scalar, or zerojax.Weighted(total, weight)"
            )
    if name == "loss" and not jnp.issubdtype(jnp.result_type(value.total), jnp.floating):
        raise UserError(f"loss has dtype {jnp.result_type(value.total)}; accepted: a floating scalar")
    return Weighted(
        jnp.asarray(value.total, jnp.float32), jax.lax.stop_gradient(jnp.asarray(value.weight, jnp.float32))
    )


def local_gradients(
    loss: LocalLoss,
    micro_batches: int,
    params: Sequence[jax.Array],
    variables: Any,
    key_data: jax.Array,
    shard_index: jax.Array,
    batch: Any,
) -> tuple[Weighted, dict[str, Weighted], list[jax.Array], Any]:
    """Loss sums, gradients of their total and carried variables of one step, summed over all devices.

    Runs inside `shard_map`: `params` are this device's shards, `batch` its rows. A micro-batch's key is folded from
    the step's key, the micro-batch's number and the device's number along the data axes.
    """
    stage, axes = loss.stage, data_axes(loss.layout.mesh)
    batch = jax.tree.map(lambda x: x.reshape(micro_batches, x.shape[0] // micro_batches, *x.shape[1:]), batch)
    key = jax.random.wrap_key_data(key_data)
    key_of = lambda i: jax.random.fold_in(jax.random.fold_in(key, i), shard_index[0])
    first = jax.tree.map(lambda x: x[0], batch)

    # Place 1, between steps, is the state's layout. Place 2: the compute-dtype copy is gathered.
    gathered = None if stage.gather is Gather.AT_USE else loss.compute_copies(params)
    # Place 3: the backward pass reduces a gradient where its parameter was used, if the stage says so.
    uses = loss.find_uses(variables, key, first) if stage.reduce is Reduce.AT_USE else None
    operands = gathered if uses is None and gathered is not None else loss.shards(params)

    def objective(operands: Sequence[jax.Array], variables: Any, key: jax.Array, batch: Any) -> Any:
        model_params = operands if uses is None else loss.at_use(operands, gathered, uses)
        return loss.run(model_params, variables, key, batch)

    gradient = jax.value_and_grad(loss.rematerialised(objective, uses), has_aux=True)

    def micro_batch(variables: Any, i: jax.Array | int, batch: Any) -> tuple[Outcome, list[jax.Array]]:
        (_, outcome), gradients = gradient(operands, variables, key_of(i), batch)
        return outcome, gradients

    if micro_batches == 1:
        outcome, gradients = micro_batch(variables, 0, first)
        sums, variables = (outcome.loss, outcome.aux), outcome.variables
    else:
        shapes = jax.eval_shape(micro_batch, variables, 0, first)[0]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes.loss, shapes.aux))
        accumulator = [jnp.zeros(x.shape, loss.precision.accumulate) for x in operands]

        def accumulate(carry: Any, xs: Any) -> tuple[Any, None]:
            sums, accumulator, variables = carry
            outcome, gradients = micro_batch(variables, *xs)
            sums = jax.tree.map(jnp.add, sums, (outcome.loss, outcome.aux))
            accumulator = [a + g.astype(a.dtype) for a, g in zip(accumulator, gradients, strict=True)]
            return (sums, accumulator, outcome.variables), None

        start = (zeros, accumulator, variables)
        (sums, gradients, variables), _ = jax.lax.scan(accumulate, start, (jnp.arange(micro_batches), batch))

    # Place 4: what was not reduced at its use is reduced now, once.
    gradients = reduce_once(loss, gradients)
    sums = jax.lax.psum(sums, axes)
    return *sums, gradients, mean_over(variables, axes, shard_index[0] == 0)


def reduce_once(loss: LocalLoss, gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Sums over all devices of what the backward pass has left as one device's own."""
    axes, dtype = data_axes(loss.layout.mesh), loss.precision.reduce
    gradients = list(gradients)
    if loss.stage.reduce is Reduce.ONCE:
        gradients = [
            loss.point(leaf).scatter(g) if leaf.cut.dim is not None else g
            for leaf, g in zip(loss.leaves, gradients, strict=True)
        ]
    cut = [i for i, leaf in enumerate(loss.leaves) if leaf.cut.dim is not None]
    whole = [i for i, leaf in enumerate(loss.leaves) if leaf.cut.dim is None]
    for group, over in ((cut, [REPLICA_AXIS] if REPLICA_AXIS in axes else []), (whole, axes)):
        if group and over:
            summed = jax.lax.psum([gradients[i].astype(dtype or gradients[i].dtype) for i in group], tuple(over))
            for i, g in zip(group, summed, strict=True):
                gradients[i] = g
    return [g.astype(loss.precision.accumulate) for g in gradients]


def mean_over(variables: Any, axes: tuple[str, ...], is_first: jax.Array) -> Any:
    """Floating variables averaged over devices; of integers and booleans, which have no mean, the first device's."""

    def agreed(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, axes)
        if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_:
            return jax.lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), axes).astype(x.dtype)
        return x

    return jax.tree.map(agreed, variables)


def local_loss(
    loss: LocalLoss,
    params: Sequence[jax.Array],
    variables: Any,
    key_data: jax.Array,
    shard_index: jax.Array,
    batch: Any,
) -> tuple[Weighted, dict[str, Weighted]]:
    """Loss sums without gradients, over all devices: parameters are gathered where they are used."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data), shard_index[0])
    uses = loss.find_uses(variables, key, batch)
    _, outcome = loss.run(loss.at_use(loss.shards(params), None, uses), variables, key, batch)
    return jax.lax.psum((outcome.loss, outcome.aux), data_axes(loss.layout.mesh))
