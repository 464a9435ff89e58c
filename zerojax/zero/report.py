"""What a training step costs each device: memory and communication as compiled, beside ZeRO's formulas."""

import dataclasses
import math
from collections.abc import Iterable, Sequence, Set
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.mesh import REPLICA_AXIS, SHARD_AXIS
from zerojax.paths import path_name
from zerojax.precision import Precision
from zerojax.zero import formulas
from zerojax.zero.collectives import Collective, mesh_axes, read_collectives


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
      parameters: master parameters, as stored between steps.
      frozen: parameters that are not trained, F bytes of them.
      optimizer: the optimizer's state, as stored between steps.
      other: the rest of the state: step, rng, variables.
      gradients: the accumulated gradients, by formula: the compiler counts them among the temporaries.
      model_states: parameters in the compute dtype, gradients and stored state together, by formula.
      temporaries: of the compiled step: activations, gradients, gathered parameters, buffers.
      arguments: of the compiled step: state and batch.
      outputs: of the compiled step: state and metrics.
      aliased: part of the outputs that takes the place of donated arguments.
      code: the compiled code.
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
    other: Figure
    gradients: Figure
    model_states: Figure
    temporaries: int
    arguments: int
    outputs: int
    aliased: int
    code: int
    gather: Figure
    reduce: Figure
    sent: Figure
    collectives: tuple[Collective, ...]
    notes: tuple[LeafNote, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def state(self) -> Figure:
        """All that is stored between steps."""
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
        blocks = [self._heading(), _table(self._memory_rows()), _table(self._traffic_rows())]
        if self.collectives:
            blocks.append(_table(self._collective_rows()))
        if self.notes:
            blocks.append(_table(self._note_rows()))
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
            ("master parameters", self.parameters),
            *([("frozen parameters", self.frozen)] if self.frozen.bytes else []),
            ("optimizer state", self.optimizer),
            ("other state", self.other),
            ("state between steps", state),
        ):
            rows.append([name, _human(figure.bytes), _share(figure.bytes, state.bytes), *_beside(figure)])
        rows.append(["accumulated gradients, by formula", "", "", *_beside(self.gradients)])
        rows.append(["ZeRO's model states, by formula", "", "", *_beside(self.model_states)])
        compiled = (
            ("compiled step: arguments", self.arguments),
            ("compiled step: temporaries", self.temporaries),
            ("compiled step: outputs not aliased", self.outputs - self.aliased),
            ("compiled step: in all", self.peak),
        )
        return rows + [[name, _human(n), _share(n, self.peak), "", "", ""] for name, n in compiled]

    def _traffic_rows(self) -> list[list[str]]:
        rows = [["sent in a step", "bytes", "share", "ZeRO's formula", "", "ratio"]]
        for name, figure in (("to gather", self.gather), ("to reduce", self.reduce), ("in all", self.sent)):
            rows.append([name, _human(figure.bytes), _share(figure.bytes, self.sent.bytes), *_beside(figure)])
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
            rows.append([kind, axes, dtype, count, _human(sent), _share(sent, self.sent.bytes), *(note or [""])])
        return rows

    def _note_rows(self) -> list[list[str]]:
        rows = [["leaf", "shape", "bytes", ""]]
        for note in sorted(self.notes, key=lambda note: -note.bytes):
            rows.append([note.path, "x".join(map(str, note.shape)) or "scalar", _human(note.bytes), note.note])
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
    """
    logical = state.layout.logical
    shards, replicas = mesh.shape[SHARD_AXIS], mesh.shape.get(REPLICA_AXIS, 1)
    n_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(logical["params"]))
    over = "/N" if stage >= 1 else ""

    def stored(tree: Any, whole: Any) -> Figure:
        whole_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(whole))
        each = whole_bytes / max(n_parameters, 1)
        return Figure(
            sum(map(_device_bytes, jax.tree.leaves(tree))),
            formulas.stored(n_parameters, shards, stage, itemsize=each),
            f"{each:.3g}P{over}",
        )

    parameters, optimizer = stored(state.params, logical["params"]), stored(state.opt_state, logical["opt_state"])
    compute, wire = (n / max(n_parameters, 1) for n in _seen(logical["params"], precision, kept))
    frozen, frozen_sent = _frozen(state, logical["frozen"], shards, stage, precision, kept, micro_batches, over)
    collectives = read_collectives(compiled.as_text())
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
        other=Figure(
            sum(map(_device_bytes, jax.tree.leaves((state.step, state.variables, state.rng, state.loss_scale))))
        ),
        gradients=gradients,
        model_states=_model_states(parameters, optimizer, gradients, n_parameters, shards, stage, precision, compute),
        temporaries=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
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
        remarks=_remarks(mesh, precision, collectives),
    )


def _seen(logical: Any, precision: Precision, kept: Set[str]) -> tuple[int, int]:
    """Bytes of parameters as the model sees them, and as they are gathered: the narrower of that and their own."""
    compute = wire = 0
    for path, leaf in jax.tree.leaves_with_path(logical):
        seen = precision.kept if path_name(path) in kept else precision.compute
        compute += math.prod(leaf.shape) * seen.itemsize
        wire += math.prod(leaf.shape) * min(leaf.dtype.itemsize, seen.itemsize)
    return compute, wire


def _frozen(
    state: Any,
    logical: Any,
    shards: int,
    stage: int,
    precision: Precision,
    kept: Set[str],
    micro_batches: int,
    over: str,
) -> tuple[Figure, float]:
    """Bytes stored of frozen parameters, and what gathering them should send: no gradient of theirs is reduced."""
    leaves = jax.tree.leaves(logical)
    if not leaves:
        return Figure(0), 0.0
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    _, wire = _seen(logical, precision, kept)
    sent = formulas.communication(wire, shards, stage, micro_batches=micro_batches, compute=1).gather
    stored = sum(map(_device_bytes, jax.tree.leaves(state.frozen)))
    return Figure(stored, formulas.stored(whole, shards, stage, itemsize=1), f"F{over}"), sent


def _model_states(
    parameters: Figure,
    optimizer: Figure,
    gradients: Figure,
    n: int,
    shards: int,
    stage: int,
    precision: Precision,
    compute: float,
) -> Figure:
    # Master parameters in the compute dtype are their own compute copy, unless it is gathered whole beside them.
    own_copy = precision.compute == precision.master and stage in (0, 3)
    compute = 0 if own_copy else compute
    share = shards if stage >= 1 else 1
    states = formulas.model_states(
        n,
        shards,
        stage,
        compute=compute,
        gradient=precision.accumulate.itemsize,
        master=precision.master.itemsize,
        optimizer=(optimizer.expected or 0) * share / max(n, 1),
    )
    copy = [] if own_copy else [f"{compute:.3g}P{'/N' if stage >= 3 else ''}"]
    return Figure(None, states.total, " + ".join([*copy, gradients.formula, parameters.formula, optimizer.formula]))


def _device_bytes(leaf: Any) -> int:
    """Bytes of a global array that one device holds."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _traffic_words(stage: int, micro_batches: int, replicas: int) -> tuple[str, str]:
    times = f"{micro_batches} x " if micro_batches > 1 else ""
    gather = {0: "none", 3: f"{times}2 x all-gather of P"}.get(stage, "all-gather of P")
    reduce = {0: "all-reduce of P", 1: "reduce-scatter of P"}.get(stage, f"{times}reduce-scatter of P")
    return gather, reduce + (" + all-reduce of P/N" if replicas > 1 and stage >= 1 else "")


def _remarks(mesh: Mesh, precision: Precision, collectives: Sequence[Collective]) -> tuple[str, ...]:
    remarks = []
    if mesh.devices.flat[0].platform == "cpu" and precision.compute.name == "bfloat16":
        remarks.append("XLA's CPU compiler widens bfloat16 collectives to float32; bytes sent are as compiled.")
    if any(c.note for c in collectives):
        remarks.append("Some collectives are counted under an assumption, which their row names.")
    return tuple(remarks)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _human(n: float | None) -> str:
    """Bytes in decimal units, three digits.

    >>> _human(999), _human(1.31e9), _human(0), _human(1_000_000), _human(999_999)
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
    return [_human(figure.expected), figure.formula, ratio]


def _table(rows: list[list[str]]) -> str:
    """Rows in aligned columns under a ruled header; columns of figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    figures = [all(not cell or cell[0].isdigit() for cell in column[1:]) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in columns)
        for columns in (zip(row, widths, figures, strict=True) for row in rows)
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
