"""What a training step costs each device: memory and communication as compiled, beside ZeRO's formulas."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.mesh import REPLICA_AXIS, SHARD_AXIS
from zerojax.paths import path_name
from zerojax.precision import Precision
from zerojax.zero import formulas
from zerojax.zero.buffers import Buffer, largest_buffers
from zerojax.zero.collectives import Collective, mesh_axes, read_collectives
from zerojax.zero.streaming import AT_ONCE as IN_FILES_AT_ONCE
from zerojax.zero.turns import AT_ONCE, Turn

NAMES = {"parameters": "master parameters", "frozen": "frozen parameters", "optimizer": "optimizer state"}


@dataclasses.dataclass(frozen=True)
class LeafNote:
    """A leaf that is not simply cut in equal parts.

    Attributes:
      path: where it is in the state, as in "params/head/bias".
      shape: its logical shape.
      bytes: of the whole leaf.
      note: what is done with it and why, as in "kept whole: fewer than 1024 elements".
    """

    path: str
    shape: tuple[int, ...]
    bytes: int
    note: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """Bytes per device, beside what ZeRO's formula says.

    Attributes:
      bytes: measured on the state or read from the compiled program; `None` where only the formula is known.
      expected: by the formula; `None` where there is none.
      formula: in words, with P for parameters, N for shards, M for micro-batches, R for replicas.
    """

    bytes: float | None
    expected: float | None = None
    formula: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """Bytes per device and per step. Its `str` is a readable table, `as_dict` gives plain JSON types.

    Attributes:
      stage: 0 to 3.
      mesh: size of each mesh axis.
      micro_batches: M.
      n_parameters: P, those that are trained, without padding.
      parameters: master parameters, as stored between steps on the device.
      frozen: parameters that are not trained, F bytes of them.
      optimizer: the optimizer's state, as stored between steps on the device.
      host: what of these three is stored in host memory, for each device.
      disk: what of the optimizer's state is stored in files, for each device.
      passing: of that, what the update has on the device at once.
      other: the rest of the state: step, rng, variables.
      gradients: the accumulated gradients, by formula: the compiler counts them among the temporaries.
      model_states: parameters in the compute dtype, gradients and stored state together, by formula.
      activations: what the forward pass of one micro-batch makes and keeps for its backward pass, of the traced program
        on one device's rows; `None` where it was not traced. Parameters, what gather points made of them and the batch
        do not count. Over model axes it is not divided: the compiler does that.
      temporaries: of the compiled step: activations, gradients, gathered parameters, buffers.
      arguments: of the compiled step: state and batch.
      outputs: of the compiled step: state and metrics.
      aliased: part of the outputs that takes the place of donated arguments.
      code: the compiled code.
      buffers: the largest buffers at the step's peak, arguments included, with the lines that made them.
      gather: sent to gather parameters.
      reduce: sent to reduce gradients, over shards and replicas, and the metrics with them.
      sent: sent in all.
      collectives: every collective of the compiled step.
      notes: leaves kept whole, padded or gathered on entry.
      remarks: what to know when reading the figures.
    """

    stage: int
    mesh: dict[str, int]
    micro_batches: int
    n_parameters: int
    parameters: Figure
    frozen: Figure
    optimizer: Figure
    host: dict[str, Figure]
    disk: Figure
    passing: Figure
    other: Figure
    gradients: Figure
    model_states: Figure
    activations: int | None
    temporaries: int
    arguments: int
    outputs: int
    aliased: int
    code: int
    buffers: tuple[Buffer, ...]
    gather: Figure
    reduce: Figure
    sent: Figure
    collectives: tuple[Collective, ...]
    notes: tuple[LeafNote, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def state(self) -> Figure:
        """All that is stored between steps on the device."""
        parts = (self.parameters, self.frozen, self.optimizer, self.other)
        return Figure(
            sum(part.bytes or 0 for part in parts),
            sum(part.expected or 0 for part in parts),
            " + ".join(part.formula for part in parts if part.formula),
        )

    @property
    def peak(self) -> int:
        """Bytes of a device while the step runs: arguments, temporaries and what of the outputs is no alias."""
        return self.arguments + self.temporaries + self.outputs - self.aliased

    def as_dict(self) -> dict[str, Any]:
        """The report in JSON's types: totals added, and for each collective its mesh axes in place of its groups."""
        out = _plain(dataclasses.asdict(self))
        out["state"], out["peak"] = _plain(dataclasses.asdict(self.state)), self.peak
        for entry, collective in zip(out["collectives"], self.collectives, strict=True):
            del entry["groups"]
            entry["axes"] = list(mesh_axes(collective.groups, self.mesh))
        return out

    def __str__(self) -> str:
        blocks = [self._heading(), table(self._memory_rows()), table(buffer_rows(self.buffers))]
        blocks.append(table(self._traffic_rows()))
        if self.collectives:
            blocks.append(table(self._collective_rows()))
        if self.notes:
            blocks.append(table(self._note_rows()))
        return "\n\n".join([*blocks, *self.remarks])

    def _heading(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        return (
            f"ZeRO stage {self.stage} on {math.prod(self.mesh.values())} devices ({axes}), "
            f"P = {self.n_parameters:,} parameters, M = {self.micro_batches} micro-batch"
            f"{'es' if self.micro_batches > 1 else ''}\n1 GB = 10^9 bytes; figures are of one device"
        )

    def _memory_rows(self) -> list[list[str]]:
        state = self.state
        rows = [["memory", "bytes", "share", "ZeRO's formula", "", "ratio"]]
        for name, figure in (
            (NAMES["parameters"], self.parameters),
            *([(NAMES["frozen"], self.frozen)] if self.frozen.bytes else []),
            (NAMES["optimizer"], self.optimizer),
            ("other state", self.other),
            ("state between steps", state),
        ):
            rows.append([name, human(figure.bytes), _share(figure.bytes, state.bytes), *_beside(figure)])
        for name, figure in self.host.items():
            rows.append([f"{NAMES[name]}, in host memory", human(figure.bytes), "", *_beside(figure)])
        if self.disk.bytes:
            rows.append([f"{NAMES['optimizer']}, on disk", human(self.disk.bytes), "", *_beside(self.disk)])
        if self.passing.bytes:
            rows.append(["of it at once on the device in the update", human(self.passing.bytes), "", "", "", ""])
        rows.append(["accumulated gradients, by formula", "", "", *_beside(self.gradients)])
        rows.append(["ZeRO's model states, by formula", "", "", *_beside(self.model_states)])
        if self.activations is not None:
            rows.append(["activations kept for the backward pass", human(self.activations), "", "", "", ""])
        compiled = (
            ("compiled step: arguments", self.arguments),
            ("compiled step: temporaries", self.temporaries),
            ("compiled step: outputs not aliased", self.outputs - self.aliased),
            ("compiled step: in all", self.peak),
        )
        return rows + [[name, human(n), _share(n, self.peak), "", "", ""] for name, n in compiled]

    def _traffic_rows(self) -> list[list[str]]:
        rows = [["sent in a step", "bytes", "share", "ZeRO's formula", "", "ratio"]]
        for name, figure in (("to gather", self.gather), ("to reduce", self.reduce), ("in all", self.sent)):
            rows.append([name, human(figure.bytes), _share(figure.bytes, self.sent.bytes), *_beside(figure)])
        return rows

    def _collective_rows(self) -> list[list[str]]:
        """Collectives of one kind, dtype and group in one row; those that only cost latency in one row together."""
        grouped: dict[tuple[str, ...], list[Collective]] = {}
        for c in self.collectives:
            axes = " x ".join(mesh_axes(c.groups, self.mesh)) or f"groups of {c.group_size}"
            key = ("tiny ones", "", "") if c.tiny and not c.note else (c.kind, axes, c.dtype, c.note)
            grouped.setdefault(key, []).append(c)
        rows = [["collective", "over", "dtype", "count", "bytes sent", "share", ""]]
        for (kind, axes, dtype, *note), members in sorted(grouped.items(), key=lambda kv: kv[0][0] == "tiny ones"):
            sent = sum(c.bytes_sent for c in members)
            count = f"{sum(c.count for c in members):,}"
            rows.append([kind, axes, dtype, count, human(sent), _share(sent, self.sent.bytes), *(note or [""])])
        return rows

    def _note_rows(self) -> list[list[str]]:
        rows = [["leaf", "shape", "bytes", ""]]
        for note in sorted(self.notes, key=lambda note: -note.bytes):
            rows.append([note.path, "x".join(map(str, note.shape)) or "scalar", human(note.bytes), note.note])
        return rows


def make_report(
    *,
    compiled: Any,
    state: Any,
    mesh: Mesh,
    stage: int,
    precision: Precision,
    micro_batches: int = 1,
    kept: Set[str] = frozenset(),
    notes: Iterable[LeafNote] = (),
    offloaded: Mapping[str, Any] | None = None,
    turns: Sequence[Turn] = (),
    activations: int | None = None,
    in_files: bool = False,
) -> Report:
    """A report of a compiled step.

    Args:
      compiled: the step, as `jax.jit(...).lower(...).compile()` returns it.
      state: the `State` it takes, of arrays or of `jax.ShapeDtypeStruct`s with shardings; `state.layout.logical` holds
        the shapes without padding.
      mesh: the devices, with a "data" axis that is partitioned over and perhaps a "replica" axis.
      stage: 0 to 3.
      precision: the dtypes of the step.
      micro_batches: M.
      kept: paths of parameters that the model sees in `precision.kept` in place of the compute dtype.
      notes: leaves to name.
      offloaded: whether each leaf lies in host memory or in files, in trees of the structure of params, frozen and
        opt_state under these names; none of them by default.
      turns: in which the update brings them to the device.
      activations: bytes per device kept for the backward pass, as `TrainStep.activations` traces them.
      in_files: whether those of the optimizer lie in files.
    """
    logical = state.layout.logical
    shards, replicas = mesh.shape[SHARD_AXIS], mesh.shape.get(REPLICA_AXIS, 1)
    n_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(logical["params"]))
    frozen_bytes = _whole_bytes(jax.tree.leaves(logical["frozen"]))
    units = {"params": ("P", n_parameters), "frozen": ("F", frozen_bytes), "opt_state": ("P", n_parameters)}
    stored = {
        field: _stored(
            jax.tree.leaves(getattr(state, field)),
            jax.tree.leaves(logical[field]),
            jax.tree.leaves((offloaded or {}).get(field)),
            *unit,
            shards,
            stage,
        )
        for field, unit in units.items()
    }
    (parameters, frozen, optimizer), in_host = zip(*stored.values(), strict=True)
    host = {name: figure for name, figure in zip(NAMES, in_host, strict=True) if figure.bytes}
    disk = host.pop("optimizer") if in_files else Figure(0)
    compute, wire = (n / max(n_parameters, 1) for n in _seen(logical["params"], precision, kept))
    frozen_sent = _frozen_sent(logical["frozen"], shards, stage, precision, kept, micro_batches)
    count = IN_FILES_AT_ONCE if in_files else AT_ONCE
    at_once = max((sum(turn.bytes for turn in turns[i : i + count]) for i in range(len(turns))), default=0)
    text = compiled.as_text()
    collectives = read_collectives(text)
    memory = compiled.memory_analysis()
    accumulate = precision.accumulate.itemsize
    expected = formulas.communication(
        n_parameters,
        shards,
        stage,
        micro_batches=micro_batches,
        replicas=replicas,
        compute=compute,
        wire=wire,
        reduce=precision.reduce.itemsize if precision.reduce else None,
        accumulate=accumulate,
    )
    gradients = Figure(
        None,
        formulas.accumulated(n_parameters, shards, stage, itemsize=accumulate),
        f"{accumulate}P{'/N' if stage >= 2 else ''}",
    )
    gathered = sum(c.bytes_sent for c in collectives if c.kind == "all-gather")
    reduced = sum(c.bytes_sent for c in collectives if c.kind in ("reduce-scatter", "all-reduce"))
    gather_words, reduce_words = _traffic_words(stage, micro_batches, replicas)
    return Report(
        stage=stage,
        mesh=dict(mesh.shape),
        micro_batches=micro_batches,
        n_parameters=n_parameters,
        parameters=parameters,
        frozen=frozen,
        optimizer=optimizer,
        host=host,
        disk=disk,
        passing=Figure(at_once / (shards if stage >= 1 else 1)),
        other=Figure(
            sum(map(shard_bytes, jax.tree.leaves((state.step, state.variables, state.rng, state.loss_scale))))
        ),
        gradients=gradients,
        model_states=_model_states(
            parameters,
            optimizer,
            gradients,
            n_parameters,
            shards,
            stage,
            precision,
            compute,
            in_host="parameters" in host,
        ),
        activations=activations,
        temporaries=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        buffers=largest_buffers(text),
        gather=Figure(gathered, expected.gather + frozen_sent, gather_words + (" and F" if frozen_sent else "")),
        reduce=Figure(reduced, expected.reduce + expected.replicate, reduce_words),
        sent=Figure(
            sum(c.bytes_sent for c in collectives),
            expected.total + frozen_sent,
            f"{expected.total / max(n_parameters * precision.compute.itemsize, 1):.3f} x P in {precision.compute.name}"
            + (" and the gathers of F" if frozen_sent else ""),
        ),
        collectives=collectives,
        notes=tuple(notes),
        remarks=_remarks(mesh, precision, collectives, host, turns, in_files),
    )


