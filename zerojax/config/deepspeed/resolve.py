"""From a DeepSpeed configuration to zerojax's settings."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.config.deepspeed.auto import fill
from zerojax.config.deepspeed.batch import MICRO, STEPS, TRAIN, resolve_batch
from zerojax.config.deepspeed.optimizer import make_optimizer, make_schedule
from zerojax.config.deepspeed.reader import AUTO, RawConfig, read
from zerojax.config.deepspeed.refusals import OFFLOAD, THRESHOLD, check_supported, notes, offload_is_asked
from zerojax.config.deepspeed.resolved import DeepSpeedConfig, Monitor, Named
from zerojax.errors import UserError, shown
from zerojax.precision import LossScale, Precision

PRECISIONS = ("fp32", "fp16", "bf16")


def resolve(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int,
    train_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    gradient_clipping: float | None = None,
    precision: str | None = None,
    learning_rate: float | None = None,
    betas: Sequence[float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    warmup_min_lr: float | None = None,
    warmup_steps: int | None = None,
    total_steps: int | None = None,
    hidden_size: int | None = None,
) -> DeepSpeedConfig:
    """What a configuration says, for a number of devices.

    Args:
      config: a dict, the path of a JSON file, or a JSON text in URL-safe base64.
      world_size: number of data-parallel devices.
      train_batch_size, micro_batch_size, gradient_accumulation_steps: for batch sizes that are "auto".
      gradient_clipping: for a clipping norm that is "auto"; 1 by default.
      precision: "fp32", "fp16" or "bf16", for `enabled` of fp16 and bf16; "fp32" by default.
      learning_rate: for the optimizer's `lr` and the schedule's `warmup_max_lr`.
      betas, eps, weight_decay: for the optimizer's; its own defaults by default.
      warmup_min_lr, warmup_steps, total_steps: for the schedule's; `warmup_min_lr` is 0 by default.
      hidden_size: for `stage3_param_persistence_threshold`, ten times as many elements.

    These values stand in where the configuration has "auto"; a value that it gives itself is taken.

    Raises:
      UserError: if the configuration cannot be read, contradicts itself, asks for what zerojax does not do, or has
        an "auto" that nothing replaces.

    >>> config = resolve({"train_batch_size": 32, "bf16": {"enabled": True}}, world_size=4)
    >>> config.micro_batch_size, config.precision.compute.name, config.gradient_clipping
    (8, 'bfloat16', 1.0)
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UserError(f"world_size is {shown(world_size)}; accepted: a positive integer")
    if precision not in (None, *PRECISIONS):
        raise UserError(f"precision is {shown(precision)}; accepted: {', '.join(map(repr, PRECISIONS))}")
    raw = read(config)
    given = {
        "gradient_clipping": gradient_clipping,
        "fp16.enabled": precision == "fp16",
        "bf16.enabled": precision == "bf16",
        "optimizer.params.lr": learning_rate,
        "optimizer.params.betas": betas,
        "optimizer.params.eps": eps,
        "optimizer.params.weight_decay": weight_decay,
        "scheduler.params.warmup_min_lr": warmup_min_lr,
        "scheduler.params.warmup_max_lr": learning_rate if learning_rate is not None else _written_rate(raw),
        "scheduler.params.warmup_num_steps": warmup_steps,
        "scheduler.params.total_num_steps": total_steps,
        THRESHOLD: hidden_size and 10 * hidden_size,
    }
    raw = fill(raw, given)
    check_supported(raw)
    optimizer, scheduler = _named(raw, "optimizer"), _named(raw, "scheduler")
    if optimizer is not None:
        make_optimizer(raw.source, optimizer, scheduler)
    elif scheduler is not None:  # the optimizer is the caller's, and so is its learning rate
        make_schedule(raw.source, scheduler, optimizer_lr=0.0)
    sizes = {TRAIN: train_batch_size, MICRO: micro_batch_size, STEPS: gradient_accumulation_steps}
    stage = raw.get("zero_optimization.stage")
    offload = tuple(
        name
        for name, (device, old, stages) in OFFLOAD.items()
        if stage in stages and offload_is_asked(raw, device, old)
    )
    return DeepSpeedConfig(
        source=raw.source,
        world_size=world_size,
        batch=resolve_batch(raw, world_size, sizes),
        stage=stage,
        precision=_precision(raw),
        gradient_clipping=float(raw.get("gradient_clipping")),
        min_shard_size=raw.values.get(THRESHOLD) if stage == 3 else None,
        offload_activations=raw.get("activation_checkpointing.cpu_checkpointing"),
        offload=offload,
        offload_path=_offload_path(raw) if "optimizer" in offload else None,
        mesh_axes=_mesh_axes(raw, world_size),
        optimizer=optimizer,
        scheduler=scheduler,
        tensorboard=_monitor(raw, "tensorboard"),
        csv_monitor=_monitor(raw, "csv_monitor"),
        steps_per_print=raw.get("steps_per_print"),
        wall_clock_breakdown=raw.get("wall_clock_breakdown"),
        dataloader_drop_last=raw.get("dataloader_drop_last"),
        tag_validation=raw.get("checkpoint.tag_validation"),
        notes=notes(raw),
    )


