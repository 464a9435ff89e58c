"""What a GPT's training step needs of a device's memory, from the sizes of the model alone.

ZeRO's formulas (`zerojax.zero.formulas`) give the model states. Beside them a step holds activations, and here is what
has to be there at the fullest moments of one: the bound that `benchmarks/memory.py` holds compiled programs against.
Everything is in bytes of one device.
"""

import dataclasses
from typing import Literal

from zerojax.zero import formulas

Remat = Literal["none", "dots", "full", "offload"]
FP32 = 4
ADAM = 8  # bytes for each parameter of two fp32 moments
TURNS = 2  # whose arrays are on the device together, as in zerojax.zero.turns

# A block's activations that the backward pass reads, in widths of the model for each token: both norms' normalised
# inputs (2) and outputs (2), queries, keys and values (3), attention's output (1), the MLP's hidden layer before and
# after its activation (8).
READ = 16
# Gradients beside these, in widths: of the block's output (1) and of the MLP's hidden layer (4).
PASSING = 5
# What XLA's causal attention in four blocks of queries keeps of its slices beside: the queries (1), and the keys and
# values of the first and the third block (2 x (1/4 + 3/4)), which are not contiguous in the projection's output.
SLICES = 3
VISIBLE = 5 / 8  # of the scores, those that four blocks of queries compute
# Products with weights that "dots" keeps, in widths: queries, keys and values (3), the projection back (1), the MLP's
# first (4). Nothing reads the MLP's second.
DOTS = 8
INPUT = 1  # of a block, which a policy always keeps


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A GPT-2: learned positions, a tied head, biases, an MLP of four times the width.

    Attributes:
      vocab_size: number of tokens.
      dim: the width.
      layers: number of blocks.
      heads: number of attention heads.
      length: of the sequences, and of the table of positions.

    >>> round(Sizes(50304, 2048, 24, 16, 1024).parameters / 1e9, 2)
    1.31
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    length: int

    @property
    def block(self) -> int:
        """Parameters of a block: four matrices, their biases, and two norms."""
        return 12 * self.dim**2 + 13 * self.dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, which is the head too."""
        return self.vocab_size * self.dim

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.embedding + self.length * self.dim + 2 * self.dim


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes of one device, and of host memory for it.

    Attributes:
      state: master parameters and optimizer state on the device.
      host: the same in host memory.
      copy: parameters in the compute dtype, whole, at stages 0 to 2.
      gradients: of all parameters, as they are summed.
      kept: activations that wait for the backward pass.
      host_kept: the same in host memory.
      head: at the loss: the logits and their gradient, and the head's gradient.
      layer: in a block's backward pass: what it reads, the gradients of its activations, its whole weights at stage 3,
        its whole gradients from stage 2 on, and the head's gradient, which waits for the embedding's.
      turns: in the update of offloaded state: what two turns of the largest leaf bring, the results of one of them, and
        the gradients of both.
    """

    state: float
    host: float
    copy: float
    gradients: float
    kept: float
    host_kept: float
    head: float
    layer: float
    turns: float

    @property
    def formula(self) -> float:
        """ZeRO's model states within a step."""
        return self.state + self.copy + self.gradients

    @property
    def total(self) -> float:
        """At the fullest of three moments: the loss, a block's backward pass, the update."""
        return max(
            self.state + self.copy + self.kept + self.head,
            self.formula + self.kept + self.layer,
            self.state + self.turns,
        )

    @property
    def bound(self) -> float:
        """What the activations add to the formula at that moment."""
        return self.total - self.formula


def kept(sizes: Sizes, rows: int, remat: Remat, compute: int) -> float:
    """Bytes that a block keeps on the device for its backward pass.

    Args:
      sizes: of the model.
      rows: sequences of one device.
      remat: the policy.
      compute: bytes of an element.

    >>> small = Sizes(vocab_size=512, dim=64, layers=2, heads=4, length=128)
    >>> [int(kept(small, 1, remat, 4)) for remat in ("full", "offload", "dots")]
    [32768, 32768, 294912]
    """
    tokens = rows * sizes.length
    if remat == "none":
        # The softmax keeps its exponentials in fp32, and their quotients in the dtype that the product takes.
        scores = sizes.heads * sizes.length * VISIBLE * (FP32 + compute)
        return tokens * ((READ + SLICES) * sizes.dim * compute + scores)
    widths = INPUT + (DOTS if remat == "dots" else 0)
    return tokens * widths * sizes.dim * compute