def _seen(logical: Any, precision: Precision, kept: Set[str]) -> tuple[int, int]:
    """Bytes of parameters as the model sees them, and as they are gathered: the narrower of that and their own."""
    compute = wire = 0
    for path, leaf in jax.tree.leaves_with_path(logical):
        seen = precision.kept if path_name(path) in kept else precision.compute
        compute += math.prod(leaf.shape) * seen.itemsize
        wire += math.prod(leaf.shape) * min(leaf.dtype.itemsize, seen.itemsize)
    return compute, wire


def _stored(
    arrays: Sequence[Any],
    logical: Sequence[Any],
    offloaded: Sequence[bool],
    unit: str,
    n: float,
    shards: int,
    stage: int,
) -> tuple[Figure, Figure]:
    """Bytes on a device and in host memory for a device, of one field of the state.

    By the formula, either is an N-th of the field. What is left on the device of an offloaded one are the leaves that
    are too small for host memory, and those are too small to be cut.
    """
    offloaded = offloaded or [False] * len(arrays)

    def figure(in_host: bool, stage: int) -> Figure:
        there = [i for i, flag in enumerate(offloaded) if flag is in_host]
        whole = _whole_bytes([logical[i] for i in there])
        each = "" if unit == "F" and whole == n else f"{whole / max(n, 1):.3g}"
        return Figure(
            sum(shard_bytes(arrays[i]) for i in there),
            formulas.stored(whole, shards, stage, itemsize=1),
            f"{each}{unit}{'/N' if stage >= 1 else ''}",
        )

    return figure(False, 0 if any(offloaded) else stage), figure(True, stage)


