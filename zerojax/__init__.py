"""zerojax: sharded training in JAX, as ZeRO partitions it."""

from zerojax.adapters import block as block
from zerojax.errors import UserError as UserError
from zerojax.mesh import make_mesh as make_mesh
from zerojax.precision import Precision as Precision
from zerojax.weighted import Weighted as Weighted
from zerojax.zero import State as State
from zerojax.zero import Zero as Zero

__version__ = "0.1.0"
