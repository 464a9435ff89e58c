"""The collectives of a compiled program: what each device sends, with loops counted by their trip count."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from zerojax.zero.hlo import Array, Computation, Instruction, Module, parse_hlo, trip_count

# A collective of no more bytes than this carries a loss, a norm or a count: it costs latency, no bandwidth.
TINY_BYTES = 64

# The share of the whole array that a device of a ring of n sends. (Thakur et al., 2005, "Optimization of Collective
# Communication Operations in MPICH"; the counts of ZeRO, arXiv:1910.02054, section 7.)
SENT_SHARE = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: float(n > 1),
    "collective-broadcast": lambda n: float(n > 1),
}

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      kind: a key of `SENT_SHARE`. An asynchronous pair of start and done counts once, under its plain name.
      count: executions in one run of the program.
      bytes_sent: bytes that one device sends in all of these executions, in a ring. Bytes are as compiled: XLA's CPU
        compiler widens bfloat16 collectives to float32 and float8 ones to float16; float16 and int8 stay.
      dtype: of the arrays; of several, joined by "+".
      shapes: of the whole arrays, one for each operand of a combined collective: gathered, or before the scatter.
      group_size: devices that take part together.
      groups: these devices, as positions in the program's device order. For a permute, each ring or chain.
      op_name: the JAX operation, as in "jit(step)/shard_map/while/body/all_gather".
      source: "file:line" of that operation, where known.
      tiny: whether it carries no more than `TINY_BYTES`, such as a loss or a norm.
      note: what makes the count uncertain; empty where it is exact.
    """

    kind: str
    count: int
    bytes_sent: float
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    group_size: int
    groups: Groups
    op_name: str
    source: str
    tiny: bool
    note: str = ""


def read_collectives(hlo_text: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program, in the order of the text.

    Loops multiply by their trip count, nested loops by the product; a loop whose length is not known before it runs
    counts once and is noted. Of a conditional's branches the one that sends most counts, and is noted.

    Args:
      hlo_text: `compiled.as_text()`, optimized HLO of any backend.

    Raises:
      ValueError: if the text is no HLO module.

    >>> found = read_collectives('''HloModule m, replica_count=4
    ... ENTRY main {
    ...   x = bf16[8,16]{1,0} parameter(0)
    ...   ROOT y = bf16[32,16]{1,0} all-gather(x), replica_groups=[1,4]<=[4], dimensions={0}
    ... }''')
    >>> [(c.kind, c.count, c.bytes_sent, c.shapes) for c in found]  # 3/4 of 32 x 16 x 2 bytes
    [('all-gather', 1, 768.0, ((32, 16),))]
    """
    module = parse_hlo(hlo_text)
    return _of_computation(module, module.entry, {})


def mesh_axes(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which `groups` lie; empty if they are not those of any axes.

    >>> mesh_axes(((0, 4), (1, 5), (2, 6), (3, 7)), {"replica": 2, "data": 4})
    ('replica',)
    """
    names = [name for name, size in axis_sizes.items() if size > 1]
    ids = np.arange(math.prod(axis_sizes.values())).reshape([axis_sizes[name] for name in names])
    wanted = {frozenset(group) for group in groups}
    for n in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), n):
            rest = [i for i in range(len(names)) if i not in chosen]
            lines = ids.transpose(*rest, *chosen).reshape(-1, math.prod(ids.shape[i] for i in chosen))
            if wanted == {frozenset(line) for line in lines.tolist()}:
                return tuple(names[i] for i in chosen)
    return ()


def _of_computation(module: Module, name: str, done: dict[str, tuple[Collective, ...]]) -> tuple[Collective, ...]:
    """The collectives of one run of a computation and of all that it calls."""
    if name not in done:
        computation = module.computations.get(name)
        inside = (
            (_of_instruction(module, computation, i, done) for i in computation.instructions.values())
            if computation
            else ()
        )
        done[name] = tuple(itertools.chain.from_iterable(inside))
    return done[name]


def _of_instruction(
    module: Module, caller: Computation, instruction: Instruction, done: dict[str, tuple[Collective, ...]]
) -> Iterable[Collective]:
    def of(callees: Iterable[str]) -> tuple[Collective, ...]:
        return tuple(itertools.chain.from_iterable(_of_computation(module, callee, done) for callee in callees))

    callees = instruction.callees
    if instruction.opcode.removesuffix("-start") in SENT_SHARE:
        return (_collective(module, caller, instruction),)
    if instruction.opcode.endswith(("-done", "-update")):  # the start has been counted
        return ()
    if instruction.opcode == "while":
        inside, check = of(callees["body"]), of(callees["condition"])
        if not inside and not check:
            return ()
        trips = trip_count(module, caller, instruction)
        note = "" if trips is not None else "in a loop of unknown length, counted once"
        return (*_times(inside, 1 if trips is None else trips, note), *_times(check, (trips or 0) + 1, note))
    if instruction.opcode == "conditional":
        names = itertools.chain.from_iterable(callees.values())
        branches = [of((name,)) for name in names]
        most = max(branches, key=lambda branch: sum(c.bytes_sent for c in branch))
        return _times(most, 1, "" if all(b == most for b in branches) else "in a conditional's costliest branch")
    return of(itertools.chain.from_iterable(callees.values()))


def _times(collectives: tuple[Collective, ...], times: int, note: str) -> tuple[Collective, ...]:
    return tuple(
        dataclasses.replace(
            c, count=c.count * times, bytes_sent=c.bytes_sent * times, note="; ".join(filter(None, (c.note, note)))
        )
        for c in collectives
    )