def _frozen_sent(
    logical: Any, shards: int, stage: int, precision: Precision, kept: Set[str], micro_batches: int
) -> float:
    """What gathering frozen parameters should send: no gradient of theirs is reduced."""
    _, wire = _seen(logical, precision, kept)
    return formulas.communication(wire, shards, stage, micro_batches=micro_batches, compute=1).gather


def _model_states(
    parameters: Figure,
    optimizer: Figure,
    gradients: Figure,
    n: int,
    shards: int,
    stage: int,
    precision: Precision,
    compute: float,
    *,
    in_host: bool,
) -> Figure:
    # Master parameters in the compute dtype are their own compute copy, unless it is gathered whole beside them, or
    # fetched whole from host memory.
    own_copy = precision.compute == precision.master and (stage == 3 or (stage == 0 and not in_host))
    compute = 0 if own_copy else compute
    share = shards if stage >= 1 else 1
    states = formulas.model_states(
        n,
        shards,
        stage,
        compute=compute,
        gradient=precision.accumulate.itemsize,
        master=(parameters.expected or 0) * share / max(n, 1),
        optimizer=(optimizer.expected or 0) * share / max(n, 1),
    )
    copy = [] if own_copy else [f"{compute:.3g}P{'/N' if stage >= 3 else ''}"]
    words = [*copy, gradients.formula, parameters.formula, optimizer.formula]
    return Figure(None, states.total, " + ".join(filter(None, words)))