def budget(
    sizes: Sizes,
    rows: int,
    shards: int,
    stage: int,
    *,
    remat: Remat = "none",
    offload: tuple[str, ...] = (),
    compute: int = 4,
    chunks: int | None = None,
) -> Budget:
    """What a step of AdamW on fp32 master parameters needs, layers scanned, one micro-batch.

    Args:
      sizes: of the model.
      rows: sequences of one device.
      shards: N, the number of devices.
      stage: 0 to 3.
      remat: the policy; `Zero.remat`.
      offload: what lies in host memory; `Zero.offload`.
      compute: bytes of the dtype that is computed in: 4, or 2 for bf16 and fp16.
      chunks: of the logits, as in `next_token_loss`.

    >>> small = Sizes(vocab_size=512, dim=64, layers=2, heads=4, length=128)
    >>> whole, parts = (budget(small, 1, 8, stage, remat="full") for stage in (0, 3))
    >>> whole.state / parts.state
    8.0
    """
    p, tokens = sizes.parameters, rows * sizes.length
    masters, moments = (formulas.stored(p, shards, stage, itemsize=each) for each in (FP32, ADAM))
    in_host = masters * ("params" in offload) + moments * ("optimizer" in offload)
    has_copy = stage < 3 and (compute < FP32 or stage > 0 or "params" in offload)
    # Up to stage 1 gradients stay in the dtype they are made in until they are reduced.
    gradient = compute if stage < 2 else FP32
    gradients = formulas.accumulated(p, shards, stage, itemsize=gradient)
    logits = tokens * sizes.vocab_size * compute
    of_head = sizes.embedding * (FP32 if chunks else compute)
    whole_weights = sizes.block * compute * (stage == 3) + sizes.block * compute * (stage >= 2)
    waiting = of_head if stage >= 2 else of_head - sizes.embedding * compute
    widths = READ - (DOTS if remat == "dots" else 0)  # the products that were kept are not made again
    again = tokens * compute * (widths * sizes.dim + sizes.heads * sizes.length * VISIBLE) * (remat != "none")
    of_turn = FP32 * ("params" in offload) + ADAM * ("optimizer" in offload)
    largest = sizes.layers * 4 * sizes.dim**2 / (shards if stage else 1)
    return Budget(
        state=masters + moments - in_host,
        host=in_host,
        copy=p * compute * has_copy,
        gradients=gradients,
        kept=sizes.layers * kept(sizes, rows, remat, compute),
        host_kept=sizes.layers * tokens * DOTS * sizes.dim * compute * (remat == "offload"),
        head=2 * logits / (chunks or 1) + of_head + sizes.embedding * compute * (stage == 3),
        layer=whole_weights + waiting + again + tokens * PASSING * sizes.dim * compute,
        turns=((TURNS + 1) * of_turn + TURNS * gradient) * largest * bool(offload),
    )


@dataclasses.dataclass(frozen=True)
class Fit:
    """Settings that fit, and the bytes of a device that they need by the formulas.

    Attributes:
      stage, remat, offload: of `Zero`.
      chunks: of `next_token_loss`.
      bytes: at the fullest moment of a step.
    """

    stage: int
    remat: Remat
    offload: tuple[str, ...]
    chunks: int | None
    bytes: float


FREE = 0.1  # of a device's memory, for what is neither state nor of the step: context, collectives, fragments
_POLICIES: tuple[Remat, ...] = ("none", "dots", "full")
_OFFLOADS: tuple[tuple[str, ...], ...] = (("optimizer",), ("optimizer", "params"))


def cheapest(sizes: Sizes, rows: int, devices: int, memory: float) -> Fit | None:
    """The settings that cost the least time of those that fit, in bf16 with fp32 masters and Adam; `None` if none do.

    Tried in this order: no rematerialisation, products kept, inputs alone; for each, stages 1 to 3 (0 on one device),
    and the logits at once or in 8 chunks; then with offload.

    Args:
      sizes: of the model.
      rows: sequences of one device.
      devices: N.
      memory: bytes of one device, of which a tenth is left free.

    >>> cheapest(Sizes(50304, 2048, 24, 16, 1024), rows=2, devices=8, memory=24e9).stage
    1
    """
    stages = (1, 2, 3) if devices > 1 else (0,)
    everywhere: list[tuple[int, Remat, tuple[str, ...]]] = [
        (stage, remat, ()) for remat in _POLICIES for stage in stages
    ]
    offloading: list[tuple[int, Remat, tuple[str, ...]]] = [(stages[-1], "full", offload) for offload in _OFFLOADS]
    for stage, remat, offload in everywhere + offloading:
        for chunks in (None, 8):
            how = budget(sizes, rows, devices, stage, remat=remat, offload=offload, compute=2, chunks=chunks)
            if how.total <= (1 - FREE) * memory:
                return Fit(stage, remat, offload, chunks, how.total)
    return None
