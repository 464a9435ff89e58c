"""ZeRO itself: the stage table, the partition, the gather points, the step."""

from zerojax.zero.gather import all_examples
from zerojax.zero.state import Layout, State
from zerojax.zero.step import EvalStep, LossStep, TrainStep
from zerojax.zero.zero import Zero

__all__ = ["EvalStep", "Layout", "LossStep", "State", "TrainStep", "Zero", "all_examples"]
