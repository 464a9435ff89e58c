"""The largest buffers of a compiled step at its peak, and the lines of source that made them."""

import dataclasses
import functools
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from zerojax.zero import liveness
from zerojax.zero.hlo import Computation, Instruction, Module, parse_hlo

SHOWN = 5

_PACKAGE = Path(__file__).parents[1]
_OWN_STEP = str(Path(__file__).with_name("step.py"))
_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_LIBRARIES = ("jax", "jaxlib", "flax", "optax")
_PATH_PART = re.compile(r"\.(\w+)|\[(?:'([^']*)'|(\d+))\]")
# What lays an array out anew: the array is what its operand is.
_CARRIES = {"bitcast", "copy", "convert", "transpose", "reshape", "optimization-barrier"}
# How a scan keeps its arrays. Where it is known what made them, that is the better name.
_KEEPS = {"while", "dynamic_slice", "dynamic_update_slice", "broadcast_in_dim", "copy"}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Buffers of a device that one line of the program makes, alike.

    Attributes:
      bytes: of all of them.
      count: how many there are at the step's peak.
      dtype: XLA's name of it, as in "bf16".
      shape: of each.
      name: of an argument, the leaf's, as in "opt_state/0/mu/head/kernel"; else the operation's, as in "dot_general".
      phase: "forward", "backward" or "update"; "state" or "batch" of an argument; empty where it is not known.
      source: "file:line" of the model, or of whatever is next to it; a path under the working directory is given from
        there. Empty where it is not known.
    """

    bytes: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    name: str
    phase: str
    source: str


def largest_buffers(hlo_text: str, most: int = SHOWN, results: Sequence[str] = ()) -> tuple[Buffer, ...]:
    """The largest buffers at the peak of a compiled program, arguments included.

    Args:
      hlo_text: `compiled.as_text()`.
      most: how many to return.
      results: the names of the leaves that the program returns, if it makes a state.

    >>> found = largest_buffers('''HloModule m, is_scheduled=true
    ... ENTRY main {
    ...   x = f32[8]{0} parameter(0), metadata={op_name="batch[\\\\'x\\\\']"}
    ...   y = f32[64]{0} broadcast(x), metadata={op_name="jit(f)/jvp()/tile" source_file="/net.py" source_line=3}
    ...   ROOT z = f32[] custom-call(y)
    ... }''', most=2)
    >>> [(b.bytes, b.name, b.phase, b.source) for b in found]
    [(256, 'tile', 'forward', '/net.py:3'), (32, 'batch/x', 'batch', '')]
    """
    module = parse_hlo(hlo_text)
    program = _Program.of(module)
    alike: dict[Buffer, int] = {}
    for buffer in liveness.live_at_peak(module):
        described = _described(buffer, program, results)
        alike[described] = alike.get(described, 0) + 1
    found = [dataclasses.replace(b, bytes=b.bytes * count, count=count) for b, count in alike.items()]
    return tuple(sorted(found, key=lambda b: -b.bytes)[:most])


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program that is followed back from an instruction to what made its array.

    Attributes:
      module: the program.
      fusions: for each fused computation, by identity, where the fusion stands.
      bodies: the computations that are bodies of loops, by identity.
    """

    module: Module
    fusions: dict[int, tuple[Computation, Instruction]]
    bodies: set[int]

    @classmethod
    def of(cls, module: Module) -> "_Program":
        of_kind = lambda opcode: (
            (c, i)
            for c in module.computations.values()
            for i in c.instructions.values()
            if i.opcode.removesuffix("-start") == opcode
        )
        return cls(
            module,
            {id(module.computations[i.callees["calls"][0]]): (c, i) for c, i in of_kind("fusion")},
            {id(module.computations[i.callees["body"][0]]) for _, i in of_kind("while")},
        )

    def operations(self, computation: Computation, i: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """An instruction, then one after the other those that made what it only carries on."""
        seen = set()
        while id(i) not in seen:
            seen.add(id(i))
            yield computation, i
            if i.opcode in ("fusion", "fusion-start"):
                computation = self.module.computations[i.callees["calls"][0]]
                operand = computation.root
            elif i.opcode == "parameter" and id(computation) in self.fusions:
                number = int(i.operands[0])
                computation, fusion = self.fusions[id(computation)]
                operand = fusion.operands[number]
            elif i.opcode == "get-tuple-element" and id(computation) in self.bodies:
                # What a loop was given by its turn before.
                root, given = computation.instructions[computation.root], computation.instructions[i.operands[0]]
                if given.opcode != "parameter" or root.opcode != "tuple":
                    return
                operand = root.operands[int(i.attribute("index"))]
            elif i.opcode == "dynamic-update-slice":
                operand = i.operands[1]
            elif i.opcode in _CARRIES:
                operand = i.operands[0]
            else:
                return
            if operand not in computation.instructions:
                return
            i = computation.instructions[operand]

    def gathered(self, buffer: liveness.Buffer) -> str:
        """The leaf that a buffer is the gathered copy of; empty if it is not one."""
        computation, i = buffer.makers[0]
        if not i.opcode.startswith("all-gather") or buffer.number < len(i.arrays) - len(i.operands):
            return ""
        operand = computation.instructions[i.operands[buffer.number - len(i.arrays)]]
        *_, (_, shard) = self.operations(computation, operand)
        return _leaf_name(shard.op_name).removeprefix("state/") if shard.opcode == "parameter" else ""


def _described(buffer: liveness.Buffer, program: _Program, results: Sequence[str]) -> Buffer:
    array = buffer.array
    describe = functools.partial(Buffer, array.bytes, 1, array.dtype, array.shape)
    if buffer.is_argument:
        name = _leaf_name(buffer.makers[0][1].op_name)
        root, _, leaf = name.partition("/")
        return describe(leaf if root == "state" else name, root if root in ("state", "batch") else "", "")
    # An array that a loop fills is made twice: as zeros, and by what the loop puts there.
    known = [
        i for maker in buffer.makers for _, i in program.operations(*maker) if i.op_name and i.opcode != "parameter"
    ]
    maker = min(known, key=_vagueness, default=buffer.makers[0][1])
    name = _operation(maker)
    if leaf := program.gathered(buffer):
        maker = buffer.makers[0][1]
        name = f"{_operation(maker)} of {leaf}"
    elif array.dtype == "s8" and len(array.shape) == 1 and name == "dot_general":
        name = "workspace of dot_general"
    if results and buffer.result is not None:
        return describe(results[buffer.result], "state", shown_source(source_of(maker.frames)))
    return describe(name, phase_of(maker.op_name), shown_source(source_of(maker.frames)))


def _operation(i: Instruction) -> str:
    return i.op_name.rpartition("/")[2] or i.opcode


def _vagueness(i: Instruction) -> tuple[bool, bool]:
    return not user_frame(i.frames), _operation(i) in _KEEPS


def phase_of(op_name: str) -> str:
    """The part of a step that an operation belongs to, by the transformations in its name.

    >>> [phase_of(f"jit(train_step)/{x}/mul") for x in ("shard_map/jvp()", "shard_map/transpose(jvp())", "adam")]
    ['forward', 'backward', 'update']
    """
    if "transpose(" in op_name or "reduce_scatter" in op_name:
        return "backward"
    if "shard_map" in op_name or "jvp(" in op_name:
        return "forward"
    return "update" if op_name.startswith("jit(train_step)") else ""


def user_frame(frames: Sequence[str]) -> str:
    """The innermost frame in code that is neither a library's nor zerojax's own, models aside; else an empty text."""
    return next((frame for frame in _inside(frames) if not _is_library(frame) and not _is_own(frame)), "")


def source_of(frames: Sequence[str]) -> str:
    """The line that made something: the user's or the model's; else of a library within the step, else zerojax's."""
    inside = _inside(frames)
    return user_frame(frames) or next((f for f in inside if not _is_own(f)), "") or next(iter(inside), "")


def _inside(frames: Sequence[str]) -> Sequence[str]:
    """The frames within the step's function; those around it are its caller's, and say nothing of the step."""
    own = next((n for n, frame in enumerate(frames) if frame.startswith(f"{_OWN_STEP}:")), len(frames))
    return frames[: own + 1]


def _is_library(frame: str) -> bool:
    return any(frame.startswith(f"{path}/{library}/") for path in _PACKAGES for library in _LIBRARIES)


def _is_own(frame: str) -> bool:
    return frame.startswith(f"{_PACKAGE}/") and not frame.startswith(f"{_PACKAGE}/models/")


def shown_source(source: str) -> str:
    """A frame with its path from the working directory where it is under it, or from the installed packages."""
    for base in (str(Path.cwd()), *_PACKAGES):
        if source.startswith(f"{base}/"):
            return source.removeprefix(f"{base}/")
    return source


def _leaf_name(op_name: str) -> str:
    r"""The path of an argument from JAX's name of it.

    >>> _leaf_name(r"state.opt_state[0].mu[\'head\'][\'kernel\']"), _leaf_name("batch")
    ('state/opt_state/0/mu/head/kernel', 'batch')
    """
    head = re.match(r"\w*", op_name)
    parts = ["".join(part) for part in _PATH_PART.findall(op_name.replace("\\'", "'"))]
    return "/".join([head[0] if head else "", *parts])
