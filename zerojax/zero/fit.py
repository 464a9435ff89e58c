"""Which other settings would fit on the devices: each is compiled for the same batch, from shapes alone."""

import dataclasses
import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.errors import UserError
from zerojax.mesh import data_parallel_size
from zerojax.zero.offload import names_of
from zerojax.zero.state import Layout
from zerojax.zero.step import Step

# Changes of `Zero`'s settings, in the order of what they cost in speed. That of micro_batches is a factor: TIMES stands
# for the smallest power of two that fits. What a run has already, or more of it, is left out.
#   stage 1, 2: sends what stage 0 sends, but for each micro-batch at stage 2; bf16: none, it rounds the computation;
#   stage 3: half as much again is sent; micro-batches: smaller matrices; remat: "dots" computes what is no product of
#   matrices again, "full" a third of everything; offload: the update waits for the host.
TIMES = "times"
CHANGES: tuple[Mapping[str, Any], ...] = (
    {"stage": 1},
    {"precision": "bf16"},
    {"stage": 2},
    {"stage": 3},
    {"remat": "dots"},
    {"micro_batches": TIMES},
    {"stage": 3, "micro_batches": TIMES},
    {"remat": "full"},
    {"stage": 3, "precision": "bf16", "micro_batches": TIMES},
    {"stage": 3, "precision": "bf16", "remat": "full", "micro_batches": TIMES},
    {"offload": "optimizer"},
    {"stage": 3, "offload": "optimizer"},
    {"stage": 3, "offload": ("optimizer", "params")},
    {"stage": 3, "offload": ("optimizer", "params"), "precision": "bf16", "remat": "full", "micro_batches": TIMES},
)
WANTED = 3
MOST_COMPILED = 16
LONGEST = 120.0  # seconds after which no other one is begun


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device that a compiled program takes.

    Attributes:
      arguments: what it is given.
      temporaries: what it makes for itself.
      outputs: what it returns, but for what takes the place of an argument.
    """

    arguments: int
    temporaries: int
    outputs: int

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        stats = compiled.memory_analysis()
        return cls(
            stats.argument_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.output_size_in_bytes - stats.alias_size_in_bytes,
        )

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.outputs


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a device needs under other settings.

    Attributes:
      changes: the settings that differ, under `Zero`'s names.
      memory: of a device, as compiled.
    """

    changes: Mapping[str, Any]
    memory: Memory

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.changes.items())


@dataclasses.dataclass(frozen=True)
class Search:
    """What a search for settings that fit has found.

    Attributes:
      fitting: at most `WANTED`, in the order of what they cost in speed.
      smallest: of all that was compiled, the one that needs least; `None` if nothing was.
      compiled: how many were compiled.
    """

    fitting: tuple[Fit, ...]
    smallest: Fit | None
    compiled: int


