"""The text of a compiled XLA program, read into computations and instructions.

`compiled.as_text()` prints optimized HLO with one instruction a line, each under a computation's header. Only what is
needed to follow control flow and to size arrays is kept. Read as printed by XLA for CPU and GPU in JAX 0.10 and 0.12.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence

# A loop is played through to find its length where the compiler did not write it; longer ones count as unknown.
LONGEST_PLAYED_LOOP = 100_000

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_NAME = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<= ]*)\](?:\{[^{}]*?S\((\d+)\)[^{}]*\})?")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"/\*.*?\*/")
_TRIP_COUNT = re.compile(r"known_trip_count\W+n\W+(\d+)")
_CALLEES = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^{}]*\}|%?[\w.\-]+)"
)
_TABLE_ROW = re.compile(
    r'^(\d+) (?:"(.*)"|\{file_name_id=(\d+) .*?line=(\d+)|\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?)'
)
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array type such as `bf16[24,2048]`, in a memory space: 0 is the device's.

    >>> Array("bf16", (24, 2048)).bytes
    98304
    >>> Array("s4", (3,)).bytes, Array("pred", ()).bytes, Array("f8e4m3fn", (5,)).bytes
    (2, 1, 5)
    """

    dtype: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> int:
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = int(digits[1]) if digits else 8 if self.dtype == "pred" else 0
        return -(-math.prod(self.shape) * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the leading "%".
      opcode: "all-gather-start", "while", "fusion" and so on.
      arrays: the arrays of the result, tuples flattened.
      operands: names of operands; for a constant or a parameter, the text in the parentheses.
      attributes: the text after the operands, with what stands in double quotes emptied.
      callees: the computations it names, by attribute ("body", "condition", "calls", ...).
      trip_count: what the compiler wrote of a loop's length.
      op_name: the JAX operation it came from.
      frames: "file:line" of that operation and of what called it, innermost first, where known.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    callees: Mapping[str, tuple[str, ...]]
    trip_count: int | None
    op_name: str
    frames: tuple[str, ...]

    @property
    def source(self) -> str:
        """The innermost frame, or an empty text."""
        return self.frames[0] if self.frames else ""

    def attribute(self, name: str) -> str:
        """The value of `name=value`, or the first of `name={value,...}`; empty if there is none."""
        found = re.search(rf"\b{name}=\{{?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text, and the name of the one that is the result."""

    instructions: Mapping[str, Instruction]
    root: str


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, the entry's name, the devices it runs on, and which of its results, by
    number, take the place of which arguments."""

    computations: Mapping[str, Computation]
    entry: str
    replicas: int
    partitions: int
    aliases: Mapping[int, int]


def parse_hlo(text: str) -> Module:
    """Reads the text of a module.

    Raises:
      ValueError: if the text holds no entry computation.

    >>> module = parse_hlo('''HloModule m, num_partitions=2
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %y = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
    ... }''')
    >>> module.partitions, module.computations["main"].instructions["y"].operands
    (2, ('x',))
    """
    lines = text.splitlines()
    module_line = next((line for line in lines if line.startswith("HloModule")), "")
    sources = _sources(lines)
    computations: dict[str, Computation] = {}
    entry = ""
    current: dict[str, Instruction] = {}
    for line in lines:
        if header := _HEADER.match(line):
            current = {}
            computations[header[2]] = Computation(current, "")
            entry = header[2] if header[1] else entry
            name = header[2]
        elif computations and (instruction := _parse_instruction(line, sources)):
            current[instruction.name] = instruction
            if line.lstrip().startswith("ROOT "):
                computations[name] = Computation(current, instruction.name)
    if not entry:
        raise ValueError("the text holds no ENTRY computation; accepted: compiled.as_text() of a compiled program")
    aliased = module_line.partition("input_output_alias={")[2].partition(" }")[0]
    return Module(
        computations,
        entry,
        _count("replica_count", module_line),
        _count("num_partitions", module_line),
        {int(result or 0): int(argument) for result, argument in _ALIAS.findall(aliased)},
    )


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """How often a `while` instruction's body runs: as the compiler wrote it, else by playing its counter through.

    `None` if that depends on more than constants.
    """
    if loop.trip_count is not None:
        return loop.trip_count
    condition = module.computations[loop.callees["condition"][0]]
    body = module.computations[loop.callees["body"][0]]
    counters = {int(i.attribute("index")) for i in condition.instructions.values() if i.opcode == "get-tuple-element"}
    play = functools.partial(_scalar, module)
    values = {i: play(caller, loop.operands[0], (), i) for i in counters}
    for trips in range(LONGEST_PLAYED_LOOP):
        goes_on = play(condition, condition.root, (values,))
        if goes_on is None:
            return None
        if not goes_on:
            return trips
        values = {i: play(body, body.root, (values,), i) for i in counters}
    return None


def _count(name: str, module_line: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", module_line)
    return int(found[1]) if found else 1


def _closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return opening + found.start()
    return len(text)


def _split(text: str) -> Iterator[str]:
    """The parts of `text` between the commas that no bracket encloses."""
    depth = start = 0
    for found in re.finditer(r"[()\[\]{},]", text):
        if found[0] == ",":
            if depth == 0:
                yield text[start : found.start()]
                start = found.end()
        else:
            depth += 1 if found[0] in "([{" else -1
    yield text[start:]


def _parse_instruction(line: str, sources: Mapping[int, tuple[str, ...]]) -> Instruction | None:
    if not (head := _NAME.match(line)):
        return None
    rest = line[head.end() :]
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    if not (opcode := _OPCODE.match(rest, type_end)):
        return None
    operands_end = _closing(rest, opcode.end() - 1)
    operands = _COMMENT.sub("", rest[opcode.end() : operands_end])
    tail = rest[operands_end + 1 :]
    attributes = _QUOTED.sub('""', tail)
    trips = _TRIP_COUNT.search(tail) if opcode[1] == "while" else None
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', tail)
    frame = re.search(r"stack_frame_id=(\d+)", attributes)
    file_line = re.search(r'source_file="([^"]*)" source_line=(\d+)', tail)
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        arrays=tuple(
            Array(dtype, tuple(int(n.strip(" <=")) for n in dims.split(",") if n.strip()), int(space or 0))
            for dtype, dims, space in _ARRAY.findall(rest[:type_end])
        ),
        operands=tuple(part.split()[-1].removeprefix("%") for part in _split(operands) if part.strip()),
        attributes=attributes,
        callees={
            key: tuple(name.strip().removeprefix("%") for name in names.strip("{}").split(",") if name.strip())
            for key, names in _CALLEES.findall(attributes)
        },
        trip_count=int(trips[1]) if trips else None,
        op_name=op_name[1] if op_name else "",
        frames=(f"{file_line[1]}:{file_line[2]}",) if file_line else sources.get(int(frame[1]), ()) if frame else (),
    )


def _sources(lines: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """The "file:line"s of each stack frame, from the tables that newer XLA prints before the computations."""
    files: dict[int, str] = {}
    locations: dict[int, str] = {}
    frames: dict[int, tuple[str, int]] = {}
    section = ""
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section and (row := _TABLE_ROW.match(line)):
            number, name, file, file_line, location, parent = row.groups()
            if section == "FileNames":
                files[int(number)] = name
            elif section == "FileLocations":
                locations[int(number)] = f"{files.get(int(file), '')}:{file_line}"
            elif section == "StackFrames":
                frames[int(number)] = (locations.get(int(location), ""), int(parent or 0))
        elif _HEADER.match(line):
            break
    # XLA prints the number of a frame's parent one too large; of a frame without one, 1.
    shift = 1 if any(number == parent for number, (_, parent) in frames.items()) else 0
    chains: dict[int, tuple[str, ...]] = {}
    for number, (location, parent) in sorted(frames.items()):  # a parent stands before its children
        chains[number] = (location, *chains.get(parent - shift, ()))
    return chains


_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "and": operator.and_}
_COMPARISONS = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
_Arguments = Sequence[int | None | Mapping[int, int | None]]


def _scalar(
    module: Module, computation: Computation, name: str, arguments: _Arguments, element: int | None = None
) -> int | None:
    """The value of an integer scalar (of an element of it, where it is a tuple), as far as it follows from constants.

    `arguments` are the values of the computation's parameters: of scalars, or of a tuple's elements by index.
    """
    instruction = computation.instructions.get(name)
    if instruction is None:
        return None
    inside = functools.partial(_scalar, module, computation)
    match instruction.opcode:
        case "constant":
            text = {"true": "1", "false": "0"}.get(instruction.operands[0], instruction.operands[0])
            return int(text) if re.fullmatch(r"-?\d+", text) else None
        case "parameter":
            value = arguments[int(instruction.operands[0])] if arguments else None
            if isinstance(value, Mapping):
                return value.get(element) if element is not None else None
            return value
        case "get-tuple-element":
            return inside(instruction.operands[0], arguments, int(instruction.attribute("index")))
        case "tuple" if element is not None:
            return inside(instruction.operands[element], arguments)
        case "copy" | "convert" | "bitcast":
            return inside(instruction.operands[0], arguments, element)
        case "compare":
            left, right = (inside(operand, arguments) for operand in instruction.operands)
            compare = _COMPARISONS[instruction.attribute("direction")]
            return None if left is None or right is None else int(compare(left, right))
        case "fusion" | "call":
            callee = module.computations[(instruction.callees.get("calls") or instruction.callees["to_apply"])[0]]
            values = tuple(inside(operand, arguments) for operand in instruction.operands)
            return _scalar(module, callee, callee.root, values, element)
        case opcode if opcode in _ARITHMETIC:
            left, right = (inside(operand, arguments) for operand in instruction.operands)
            return None if left is None or right is None else _ARITHMETIC[opcode](left, right)
    return None
