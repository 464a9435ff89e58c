"""DeepSpeed's way of working over `zerojax.Zero`: forward, backward, step."""

from zerojax.engine.engine import Engine as Engine
from zerojax.engine.initialize import initialize as initialize
from zerojax.engine.loader import EpochLoader as EpochLoader
from zerojax.engine.loss import PendingLoss as PendingLoss
from zerojax.engine.schedule import Scheduler as Scheduler