def device_limit(mesh: Mesh) -> int | None:
    """Bytes that a device of this process may hold; of an emulated one, its share of what this process may have.

    `None` where the backend does not say.
    """
    device = mesh.local_devices[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    host = host if allowed == resource.RLIM_INFINITY else min(host, allowed)
    return host // len(mesh.local_devices)


def compiled_only(lowered: jax.stages.Lowered, mesh: Mesh) -> Any:
    """The compiled program, without the runs that a GPU's compiler times its choices by: they allocate."""
    if mesh.devices.flat[0].platform == "gpu":
        return lowered.compile(compiler_options=dict[str, str | bool](xla_gpu_autotune_level="0"))
    return lowered.compile()


def changed(zero: Any, changes: Mapping[str, Any]) -> Any:
    """`Zero` with other settings."""
    return dataclasses.replace(zero, **changes)


def step_memory(zero: Any, step: Step, layout: Layout, batch: Any, changes: Mapping[str, Any]) -> Memory:
    """What a step on the same state and batch takes of a device under changed settings; nothing is allocated.

    Args:
      zero: the settings.
      step: made by them.
      layout: of the state it takes.
      batch: of `jax.ShapeDtypeStruct`s, with the global shapes.
      changes: settings of `Zero` to change.

    Raises:
      UserError: if the settings do not go together, or with the batch.
    """
    zero = changed(zero, changes)
    other = type(step)(step.loss_fn, zero.step_settings)
    return Memory.of(compiled_only(other.lower(zero.placement.moved(layout).abstract, batch), layout.mesh))


def settings_that_fit(
    zero: Any, memory_under: Callable[[Mapping[str, Any]], Memory], now: Memory, limit: int, rows: int
) -> Search:
    """Settings under which a device needs less than `limit` bytes, those first that cost least speed.

    Args:
      zero: the settings now.
      memory_under: what a device needs under changed ones, as `step_memory` says.
      now: what a device needs with those now.
      limit: bytes of a device.
      rows: how many rows of the batch a device has; 0 to leave micro-batches alone.
    """
    search = _Search(zero, memory_under, limit, {(): now}, time.monotonic() + LONGEST)
    for and_more in (False, True):  # first those that are not what fits already and something more
        for changes in CHANGES:
            if len(search.fitting) < WANTED:
                search.consider(changes, rows, and_more)
    smallest = min(search.tried, key=lambda fit: fit.memory.total, default=None)
    return Search(tuple(search.fitting), smallest, len(search.tried))


@dataclasses.dataclass
class _Search:
    zero: Any
    memory_under: Callable[[Mapping[str, Any]], Memory]
    limit: int
    known: dict[tuple[Any, ...], Memory]
    until: float
    fitting: list[Fit] = dataclasses.field(default_factory=list)
    tried: list[Fit] = dataclasses.field(default_factory=list)

    def consider(self, changes: Mapping[str, Any], rows: int, and_more: bool) -> None:
        """Tries changes, with the smallest number of micro-batches that fits if that is one of them."""
        asked = {name: value for name, value in changes.items() if self._is_less(name, value)}
        if not asked or len(asked) < len(changes) - ("stage" in changes):  # only the stage may be there already
            return
        if asked.get("micro_batches") is not TIMES:
            if and_more or not self._fits_with_less(asked):
                self._try(asked)
            return
        base = {name: value for name, value in asked.items() if name != "micro_batches"}
        for micro_batches in _multiples(self.zero.micro_batches, rows):
            # A micro-batch's share of the temporaries is the least that they can become.
            before, times = self.known.get(_key(base)), micro_batches // self.zero.micro_batches
            if before and before.arguments + before.temporaries / times >= self.limit:
                continue
            if not and_more and self._fits_with_less(base | {"micro_batches": micro_batches}):
                return
            fitted = len(self.fitting)
            found = self._try(base | {"micro_batches": micro_batches})
            if found is None or len(self.fitting) > fitted or (found.total < self.limit and not and_more):
                return

    def _fits_with_less(self, changes: Mapping[str, Any]) -> bool:
        """Whether some of these changes fit without the others."""
        return any(fit.changes.items() <= changes.items() for fit in self.fitting)

    def _is_less(self, name: str, value: Any) -> bool:
        """Whether a setting is one that the run does not have yet, and that may help on its devices."""
        current = getattr(self.zero, name)
        if name == "stage":
            return current < value
        if name == "precision":
            return current == "fp32"
        if name == "offload":
            has_own_memory = self.zero.mesh.devices.flat[0].platform != "cpu"
            return has_own_memory and not set(names_of(value)) <= set(names_of(current))
        return name == "micro_batches" or current is None

    def _try(self, changes: Mapping[str, Any]) -> Memory | None:
        """What a device needs under these; `None` if they do not go together or it is too late to try."""
        if _key(changes) in self.known:
            return self.known[_key(changes)]
        if len(self.tried) == MOST_COMPILED or time.monotonic() > self.until:
            return None
        try:
            memory = self.memory_under(changes)
        except (UserError, ValueError, jax.errors.JaxRuntimeError):
            return None
        self.known[_key(changes)] = memory
        self.tried.append(Fit(changes, memory))
        if memory.total < self.limit:
            self.fitting.append(self.tried[-1])
        return memory


def _key(changes: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(changes.items()))


def _multiples(micro_batches: int, rows: int) -> Iterator[int]:
    """More micro-batches, twice as many each time, that divide a device's rows.

    >>> list(_multiples(1, 8)), list(_multiples(3, 12))
    ([2, 4, 8], [6, 12])
    """
    most = rows // micro_batches
    for power in range(1, int(math.log2(max(most, 1))) + 1):
        if rows % (micro_batches * 2**power) == 0:
            yield micro_batches * 2**power


def rows_of(batch: Any, mesh: Mesh) -> int:
    """Rows of a global batch that a device has."""
    return jax.tree.leaves(batch)[0].shape[0] // data_parallel_size(mesh)
