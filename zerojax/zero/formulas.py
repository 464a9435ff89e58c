"""ZeRO's formulas: bytes of model state per device, and bytes that a device sends in a step.

Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054. Sections 3 and 5 give the memory, section 7 the communication. N is the number of shards, P of
parameters. A ring's (N - 1) / N, which the paper rounds to 1, is kept.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelStates:
    """Bytes per device of the paper's model states.

    Attributes:
      parameters: the copy in the compute dtype.
      gradients: one for each parameter.
      optimizer: the fp32 master copy and the optimizer's own state.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_states(
    parameters: int,
    shards: int,
    stage: int,
    *,
    compute: float = 2,
    gradient: int = 2,
    master: float = 4,
    optimizer: float = 8,
) -> ModelStates:
    """The paper's model states (figure 1): 16P at stage 0, 4P + 12P/N, 2P + 14P/N and 16P/N at 1, 2 and 3 by default.

    Args:
      parameters: P.
      shards: N.
      stage: 0 to 3.
      compute: bytes for each parameter of the copy that the model computes with.
      gradient: bytes for each parameter of its gradient.
      master: bytes for each parameter of the copy that the optimizer updates.
      optimizer: bytes for each parameter of the optimizer's state; Adam's two fp32 moments are 8.

    >>> [model_states(7_500_000_000, 64, stage).total / 1e9 for stage in range(4)]  # the paper's figure 1, GB
    [120.0, 31.40625, 16.640625, 1.875]
    """
    return ModelStates(
        parameters=parameters * compute / (shards if stage >= 3 else 1),
        gradients=parameters * gradient / (shards if stage >= 2 else 1),
        optimizer=parameters * (master + optimizer) / (shards if stage >= 1 else 1),
    )


def stored(elements: float, shards: int, stage: int, *, itemsize: float) -> float:
    """Bytes per device, between steps, of master parameters or optimizer state: in shards at stages 1 to 3.

    Between steps nothing else of the model states is there: the compute copy and the gradients live within the step.

    >>> stored(1000, 8, 0, itemsize=4), stored(1000, 8, 3, itemsize=4)
    (4000.0, 500.0)
    """
    return elements * itemsize / (shards if stage >= 1 else 1)


def accumulated(parameters: int, shards: int, stage: int, *, itemsize: int = 4) -> float:
    """Bytes per device of the accumulated gradients: whole at stages 0 and 1, in shards at stages 2 and 3.

    >>> accumulated(1000, 8, 1), accumulated(1000, 8, 2)
    (4000.0, 500.0)
    """
    return parameters * itemsize / (shards if stage >= 2 else 1)


@dataclasses.dataclass(frozen=True)
class Communication:
    """Bytes that one device sends in one step.

    Attributes:
      gather: all-gathers of parameters, over the shards.
      reduce: reductions of gradients over the shards; at stage 0, the all-reduce over all devices.
      replicate: all-reduces of shards of gradients over the replicas.
    """

    gather: float
    reduce: float
    replicate: float

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.replicate


def communication(
    parameters: int,
    shards: int,
    stage: int,
    *,
    micro_batches: int = 1,
    replicas: int = 1,
    compute: float = 2,
    wire: float | None = None,
    reduce: int | None = None,
    accumulate: int = 4,
) -> Communication:
    """Bytes sent per device and step: twice the parameters' at stages 0 to 2, three times at stage 3 (section 7).

    With M micro-batches, stage 1 still reduces once (the accumulated sum), stage 2 gathers once and reduces M times,
    stage 3 gathers 2M times (for the forward and the backward pass) and reduces M times.

    Args:
      parameters: P.
      shards: N.
      stage: 0 to 3.
      micro_batches: M.
      replicas: copies of the partition, whose gradients are all-reduced once a step.
      compute: bytes an element of what the model sees, on average.
      wire: bytes an element of what is gathered; by default `compute`.
      reduce: bytes an element of what is reduced; by default those of the gradient there: `compute`, but
        `accumulate` for a sum over micro-batches and for an accumulator in shards.
      accumulate: bytes an element of the accumulated gradients.

    >>> [communication(1, 8, stage, compute=1).total for stage in range(4)]
    [1.75, 1.75, 1.75, 2.625]
    >>> [communication(1, 8, stage, compute=1, accumulate=2, micro_batches=4).total for stage in (1, 2, 3)]
    [2.625, 4.375, 10.5]
    """
    ring = (shards - 1) / shards
    at_use = compute if reduce is None else reduce
    at_end = accumulate if reduce is None and micro_batches > 1 else at_use
    in_shards = accumulate if reduce is None and stage >= 2 else at_end
    if stage == 0:
        devices = shards * replicas
        return Communication(gather=0.0, reduce=2 * (devices - 1) / devices * parameters * at_end, replicate=0.0)
    gathers = 2 * micro_batches if stage == 3 else 1
    return Communication(
        gather=gathers * ring * parameters * (compute if wire is None else wire),
        reduce=ring * parameters * (at_end if stage == 1 else micro_batches * at_use),
        replicate=2 * (replicas - 1) / replicas * parameters / shards * in_shards,
    )
