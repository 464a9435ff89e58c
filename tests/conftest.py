"""Eight devices on any machine, set before jax starts, and programs that compile fast rather than run fast."""

import importlib.metadata
import os

_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",  # of the machine code alone: the program and its collectives are the same
    "--xla_llvm_disable_expensive_passes": "true",
}

if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"  # halves the time to compile; later versions have no such choice

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{k}={v}" for k, v in _FLAGS.items() if k not in _given)]).strip()
