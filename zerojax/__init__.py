"""zerojax: sharded training in JAX, as ZeRO partitions it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.adapters import block as block
    from zerojax.checkpoint import restore as restore
    from zerojax.checkpoint import save as save
    from zerojax.engine import initialize as initialize
    from zerojax.errors import UserError as UserError
    from zerojax.mesh import make_mesh as make_mesh
    from zerojax.precision import LossScale as LossScale
    from zerojax.precision import Precision as Precision
    from zerojax.remat import Remat as Remat
    from zerojax.weighted import Weighted as Weighted
    from zerojax.zero import State as State
    from zerojax.zero import Zero as Zero
    from zerojax.zero import all_examples as all_examples

__version__ = "0.1.0"

# Where each public name lives. They are imported at first use: the command answers --help without jax, and --emulate
# has to set what jax reads when it is imported.
_HOMES = {
    "LossScale": "zerojax.precision",
    "Precision": "zerojax.precision",
    "Remat": "zerojax.remat",
    "State": "zerojax.zero",
    "UserError": "zerojax.errors",
    "Weighted": "zerojax.weighted",
    "Zero": "zerojax.zero",
    "all_examples": "zerojax.zero",
    "block": "zerojax.adapters",
    "initialize": "zerojax.engine",
    "make_mesh": "zerojax.mesh",
    "restore": "zerojax.checkpoint",
    "save": "zerojax.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
