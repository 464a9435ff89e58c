"""`zerojax.initialize`: an engine from a model and a DeepSpeed configuration."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zerojax import optim
from zerojax.config import deepspeed
from zerojax.engine.engine import Engine
from zerojax.engine.loader import EpochLoader
from zerojax.errors import UserError, shown
from zerojax.mesh import as_zero_mesh, data_parallel_size
from zerojax.zero import Zero


def initialize(
    *,
    model: Any,
    config: Mapping[str, Any] | str | os.PathLike[str],
    loss_fn: Callable[..., Any] | None = None,
    optimizer: optax.GradientTransformation | Callable[[], optax.GradientTransformation] | None = None,
    lr_scheduler: optax.Schedule | None = None,
    training_data: Any = None,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    mesh: Mesh | None = None,
    trainable: Any = None,
    seed: int = 0,
    **auto: Any,
) -> tuple[Engine, optax.GradientTransformation, EpochLoader | None, Any]:
    """An engine that trains as a DeepSpeed configuration says.

    Args:
      model: a function from a random key to a model (`make_model` of `Zero.init`), born in its shards; or a model,
        which has to fit on one device first.
      config: a dict, the path of a JSON file, or a JSON text in base64.
      loss_fn: function of (model, batch, rng) as for `Zero.train_step`; by default the model is called with the batch
        (a tuple's parts as arguments) and returns the loss.
      optimizer: an optax transformation, or a function that makes one, in place of the configuration's.
      lr_scheduler: the schedule that `optimizer` was made with, so that `get_lr` can tell the learning rate; without
        an `optimizer`, in place of the configuration's scheduler.
      training_data: examples by index, with a length.
      collate_fn: from a list of examples to a batch; stacks their arrays by default.
      mesh: as for `Zero`; all devices on one axis by default, or what `mics_shard_size` says.
      trainable: as for `Zero`.
      seed: of the parameters, of all randomness, and of the data's order.
      **auto: values for what the configuration gives as "auto", by `zerojax.config.deepspeed.resolve`'s names.

    Returns:
      The engine, the optimizer, a data loader of micro-batches (or `None`), and the scheduler (or `None`).

    Raises:
      UserError: if the configuration is wrong, or it and the arguments name no optimizer or two.

    >>> import jax.numpy as jnp
    >>> config = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    >>> engine, *_ = initialize(
    ...     model=lambda rng: {"w": jax.random.normal(rng, (64, 32))},
    ...     loss_fn=lambda model, batch, rng: jnp.mean((batch @ model["w"]) ** 2),
    ...     config=config,
    ... )
    >>> loss = engine(jnp.ones((16, 64)))
    >>> loss = engine.backward(loss)
    >>> engine.step()
    >>> engine.global_steps, engine.was_step_applied()
    (1, True)
    """
    world_size = data_parallel_size(as_zero_mesh(mesh))
    resolved = deepspeed.resolve(config, world_size=world_size, **auto)
    settings = resolved.zero_arguments if mesh is None else {**resolved.zero_arguments, "mesh": mesh}
    zero = Zero(**settings, trainable=trainable)
    transform, schedules, momentum = _optimizer(resolved, optimizer, lr_scheduler)
    loader = None
    if training_data is not None:
        loader = EpochLoader(training_data, resolved.micro_batch_size * world_size, collate_fn, seed)
    engine = Engine(
        config=resolved,
        zero=zero,
        make_model=_make_model(model),
        loss_fn=_loss_fn(loss_fn),
        optimizer=transform,
        schedules=schedules,
        momentum=momentum,
        loader=loader,
        seed=seed,
    )
    if jax.process_index() == 0:
        for note in resolved.notes:
            print(f"{resolved.source}: {note}")
    return engine, transform, loader, engine.lr_scheduler


def _make_model(model: Any) -> Callable[[jax.Array], Any]:
    from flax import nnx

    if isinstance(model, nnx.Module):
        graph, state = nnx.split(model)
        return lambda rng: nnx.merge(graph, state)
    is_function = callable(model) and not jax.tree.leaves(model, is_leaf=lambda x: x is None) != [model]
    if is_function:
        return model
    return lambda rng: model


def _loss_fn(loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    if loss_fn is None:
        return lambda model, batch, rng: model(*batch) if isinstance(batch, tuple) else model(batch)
    return loss_fn


def _optimizer(
    config: deepspeed.DeepSpeedConfig, given: Any, schedule: Any
) -> tuple[optax.GradientTransformation, list[optax.Schedule], list[Callable[[int], Any]]]:
    """The transformation, and the learning rate and the momentum of each group as functions of the updates applied."""
    if given is not None:
        if config.optimizer is not None:
            raise UserError(
                f"optimizer was given beside {config.source}'s optimizer.type {config.optimizer.type!r}; accepted: one"
            )
        if config.scheduler is not None:
            raise UserError(
                f"optimizer was given beside {config.source}'s scheduler.type {config.scheduler.type!r}; accepted: an "
                "optimizer made with its schedule, and lr_scheduler=that schedule"
            )
        transform = given if hasattr(given, "init") else given()
        return transform, [] if schedule is None else [schedule], []
    if config.optimizer is None:
        raise UserError(
            f"{config.source} has no optimizer, and none was given; accepted: an optimizer section, or optimizer=..."
        )
    if schedule is not None:
        if config.scheduler is not None:
            raise UserError(f"lr_scheduler was given beside {config.source}'s scheduler; accepted: one")
        if not callable(schedule):
            raise UserError(f"lr_scheduler is {shown(schedule)}; accepted: a function of the number of updates applied")
        transform = optim.by_name(config.optimizer.type, config.optimizer.params, schedule=lambda rate: schedule)
        return transform, [schedule], []
    transform = deepspeed.make_optimizer(config.source, config.optimizer, config.scheduler)
    rates = optim.learning_rates(config.optimizer.type, config.optimizer.params)
    if config.scheduler is None:
        return transform, [functools.partial(_constant, rate) for rate in rates.values()], []
    schedules = [deepspeed.make_schedule(config.source, config.scheduler, rate) for rate in rates.values()]
    momentum = optim.momentum_by_name(config.scheduler.type, config.scheduler.params)
    return transform, schedules, [] if momentum is None else [lambda count: float(momentum(count))]


def _constant(rate: float, count: int) -> float:
    del count
    return rate