def _precision(raw: RawConfig) -> Precision:
    mode = next((mode for mode in ("fp16", "bf16") if raw.get(f"{mode}.enabled")), "fp32")
    compute = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[mode]
    wanted = raw.get("data_types.param_dtype")
    if wanted not in (None, compute):
        raise raw.error("data_types.param_dtype", f" is {wanted!r} beside {mode}; accepted: {compute!r} or null")
    master = "bfloat16" if mode == "bf16" and raw.get("bf16.bf16_master_weights_and_grads") else "float32"
    return Precision(
        compute=compute,
        reduce=raw.get("communication_data_type"),
        accumulate=raw.get("data_types.grad_accum_dtype") or master,
        master=master,
        loss_scale=_loss_scale(raw) if mode == "fp16" else None,
        skip_nonfinite=mode == "bf16" and raw.get("bf16.check_grad_overflow"),
    )


def _loss_scale(raw: RawConfig) -> LossScale:
    fp16 = lambda name: raw.get(f"fp16.{name}")
    if fp16("loss_scale"):  # what a dynamic scale would do is not looked at
        return LossScale(static=float(fp16("loss_scale")))
    names = {
        "initial_scale_power": "initial_power",
        "loss_scale_window": "window",
        "hysteresis": "hysteresis",
        "consecutive_hysteresis": "consecutive_hysteresis",
        "min_loss_scale": "minimum",
    }
    try:
        return LossScale(**{ours: fp16(theirs) for theirs, ours in names.items()})
    except UserError as error:
        field = str(error).removeprefix("LossScale.").partition(" ")[0]
        theirs = next(theirs for theirs, ours in names.items() if ours == field)
        raise raw.error(f"fp16.{theirs}", str(error).removeprefix(f"LossScale.{field}")) from None


def _offload_path(raw: RawConfig) -> str | None:
    """Where the optimizer's state is in files, if it is."""
    section = "zero_optimization.offload_optimizer"
    if raw.get(f"{section}.device") != "nvme":
        return None
    path = raw.get(f"{section}.nvme_path")
    if not path:
        raise raw.error(f"{section}.nvme_path", f" is {shown(path)} beside the device 'nvme'; accepted: a directory")
    return path


def _mesh_axes(raw: RawConfig, world_size: int) -> dict[str, int] | None:
    shards = raw.get("zero_optimization.mics_shard_size")
    if shards == -1:
        return None
    if shards < 1 or world_size % shards:
        raise raw.error(
            "zero_optimization.mics_shard_size",
            f" is {shards}; accepted: a divisor of the {world_size} devices, or -1 for all of them",
        )
    return {"replica": world_size // shards, "data": shards}


def _named(raw: RawConfig, section: str) -> Named | None:
    written = raw.under(section)
    if not written:
        return None
    if "type" not in written:
        raise raw.error(f"{section}.type", f" is not given beside {section}.{next(iter(written))}; accepted: a name")
    return Named(written["type"], raw.under(f"{section}.params"))


def _monitor(raw: RawConfig, name: str) -> Monitor:
    return Monitor(*(raw.get(f"{name}.{field}") for field in ("enabled", "output_path", "job_name")))


def _written_rate(raw: RawConfig) -> float | None:
    rate = raw.get("optimizer.params.lr")
    return None if rate == AUTO else rate
