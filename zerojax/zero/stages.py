"""ZeRO's stages as a table: what happens at each place where a training step touches a parameter."""

import dataclasses
import enum
import numbers

from zerojax.errors import UserError, shown


class Gather(enum.Enum):
    """When the compute-dtype copy of a partitioned parameter is gathered."""

    NEVER = "never: it is whole"
    ONCE = "once a step, all of it"
    AT_USE = "where it is used, and again in the backward pass"


class Reduce(enum.Enum):
    """When the gradient of a parameter is reduced over devices (and scattered, where the parameter is partitioned)."""

    ONCE = "once a step, after the last micro-batch"
    AT_USE = "where the parameter was used, into a partitioned accumulator"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One row: a stage of ZeRO (Rajbhandari et al., arXiv:1910.02054).

    Attributes:
      number: 0 to 3.
      partitions: whether master parameters and optimizer state live in shards between steps.
      gather: when the compute-dtype copy is gathered.
      reduce: when gradients are reduced.
    """

    number: int
    partitions: bool
    gather: Gather
    reduce: Reduce


TABLE = (
    Stage(0, partitions=False, gather=Gather.NEVER, reduce=Reduce.ONCE),
    Stage(1, partitions=True, gather=Gather.ONCE, reduce=Reduce.ONCE),
    Stage(2, partitions=True, gather=Gather.ONCE, reduce=Reduce.AT_USE),
    Stage(3, partitions=True, gather=Gather.AT_USE, reduce=Reduce.AT_USE),
)


def stage_of(number: int) -> Stage:
    """The row of the table for `number`.

    Raises:
      UserError: if there is no such stage.
    """
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number not in range(len(TABLE)):
        raise UserError(f"stage is {shown(number)}; accepted: 0, 1, 2 or 3")
    return TABLE[number]
