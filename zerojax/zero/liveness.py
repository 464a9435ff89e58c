"""Which buffers of a compiled program are there together, read from its scheduled instructions.

XLA prints a computation's instructions in the order in which they run. Followed in that order, with loops entered once,
each buffer lives from the instruction that makes it to the last one that reads it. What XLA makes in the place of
something else is one buffer here too: what a loop carries, an update of a slice, an elementwise operation on what
nothing else reads, a result in the place of a donated argument.
"""

import dataclasses
from collections.abc import Sequence

from zerojax.zero.hlo import Array, Computation, Instruction, Module

# Operations whose result is their operands, in no memory of its own.
RENAMES = {"bitcast", "tuple", "optimization-barrier", "add-dependency", "get-tuple-element"}
# Operations that read an operand in another order than they write, or in several passes: they need memory of their own.
NOT_IN_PLACE = {
    "all-gather", "all-to-all", "broadcast", "collective-permute", "concatenate", "convolution", "custom-call", "dot",
    "gather", "pad", "reduce", "reduce-scatter", "reverse", "slice", "sort", "transpose",
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Buffer:
    """A buffer of a program.

    Attributes:
      array: what it holds.
      number: which of its first maker's arrays it is.
      makers: the instructions that write it, each with its computation; the argument itself of an argument.
      start: when it is first written; times count instructions.
      end: when it is last read.
      is_argument: whether it is the caller's.
      result: its number among the program's results, if it is one in memory of its own.
      within: the buffer in whose place it is, if it is in another's.
    """

    array: Array
    number: int
    makers: list[tuple[Computation, Instruction]]
    start: int
    end: int
    is_argument: bool = False
    result: int | None = None
    within: "Buffer | None" = None

    @property
    def home(self) -> "Buffer":
        return self if self.within is None else self.within.home

    @property
    def bytes(self) -> int:
        return 0 if self.within is not None or self.array.space else self.array.bytes


Value = list[Buffer | None]  # the buffers of an instruction's arrays; constants take none


def live_at_peak(module: Module) -> list[Buffer]:
    """The buffers that are there when the program holds most, its arguments included, the largest first."""
    run = _Run(module)
    run.entry()
    change: dict[int, int] = {}
    for buffer in run.buffers:
        change[buffer.start] = change.get(buffer.start, 0) + buffer.bytes
        change[buffer.end + 1] = change.get(buffer.end + 1, 0) - buffer.bytes
    most = held = peak = 0
    for time in sorted(change):
        held += change[time]
        if held > most:
            most, peak = held, time
    live = (b for b in run.buffers if b.bytes and b.start <= peak <= b.end)
    return sorted(live, key=lambda b: -b.bytes)


class _Run:
    """Follows a program from its first instruction to its last."""

    def __init__(self, module: Module):
        self.module, self.time = module, 0
        self.buffers: list[Buffer] = []
        self.in_place: list[tuple[Buffer, list[Buffer]]] = []  # a result, and operands that it may take the place of

    def entry(self) -> None:
        computation = self.module.computations[self.module.entry]
        arguments: dict[int, Value] = {}
        for i in computation.instructions.values():
            if i.opcode == "parameter":
                arguments[int(i.operands[0])] = [self._new(computation, i, n, True) for n in range(len(i.arrays))]
        results = self._computation(computation, arguments)
        self.time += 1
        for number, buffer in enumerate(results):
            donated = arguments.get(self.module.aliases.get(number, -1), [])
            if buffer and donated and donated[0] is not buffer.home and donated[0]:
                _put(buffer, donated[0])
            elif buffer:
                buffer.home.result = number
        for buffer in [*filter(None, results), *(b for value in arguments.values() for b in value if b)]:
            buffer.home.end = self.time
        for result, operands in self.in_place:
            for operand in operands:
                home = operand.home
                if result.bytes and not home.is_argument and home.end == result.start and home.bytes == result.bytes:
                    _put(result, home)
                    break

    def _new(self, computation: Computation, i: Instruction, number: int, is_argument: bool = False) -> Buffer:
        self.buffers.append(Buffer(i.arrays[number], number, [(computation, i)], self.time, self.time, is_argument))
        return self.buffers[-1]

    def _computation(self, computation: Computation, arguments: dict[int, Value]) -> Value:
        """Runs a computation, and returns the buffers of its result."""
        values: dict[str, Value] = {}
        for i in computation.instructions.values():
            self.time += 1
            operands = [values.get(operand, []) for operand in i.operands]
            if i.opcode not in RENAMES:
                for buffer in (b for value in operands for b in value if b):
                    buffer.home.end = self.time
            values[i.name] = self._instruction(computation, i, operands, arguments)
        return values.get(computation.root, [])

    def _instruction(
        self, computation: Computation, i: Instruction, operands: list[Value], arguments: dict[int, Value]
    ) -> Value:

        def new() -> Value:
            return [self._new(computation, i, number) for number in range(len(i.arrays))]

        flat = [buffer for value in operands for buffer in value]
        if i.opcode == "parameter":
            return arguments[int(i.operands[0])]
        if i.opcode == "constant":
            return [None for _ in i.arrays]
        if i.opcode == "get-tuple-element":
            (value,), number = operands, int(i.attribute("index"))
            return value[number : number + 1] if number < len(value) else new()
        if i.opcode in RENAMES and len(flat) >= len(i.arrays):
            return flat[: len(i.arrays)]
        if i.opcode == "while":
            return self._while(i, flat)
        if i.opcode == "conditional":
            return self._conditional(i, operands, new())
        if i.opcode == "call":
            callee = self.module.computations[next(iter(i.callees.values()))[0]]
            return self._computation(callee, dict(enumerate(operands)))
        if i.opcode.endswith("-start"):
            return self._start(computation, i, operands)
        if i.opcode.endswith(("-done", "-update")) and flat:
            return _matching(i, flat) or new()
        if (updated := self._updated(computation, i)) is not None and (target := operands[updated][:1]) and target[0]:
            target[0].home.makers.append((computation, i))
            return [target[0], *new()[1:]]
        made = new()
        if i.opcode not in NOT_IN_PLACE and (i.opcode != "fusion" or "kind=kLoop" in i.attributes):
            self.in_place += [(buffer, [b for b in flat if b]) for buffer in made if buffer]
        return made

    def _while(self, i: Instruction, carried: Value) -> Value:
        """What a loop carries stays where it was at the beginning."""
        begin = self.time
        self._computation(self.module.computations[i.callees["condition"][0]], {0: carried})
        results = self._computation(self.module.computations[i.callees["body"][0]], {0: carried})
        self.time += 1
        for before, after in zip(carried, results, strict=False):
            if before and after and after.home is not before.home and after.home.start > begin:
                _put(after, before.home)
        for buffer in filter(None, carried):
            buffer.home.end = self.time
        return carried

    def _conditional(self, i: Instruction, operands: list[Value], results: Value) -> Value:
        begin = self.time
        branches = [name for names in i.callees.values() for name in names]
        for branch, value in zip(branches, operands[1:], strict=False):
            made = self._computation(self.module.computations[branch], {0: value})
            self.time += 1
            for mine, result in zip(made, results, strict=False):
                if mine and result and mine.home is not result.home and mine.home.start > begin:
                    _put(mine, result.home)
        for result in filter(None, results):
            result.home.end = self.time
        return results

    def _start(self, computation: Computation, i: Instruction, operands: list[Value]) -> Value:
        """An asynchronous operation, which lists its operands beside its results."""
        mine = [buffer for value in operands for buffer in value if buffer]
        value: Value = []
        for number, array in enumerate(i.arrays):
            same = next((b for b in mine if b.array == array), None)
            if same:
                mine.remove(same)
            value.append(same or self._new(computation, i, number))
        return value

    def _updated(self, computation: Computation, i: Instruction) -> int | None:
        """Of an operation that updates a slice, the number of the operand that it is a slice of."""
        if i.opcode == "dynamic-update-slice":
            return 0
        if i.opcode == "fusion" and len(i.arrays) == 1:
            fused = self.module.computations[i.callees["calls"][0]]
            root = through(fused, fused.root, "bitcast")
            if root.opcode == "dynamic-update-slice":
                target = through(fused, root.operands[0], "bitcast")
                return int(target.operands[0]) if target.opcode == "parameter" else None
        return None


def through(computation: Computation, name: str, *opcodes: str) -> Instruction:
    """An instruction, or what it is made of by operations of these kinds alone."""
    instruction = computation.instructions[name]
    while instruction.opcode in opcodes:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _put(buffer: Buffer, home: Buffer) -> None:
    """A buffer, with all that is in its place, in the place of another."""
    buffer = buffer.home
    if buffer is not home:
        home.makers += buffer.makers
        home.start, home.end = min(home.start, buffer.start), max(home.end, buffer.end)
        buffer.within = home


def _matching(done: Instruction, started: Sequence[Buffer | None]) -> Value:
    """The buffers of an asynchronous operation's results; operands come before them where both look the same."""
    left = list(started)
    value: list[Buffer | None] = []
    for array in reversed(done.arrays):
        found = next((b for b in reversed(left) if b and b.array == array), None)
        if found is None:
            return []
        left.remove(found)
        value.append(found)
    return value[::-1]