def _whole_bytes(logical: Sequence[Any]) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in logical)


def shard_bytes(leaf: Any) -> int:
    """Bytes of a global array that one device holds, or has in host memory."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _traffic_words(stage: int, micro_batches: int, replicas: int) -> tuple[str, str]:
    times = f"{micro_batches} x " if micro_batches > 1 else ""
    gather = {0: "none", 3: f"{times}2 x all-gather of P"}.get(stage, "all-gather of P")
    reduce = {0: "all-reduce of P", 1: "reduce-scatter of P"}.get(stage, f"{times}reduce-scatter of P")
    return gather, reduce + (" + all-reduce of P/N" if replicas > 1 and stage >= 1 else "")


def _remarks(
    mesh: Mesh,
    precision: Precision,
    collectives: Sequence[Collective],
    host: Mapping[str, Figure],
    turns: Sequence[Turn],
    in_files: bool,
) -> tuple[str, ...]:
    remarks = []
    if turns:
        times = f"in {len(turns)} turns" if len(turns) > 1 else "all at once: the optimizer ties its leaves together"
        where = "on disk" if in_files else "in host memory"
        remarks.append(f"The update brings what is {where} to the device {times}.")
    if in_files:
        remarks.append("The compiled step is that of the gradients; each turn of the update is a program of its own.")
    if host and mesh.devices.flat[0].platform == "cpu":
        remarks.append("XLA's CPU compiler counts host memory among the arguments and outputs of the device.")
    if host and not mesh.local_devices[0].addressable_memories():
        remarks.append("These devices list no memories: the step is compiled with all of its state on the device.")
    if mesh.devices.flat[0].platform == "cpu" and precision.compute.name == "bfloat16":
        remarks.append("XLA's CPU compiler widens bfloat16 collectives to float32; bytes sent are as compiled.")
    if any(c.note for c in collectives):
        remarks.append("Some collectives are counted under an assumption, which their row names.")
    return tuple(remarks)


def buffer_rows(buffers: Sequence[Buffer]) -> list[list[str]]:
    """The rows of a table of buffers."""
    rows = [["largest at the peak", "bytes", "count", "of", "in", "made at"]]
    for b in buffers:
        shape = f"{b.dtype}[{','.join(map(str, b.shape))}]"
        rows.append([b.name, human(b.bytes), f"{b.count} x", shape, b.phase, b.source])
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def human(n: float | None) -> str:
    """Bytes in decimal units, three digits.

    >>> human(999), human(1.31e9), human(0), human(1_000_000), human(999_999)
    ('999 B', '1.31 GB', '0 B', '1.00 MB', '1.00 MB')
    """
    if n is None:
        return ""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if n < 999.5 or unit == "PB":
            break
        n /= 1000
    digits = 0 if unit == "B" or n >= 99.95 else 1 if n >= 9.995 else 2
    return f"{n:.{digits}f} {unit}"


def _share(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.1f}%" if part is not None and whole else ""


def _beside(figure: Figure) -> list[str]:
    """The cells of a formula: its value, its words, and measured over formula."""
    if figure.expected is None:
        return ["", "", ""]
    ratio = f"{figure.bytes / figure.expected:.3f}" if figure.bytes is not None and figure.expected else ""
    return [human(figure.expected), figure.formula, ratio]


def table(rows: list[list[str]]) -> str:
    """Rows in aligned columns under a ruled header; columns of figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    figures = [all(not cell or cell[0].isdigit() for cell in column[1:]) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in columns)
        for columns in (zip(row, widths, figures, strict=True) for row in rows)
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
