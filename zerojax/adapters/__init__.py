"""How a model of the user's kind is taken apart into parameters, and made again with parameters found at their use."""

from zerojax.adapters.adapter import Adapter, Parts
from zerojax.adapters.blocks import Block, Module
from zerojax.adapters.deferred import Deferred, block, is_deferred, is_marked_in_norm, mark_use, marked_shape, read
from zerojax.adapters.kinds import take_apart

__all__ = [
    "Adapter",
    "Block",
    "Deferred",
    "Module",
    "Parts",
    "block",
    "is_deferred",
    "is_marked_in_norm",
    "mark_use",
    "marked_shape",
    "read",
    "take_apart",
]
