"""How a model of the user's kind is taken apart into parameters, and made again with parameters found at their use."""

from zerojax.adapters.adapter import Adapter, Parts
from zerojax.adapters.deferred import BLOCK_ENTRY, Deferred, block, is_deferred, read
from zerojax.adapters.kinds import take_apart

__all__ = ["BLOCK_ENTRY", "Adapter", "Deferred", "Parts", "block", "is_deferred", "read", "take_apart"]
