"""Eight devices on any machine, before jax starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FORCE = "--xla_force_host_platform_device_count"
if _FORCE not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FORCE}=8".strip()