def _collective(module: Module, caller: Computation, instruction: Instruction) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    # The operands say the sizes: the result of an asynchronous start holds operands and results in various orders.
    arrays = tuple(array for operand in instruction.operands for array in caller.instructions[operand].arrays)
    groups = _rings(instruction) if kind == "collective-permute" else _groups(module, instruction)
    size = max(map(len, groups), default=1)
    if kind == "all-gather":
        dim = int(instruction.attribute("dimensions"))
        arrays = tuple(
            Array(a.dtype, tuple(n * size if i == dim else n for i, n in enumerate(a.shape))) for a in arrays
        )
    whole = sum(array.bytes for array in arrays)
    return Collective(
        kind=kind,
        count=1,
        bytes_sent=whole * SENT_SHARE[kind](size),
        dtype="+".join(dict.fromkeys(a.dtype for a in arrays)),
        shapes=tuple(a.shape for a in arrays),
        group_size=size,
        groups=groups,
        op_name=instruction.op_name,
        source=instruction.source,
        tiny=whole <= TINY_BYTES,
    )


def _groups(module: Module, instruction: Instruction) -> Groups:
    """The groups of positions in the device order (replica x partitions + partition) that communicate.

    XLA's four group modes (xla/service/collective_ops_utils.h): groups are of replicas without a channel; with one, of
    flattened ids where `use_global_device_ids` says so, else of partitions (all-to-all, broadcast) or of replicas with
    all their partitions.
    """
    groups = _written_groups(instruction.attributes)
    if "channel_id=" not in instruction.attributes:
        groups = groups or (tuple(range(module.replicas)),)
        return tuple(tuple(r * module.partitions + p for r in g) for g in groups for p in range(module.partitions))
    if "use_global_device_ids=true" in instruction.attributes:
        return groups or (tuple(range(module.replicas * module.partitions)),)
    if instruction.opcode.startswith(("all-to-all", "collective-broadcast")):
        groups = groups or (tuple(range(module.partitions)),)
        return tuple(tuple(r * module.partitions + p for p in g) for r in range(module.replicas) for g in groups)
    groups = groups or (tuple(range(module.replicas)),)
    return tuple(tuple(r * module.partitions + p for r in g for p in range(module.partitions)) for g in groups)


def _written_groups(attributes: str) -> Groups:
    """`replica_groups` in any of the forms that XLA prints; empty for "all devices".

    >>> _written_groups("replica_groups={{0,2},{1,3}}, dimensions={0}")
    ((0, 2), (1, 3))
    >>> _written_groups("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}")
    ((0, 2), (1, 3))
    >>> _written_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={0}")
    ((0, 2), (1, 3))
    >>> _written_groups("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}, dimensions={0}")
    ((0, 2), (4, 6), (1, 3), (5, 7))
    """
    text = attributes.partition("replica_groups=")[2]
    if not text or text.startswith("{"):
        return tuple(_integers(group) for group in re.findall(r"\{([\d,\s]+)\}", _braces(text)))
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _as_groups(_iota(iota[2], iota[3]).reshape(_integers(iota[1])))
    mesh = re.match(r"mesh\[(.*?)\](?:, device_ids=\((\[[\d,]+\]T\([\d,]+\)|[\d,]+)\))? \{(.*?)\}", text)
    if mesh is None:
        raise ValueError(f"replica_groups={text[:80]} is of a form that is not known")
    return _mesh_groups(*mesh.groups())


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups:
    """Groups along axes of a mesh, or along a part `name:(before)size` of an axis that is split in three."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^'=,]+)'?=(\d+)", axes)}
    if device_ids is None:
        ids = np.arange(math.prod(sizes.values()))
    elif permuted := re.match(r"\[([\d,]+)\]T\(([\d,]+)\)", device_ids):
        ids = _iota(permuted[1], permuted[2])
    else:
        ids = np.array(_integers(device_ids))
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for name, before, size in re.findall(r"'?([^':,]+)'?(?::\((\d+)\)(\d+))?", grouped):
        parts[name].append((int(before), int(size)) if size else (1, sizes[name]))
    dims: list[int] = []
    along: list[int] = []
    for name, axis_size in sizes.items():
        filled = 1
        for before, size in sorted(parts[name]):
            dims += [before // filled, size]
            along.append(len(dims) - 1)
            filled = before * size
        dims.append(axis_size // filled)
    across = [i for i in range(len(dims)) if i not in along]
    return _as_groups(ids.reshape(dims).transpose(*across, *along).reshape(-1, math.prod(dims[i] for i in along)))


def _rings(instruction: Instruction) -> Groups:
    """The devices that a permute's pairs connect; pairs of a device with itself send nothing."""
    pairs = _braces(instruction.attributes.partition("source_target_pairs=")[2])
    rings: list[set[int]] = []
    for pair in re.findall(r"\{(\d+),(\d+)\}", pairs):
        joined = {int(device) for device in pair}
        if len(joined) == 2:
            joined.update(*(ring for ring in rings if ring & joined))
            rings = [ring for ring in rings if not ring & joined] + [joined]
    return tuple(sorted(tuple(sorted(ring)) for ring in rings))


def _braces(text: str) -> str:
    """`{...}`, with one level of braces inside, that `text` begins with."""
    found = re.match(r"\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", text)
    return found[0] if found else ""


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    """0, 1, 2, ... in an array of `dims`, its dimensions permuted, as one row."""
    ids = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    return (ids.transpose(_integers(permutation)) if permutation else ids).reshape(-1)


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(map(tuple, rows.tolist()))
