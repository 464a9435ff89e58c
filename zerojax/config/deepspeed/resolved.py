"""A DeepSpeed configuration in zerojax's terms, for a number of devices."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerojax.config.deepspeed.batch import Batch
from zerojax.mesh import make_mesh
from zerojax.precision import Precision


@dataclasses.dataclass(frozen=True)
class Named:
    """An optimizer or a schedule by DeepSpeed's name, with its parameters under DeepSpeed's names."""

    type: str
    params: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Monitor:
    """Where one kind of log goes: `output_path`/`job_name`."""

    enabled: bool
    output_path: str
    job_name: str


@dataclasses.dataclass(frozen=True)
class DeepSpeedConfig:
    """What a DeepSpeed configuration says, complete.

    Attributes:
      source: what messages call the configuration.
      world_size: number of data-parallel devices.
      batch: the three batch sizes, in rows.
      stage: the ZeRO stage.
      precision: dtypes and loss scale.
      gradient_clipping: the global L2 norm that gradients are scaled down to; 0 for none.
      min_shard_size: parameters with fewer elements stay whole; `None` for `Zero`'s default.
      offload_activations: whether what the backward pass needs waits in the host's memory.
      offload: what is in host memory between steps, under `Zero.offload`'s names.
      offload_path: the directory where the optimizer's state is in files instead, or `None`.
      mesh_axes: "replica" and "data" of `make_mesh`, or `None` for all devices on one axis.
      optimizer: the optimizer, or `None`.
      scheduler: the learning rate's schedule, or `None`.
      tensorboard, csv_monitor: the logs.
      steps_per_print: steps between printed lines, or `None` for no lines.
      wall_clock_breakdown: whether the times of a step are told.
      dataloader_drop_last: whether a last batch that is not full is left out.
      tag_validation: "WARN", "IGNORE" or "FAIL" where processes give a checkpoint different names.
      notes: a line for each key that was given and needs nothing.
    """

    source: str
    world_size: int
    batch: Batch
    stage: int
    precision: Precision
    gradient_clipping: float
    min_shard_size: int | None
    offload_activations: bool
    offload: tuple[str, ...]
    offload_path: str | None
    mesh_axes: Mapping[str, int] | None
    optimizer: Named | None
    scheduler: Named | None
    tensorboard: Monitor
    csv_monitor: Monitor
    steps_per_print: int | None
    wall_clock_breakdown: bool
    dataloader_drop_last: bool
    tag_validation: str
    notes: tuple[str, ...]

    @property
    def train_batch_size(self) -> int:
        """Rows of a step on all devices."""
        return self.batch.train

    @property
    def micro_batch_size(self) -> int:
        """Rows that a device computes at once."""
        return self.batch.micro

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.batch.steps

    @property
    def zero_settings(self) -> dict[str, Any]:
        """Arguments of `zerojax.Zero` but its mesh; no device is looked at."""
        settings: dict[str, Any] = {
            "stage": self.stage,
            "precision": self.precision,
            "micro_batches": self.batch.steps,
            "clip_norm": self.gradient_clipping or None,
        }
        if self.offload_activations:
            settings["remat"] = "offload"
        if self.min_shard_size is not None:
            settings["min_shard_size"] = self.min_shard_size
        if self.offload:
            settings["offload"] = self.offload
        if self.offload_path is not None:
            settings["offload_path"] = self.offload_path
        return settings

    @property
    def zero_arguments(self) -> dict[str, Any]:
        """Arguments of `zerojax.Zero`; a mesh over all devices is among them where `mics_shard_size` asks for one.

        Raises:
          UserError: if there are not `world_size` devices.
        """
        if self.mesh_axes is None:
            return self.zero_settings
        return {**self.zero_settings, "mesh": make_mesh(replica=self.mesh_axes["replica"], data=self.mesh_axes["data"])}
