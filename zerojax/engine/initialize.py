"""`zerojax.initialize`: an engine from a model and a DeepSpeed configuration."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zerojax.config import deepspeed
from zerojax.engine.engine import Engine
from zerojax.engine.loader import EpochLoader
from zerojax.engine.models import model_s_own_loss, source_of
from zerojax.engine.optimizers import optimizer_of
from zerojax.engine.schedule import Scheduler
from zerojax.errors import UserError, nearest
from zerojax.mesh import SHARD_AXIS, as_zero_mesh, data_parallel_size
from zerojax.zero import Zero

OWN = {"model", "config", "loss_fn", "optimizer", "lr_scheduler", "training_data", "collate_fn", "mesh", "trainable"}


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
) -> tuple[Engine, optax.GradientTransformation, EpochLoader | None, Scheduler | None]:
    """An engine that trains as a DeepSpeed configuration says.

    Args:
      model: a function from a random key to a model (`make_model` of `Zero.init`), born in its shards; or a model,
        whose arrays are copied into their shards.
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
    accepted = set(inspect.signature(deepspeed.resolve).parameters) - {"config", "world_size"}
    for name in auto:
        if name not in accepted:
            raise UserError(f"initialize has no argument {name!r}{nearest(name, sorted(accepted | OWN))}")
    world_size = data_parallel_size(as_zero_mesh(mesh))
    resolved = deepspeed.resolve(config, world_size=world_size, **auto)
    loader = None
    if training_data is not None:
        rows = resolved.micro_batch_size * world_size
        loader = EpochLoader(training_data, rows, collate_fn, seed, resolved.dataloader_drop_last)
    engine = Engine(
        config=resolved,
        zero=Zero(**_zero_arguments(resolved, mesh), trainable=trainable),
        model=source_of(model),
        loss_fn=model_s_own_loss if loss_fn is None else loss_fn,
        optimizer=optimizer_of(resolved, optimizer, lr_scheduler),
        loader=loader,
        seed=seed,
    )
    if jax.process_index() == 0:
        for note in resolved.notes:
            print(f"{resolved.source}: {note}")
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _zero_arguments(config: deepspeed.DeepSpeedConfig, mesh: Mesh | None) -> dict[str, Any]:
    if mesh is None:
        return config.zero_arguments
    if config.mesh_axes is not None and config.mesh_axes["data"] != mesh.shape[SHARD_AXIS]:
        raise UserError(
            f"mesh was given with {mesh.shape[SHARD_AXIS]} devices on its {SHARD_AXIS!r} axis beside {config.source}'s "
            f"zero_optimization.mics_shard_size {config.mesh_axes['data']}; accepted: one of the two, or equal ones"
        )
    return {**config.zero_settings, "mesh": mesh}
