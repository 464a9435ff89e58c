"""GPUs that are not there: devices that programs can be compiled for, and nothing run on.

They need the compiler of JAX's CUDA plugin and no driver:

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12

each of the first two in the version of jaxlib. `prepare` comes before JAX looks for devices.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
from jax._src.interpreters import pxla
from jax.experimental import topologies
from jax.sharding import NamedSharding

from zerojax.zero import partition, state, step, zero

NEEDED = ("jax_cuda12_plugin", "jax_plugins.xla_cuda12")
FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")  # what would be tried out on a GPU
PER_HOST = 8


def prepare(devices: int) -> None:
    """Before JAX looks for devices: it is to look for no GPU, and to emulate this many on the CPU."""
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = " ".join((*FLAGS, f"--xla_force_host_platform_device_count={devices}"))


def h100(count: int) -> list[Any]:
    """`count` H100 of 80 GB, up to eight in a host.

    Raises:
      SystemExit: if the compiler's parts are not installed.
    """
    missing = [name for name in NEEDED if not _installed(name)]
    if missing:
        raise SystemExit(
            f"compiling for an H100 needs {', '.join(missing)}: "
            "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12 (the first two in jaxlib's "
            "version); without: --target cpu"
        )
    per_host = min(count, PER_HOST)
    _give_memory_kinds()
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="h100",
        topology=f"1x{count // per_host}x{per_host}",
        target_config=(Path(__file__).parent / "h100.pbtxt").read_text(encoding="utf-8"),
    ).devices


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _give_memory_kinds() -> None:
    """Lets zerojax's shardings on such devices say "pinned_host".

    JAX asks a device for its kinds of memory; these have none to answer with, and a sharding drops the kind it was
    given. So zerojax gets shardings that keep it, and JAX's comparison of them with what the compiler returns, which
    knows no kinds, is passed over. This reaches into JAX 0.12's insides, and is of use for such devices alone.
    """

    class Sharding(NamedSharding):
        def __init__(self, mesh: Any, spec: Any, *, memory_kind: str | None = None, _logical_device_ids: Any = None):
            super().__init__(mesh, spec, _logical_device_ids=_logical_device_ids)
            self.kind = memory_kind or "device"

        memory_kind = property(lambda self: self.kind)

        def _key(self) -> Any:
            return self.mesh, self.spec, self.memory_kind

        def __hash__(self) -> int:
            return hash(self._key())

        def __eq__(self, other: Any) -> bool:
            return isinstance(other, NamedSharding) and self._key() == (other.mesh, other.spec, other.memory_kind)

        def update(self, **changes: Any) -> "Sharding":
            of = {"mesh": self.mesh, "spec": self.spec, "memory_kind": self.kind} | changes
            return Sharding(of["mesh"], of["spec"], memory_kind=of["memory_kind"])

    for module in (partition, state, step, zero):
        module.NamedSharding = Sharding  # type: ignore[misc]
    compare = pxla._maybe_get_and_check_out_shardings

    def passing(executable: Any, shardings: Any, *rest: Any) -> Any:
        try:
            return compare(executable, shardings, *rest)
        except AssertionError:
            return shardings

    pxla._maybe_get_and_check_out_shardings = passing
