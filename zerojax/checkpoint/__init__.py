"""Checkpoints over Orbax: complete or invisible, checked when read, restored on any mesh."""

from zerojax.checkpoint.errors import CheckpointError as CheckpointError
from zerojax.checkpoint.runs import Checkpoints as Checkpoints
from zerojax.checkpoint.single import load_extra as load_extra
from zerojax.checkpoint.single import restore as restore
from zerojax.checkpoint.single import save as save
