"""Loss and gradients of one step: the four places of the stage table, on one device's part of everything."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.adapters import Adapter, Deferred, linen_norms
from zerojax.adapters.linen_blocks import linen_blocks, linen_modules_met
from zerojax.errors import UserError, shown
from zerojax.mesh import REPLICA_AXIS, data_axes
from zerojax.precision import Precision
from zerojax.remat import Policy, Remat
from zerojax.weighted import Weighted
from zerojax.zero.activations import kept_bytes
from zerojax.zero.gather import FetchAtUse, GatherAtUse, Point, UseGathered, loss_running
from zerojax.zero.partition import Leaf
from zerojax.zero.plan import Plan, make_plan
from zerojax.zero.stages import Gather, Reduce, Stage
from zerojax.zero.state import Layout, either
from zerojax.zero.uses import MarkUse, Use, Uses, find_uses


@dataclasses.dataclass(frozen=True)
class LocalLoss:
    """The loss of one device, as a function of its parts of the parameters.

    Attributes:
      loss_fn: the user's function of model, batch and rng.
      layout: the state's layout.
      stage: the row of the stage table.
      precision: the dtypes.
      remat: as `Zero.remat`, names made to a `Remat`.
      training: whether the model is in its training mode.
      batch_axes: the mesh axes over which normalisations by the batch take their statistics.
      tell_uses: called with what tracing the loss has found.
      norms: paths of parameters that tracing the loss has found to belong to normalisations.
      plan: what is rematerialised, once `planned` has found out.
      tell_kept: where it is given, called with the bytes that the forward pass of a micro-batch keeps for the backward
        pass.
    """

    loss_fn: Callable[..., Any]
    layout: Layout
    stage: Stage
    precision: Precision
    remat: Remat | Policy | None = None
    training: bool = True
    batch_axes: tuple[str, ...] = ()
    tell_uses: Callable[[Uses], None] = lambda uses: None
    norms: frozenset[str] = frozenset()
    plan: Plan = Plan()
    tell_kept: Callable[[int], None] | None = None

    @property
    def leaves(self) -> list[Leaf]:
        """Of the parameters that are trained."""
        return self.layout.param_leaves

    @property
    def frozen_leaves(self) -> list[Leaf]:
        return self.layout.frozen_leaves

    def compute_of(self, leaf: Leaf) -> Any:
        """The dtype in which the model sees a parameter."""
        return self.precision.compute_of(leaf.path, in_norm=leaf.in_norm or leaf.path in self.norms)

    @property
    def narrow(self) -> Any:
        """The compute dtype where it is narrower than that of what is kept, or `None`."""
        policy = self.precision
        return None if policy.compute == policy.kept else policy.compute

    @property
    def searches_norms(self) -> bool:
        """Whether only tracing the loss can tell which parameters are kept."""
        return self.layout.adapter.finds_norms and self.precision.keep_norms and self.narrow is not None

    def knowing(self, uses: Uses | None) -> "LocalLoss":
        """The same with the normalisations that tracing has found."""
        if uses is None or not self.searches_norms:
            return self
        return dataclasses.replace(self, norms=norms_of([*self.leaves, *self.frozen_leaves], uses))

    def point(self, leaf: Leaf) -> Point:
        return Point(leaf.cut, self.compute_of(leaf), self.precision.reduce)

    def compute_copies(self, leaves: Sequence[Leaf], params: Sequence[jax.Array]) -> list[jax.Array]:
        """The whole parameters as the model sees them."""
        return [self.point(leaf).gather(leaf.fetch(p)) for leaf, p in zip(leaves, params, strict=True)]

    def operands(
        self, leaves: Sequence[Leaf], params: Sequence[jax.Array], gathered: Sequence[jax.Array] | None = None
    ) -> list[jax.Array]:
        """What gradients are taken of where they are reduced at use: shards of cut leaves, compute copies of others.

        In the place of what has to be fetched at its use stand zeros, which are never read and so take no memory.
        """

        def operand(i: int, leaf: Leaf, p: jax.Array) -> jax.Array:
            if leaf.cut.dim is not None:
                return jnp.zeros(p.shape, p.dtype) if leaf.offloaded else p
            if gathered is not None:
                return gathered[i]
            compute = self.compute_of(leaf)
            return jnp.zeros(p.shape, compute) if leaf.offloaded else p.astype(compute)

        return [operand(i, leaf, p) for i, (leaf, p) in enumerate(zip(leaves, params, strict=True))]

    def at_use(
        self,
        leaves: Sequence[Leaf],
        operands: Sequence[jax.Array],
        params: Sequence[jax.Array],
        gathered: Sequence[jax.Array] | None,
        uses: Sequence[Use],
    ) -> list[Any]:
        """The model's parameters from operands: leaves that wait made whole where they are used, others as they are."""

        def present(i: int, leaf: Leaf, operand: jax.Array) -> Any:
            if leaf.cut.dim is None and (gathered is not None or not leaf.offloaded):
                return operand
            point, regathers = self.point(leaf), not any(uses[i].in_remat)
            if gathered is not None:
                deferred = Deferred((operand, gathered[i]), UseGathered(point))
            elif leaf.offloaded:
                deferred = Deferred((operand, params[i]), FetchAtUse(point), regathers)
            else:
                deferred = Deferred((operand,), GatherAtUse(point), regathers)
            return deferred.read() if on_entry(leaf, uses[i]) else deferred

        return [present(i, leaf, operand) for i, (leaf, operand) in enumerate(zip(leaves, operands, strict=True))]

    def run(
        self, params: Sequence[Any], frozen: Sequence[Any], variables: Any, key: jax.Array, batch: Any
    ) -> tuple[jax.Array, "Outcome"]:
        """The loss's total, and the rest of what one micro-batch gives."""
        adapter, axes, compute = self.layout.adapter, self.batch_axes, self.narrow
        model_params = self.layout.join_params(params, frozen)
        blocks = self.plan.blocks
        model = adapter.join(
            model_params, variables, key, training=self.training, batch_axes=axes, compute=compute, blocks=blocks
        )
        with loss_running(data_axes(self.layout.mesh)), linen_blocks(blocks), linen_norms.in_loss(axes, compute):
            loss, aux = split_loss(self.loss_fn(model, batch, key))
        variables, aux = adapter.carried(model, aux)
        return loss.total, Outcome(loss, split_aux(aux), variables)

    def find_uses(self, variables: Any, key: jax.Array, batch: Any) -> Uses:
        adapter: Adapter = self.layout.adapter
        n = len(self.leaves)

        def marked(params: Sequence[jax.Array]) -> Any:
            presented = [Deferred((p,), MarkUse()) for p in params] if adapter.finds_uses else params
            return self.run(presented[:n], presented[n:], variables, key, batch)

        leaves = (*self.leaves, *self.frozen_leaves)
        return find_uses(marked, [jax.ShapeDtypeStruct(leaf.shape, self.compute_of(leaf)) for leaf in leaves])

    def planned(self, variables: Any, key: jax.Array, batch: Any) -> tuple["LocalLoss", Uses]:
        """The loss with what is rematerialised in it and the normalisations it has, and its uses then."""
        with linen_modules_met() as met:
            uses = self.find_uses(variables, key, batch)
        known = self.knowing(uses)
        plan = make_plan(self.remat, self.stage, self.layout, uses, met)
        planned = dataclasses.replace(known, plan=plan)
        if plan.blocks:
            found = planned.find_uses(variables, key, batch)
            if found.remats:
                uses = dataclasses.replace(found, remats=plan.around is None)
            else:
                planned = dataclasses.replace(known, plan=plan.without_blocks(self.remat))
        self.tell_uses(uses)
        return planned, uses

    def rematerialised(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` under the plan's policy around the whole loss."""
        return function if self.plan.around is None else jax.checkpoint(function, policy=self.plan.around)


def norms_of(leaves: Sequence[Leaf], uses: Uses) -> frozenset[str]:
    """The paths of the leaves that are used in normalisations alone."""
    return frozenset(
        leaf.path for leaf, use in zip(leaves, uses.params, strict=True) if use.in_norm and all(use.in_norm)
    )


def on_entry(leaf: Leaf, use: Use) -> bool:
    """Whether a leaf has to be whole before the model runs, since something other than a gather point sees it."""
    return use.outside is not None or any(not leaf.cut.survives(leaf.shape, seen) for seen in use.shapes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["loss", "aux", "variables"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a micro-batch gives beside the gradients; loss and aux are sums that add up over micro-batches."""

    loss: Weighted
    aux: dict[str, Weighted]
    variables: Any


def split_loss(out: Any) -> tuple[Weighted, Any]:
    """What a loss function returned: the loss as a float32 sum and weight, and the aux as it is."""
    has_aux = isinstance(out, tuple) and not isinstance(out, Weighted)
    if has_aux and len(out) != 2:
        raise UserError(f"loss_fn returned {len(out)} values; accepted: a loss, or a pair (loss, aux)")
    loss, aux = out if has_aux else (out, {})
    return _as_weighted("loss", loss), aux


def split_aux(aux: Any) -> dict[str, Weighted]:
    """The scalars of an aux, as float32 sums and weights."""
    if not isinstance(aux, Mapping):
        raise UserError(f"loss_fn returned aux of type {type(aux).__name__}; accepted: a dict of names and scalars")
    return {name: _as_weighted(f"aux {name!r}", value) for name, value in aux.items()}


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
    frozen: Sequence[jax.Array],
    variables: Any,
    key_data: jax.Array,
    scale: jax.Array,
    shard_index: jax.Array,
    batch: Any,
) -> tuple[Weighted, dict[str, Weighted], list[jax.Array], Any]:
    """Loss sums of each micro-batch, aux sums, gradients of the losses' total, and carried variables of one step.

    Runs inside `shard_map`: `params` and `frozen` are this device's shards, `batch` its rows. Sums and gradients are
    over all devices. Micro-batch i is every M-th row of the batch from row i on, whatever the number of devices. Its
    key is folded from the step's key, i, and the device's number along the data axes.
    """
    stage, axes, layout = loss.stage, data_axes(loss.layout.mesh), loss.layout
    shared, rows = layout.split_variables(variables)
    batch, rows = jax.tree.map(lambda x: split_rows(x, micro_batches), (batch, rows))
    key = jax.random.wrap_key_data(key_data)
    key_of = lambda i: jax.random.fold_in(jax.random.fold_in(key, i), shard_index[0])
    first, first_rows = jax.tree.map(lambda x: x[0], (batch, rows))
    n = len(loss.leaves)

    reduces_at_use = stage.reduce is Reduce.AT_USE
    if reduces_at_use or loss.searches_norms or isinstance(loss.remat, Remat):
        loss, found = loss.planned(either(shared, first_rows), key, first)
    else:
        loss, found = dataclasses.replace(loss, plan=Plan(around=loss.remat)), None
    # Place 1, between steps, is the state's layout. Place 2: the compute-dtype copy is gathered.
    gathered = None if stage.gather is Gather.AT_USE else loss.compute_copies(loss.leaves, params)
    frozen = frozen if stage.gather is Gather.AT_USE else loss.compute_copies(loss.frozen_leaves, frozen)
    # Place 3: the backward pass reduces a gradient where its parameter was used, if the stage says so.
    uses = found if reduces_at_use else None
    operands = gathered if uses is None and gathered is not None else loss.operands(loss.leaves, params, gathered)

    def objective(operands: Sequence[jax.Array], variables: Any, key: jax.Array, batch: Any) -> Any:
        model_params, model_frozen = operands, frozen
        if uses is not None:
            model_params = loss.at_use(loss.leaves, operands, params, gathered, uses.params[:n])
            if stage.gather is Gather.AT_USE:
                shards = loss.operands(loss.frozen_leaves, frozen)
                model_frozen = loss.at_use(loss.frozen_leaves, shards, frozen, None, uses.params[n:])
        total, outcome = loss.run(model_params, model_frozen, variables, key, batch)
        return total * lift_of(outcome.loss.weight), outcome

    def lift_of(weight: jax.Array) -> jax.Array:
        """The loss scale for the mean over a micro-batch of `weight` on this device; 1 where losses are not scaled."""
        if loss.precision.loss_scale is None:
            return jnp.ones((), jnp.float32)
        weight = jax.lax.psum(weight, axes)
        return scale / jnp.where(weight == 0, 1.0, weight)

    differentiated = loss.rematerialised(objective)
    if loss.tell_kept is not None:
        loss.tell_kept(kept_bytes(differentiated, operands, either(shared, first_rows), key_of(0), first))
    gradient = jax.value_and_grad(differentiated, has_aux=True)

    def micro_batch(
        shared: Any, i: jax.Array | int, batch: Any, rows: Any
    ) -> tuple[Outcome, list[jax.Array], jax.Array]:
        (_, outcome), gradients = gradient(operands, either(shared, rows), key_of(i), batch)
        return outcome, gradients, 1 / lift_of(outcome.loss.weight)

    if micro_batches == 1:
        outcome, gradients, lower = micro_batch(shared, 0, first, first_rows)
        shared, rows = layout.split_variables(outcome.variables)
        losses, rows = jax.tree.map(lambda x: x[None], (outcome.loss, rows))
        aux = outcome.aux
    else:
        shapes = jax.eval_shape(micro_batch, shared, 0, first, first_rows)[0]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.aux)
        accumulator = [jnp.zeros(x.shape, loss.precision.accumulate) for x in operands]

        def accumulate(carry: Any, xs: Any) -> tuple[Any, tuple[Weighted, Any]]:
            aux, accumulator, shared = carry
            outcome, gradients, lower = micro_batch(shared, *xs)
            shared, rows = layout.split_variables(outcome.variables)
            aux = jax.tree.map(jnp.add, aux, outcome.aux)
            accumulator = [
                a + _lowered(g.astype(a.dtype), loss, lower) for a, g in zip(accumulator, gradients, strict=True)
            ]
            return (aux, accumulator, shared), (outcome.loss, rows)

        start = (zeros, accumulator, shared)
        (aux, gradients, shared), (losses, rows) = jax.lax.scan(
            accumulate, start, (jnp.arange(micro_batches), batch, rows)
        )
        lower = jnp.ones((), jnp.float32)

    # Place 4: what was not reduced at its use is reduced now, once.
    gradients = [_lowered(g, loss, lower) for g in reduce_once(loss, gradients)]
    losses, aux = jax.lax.psum((losses, aux), axes)
    before, _ = layout.split_variables(variables)
    variables = either(mean_over(before, shared, axes, shard_index[0] == 0), jax.tree.map(join_rows, rows))
    return losses, aux, gradients, variables


def split_rows(x: jax.Array, micro_batches: int) -> jax.Array:
    """(rows, ...) to (M, rows / M, ...): micro-batch i is rows i, i + M, i + 2M and so on.

    A device's rows begin at a multiple of M, so these are the same rows of the global batch on any number of devices.

    >>> split_rows(jnp.arange(6), 2).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    return jnp.moveaxis(x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:]), 1, 0)


def join_rows(x: jax.Array) -> jax.Array:
    """The inverse of `split_rows`.

    >>> join_rows(split_rows(jnp.arange(6), 2)).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


def _lowered(gradient: jax.Array, loss: LocalLoss, factor: jax.Array) -> jax.Array:
    """A gradient of a scaled loss brought back to that of the loss."""
    return gradient if loss.precision.loss_scale is None else gradient * factor.astype(gradient.dtype)


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


def mean_over(before: Any, variables: Any, axes: tuple[str, ...], is_first: jax.Array) -> Any:
    """Floating variables averaged over devices; of integers and booleans, which have no mean, the first device's.

    The mean is of what has been added to `before`, so that what a step leaves alone keeps its last digit.
    """

    def agreed(before: jax.Array, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            base = jnp.where(jnp.isfinite(before), before, 0)
            return base + jax.lax.pmean(x - base, axes)
        if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_:
            return jax.lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), axes).astype(x.dtype)
        return x

    return jax.tree.map(agreed, before, variables)


def local_loss(
    loss: LocalLoss,
    params: Sequence[jax.Array],
    frozen: Sequence[jax.Array],
    variables: Any,
    key_data: jax.Array,
    shard_index: jax.Array,
    batch: Any,
) -> tuple[Weighted, dict[str, Weighted]]:
    """Loss sums without gradients, over all devices: parameters are gathered where they are used."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data), shard_index[0])
    uses, n = loss.find_uses(variables, key, batch), len(loss.leaves)
    loss.tell_uses(uses)
    loss = loss.knowing(uses)
    used = lambda leaves, values, uses: loss.at_use(leaves, loss.operands(leaves, values), values, None, uses)
    trained = used(loss.leaves, params, uses.params[:n])
    _, outcome = loss.run(trained, used(loss.frozen_leaves, frozen, uses.params[n:]), variables, key, batch)
    return jax.lax.psum((outcome.loss, outcome.aux), data_axes(loss.layout.mesh))


def local_micro_loss(
    loss: LocalLoss,
    micro_batches: int,
    params: Sequence[jax.Array],
    frozen: Sequence[jax.Array],
    variables: Any,
    key_data: jax.Array,
    number: jax.Array,
    shard_index: jax.Array,
    batch: Any,
) -> Weighted:
    """As `local_loss`, of micro-batch `number` of a training step."""
    shared, rows = loss.layout.split_variables(variables)
    rows = jax.tree.map(lambda x: split_rows(x, micro_batches)[number], rows)
    key = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key_data), number))
    return local_loss(loss, params, frozen, either(shared, rows), key, shard_index, batch)[0]
