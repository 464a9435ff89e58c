"""What is said when a device has too little memory: where it goes, and which settings would have fitted."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from zerojax.errors import OutOfMemoryError, RunError
from zerojax.zero import fit
from zerojax.zero.buffers import largest_buffers
from zerojax.zero.disk import DiskArray, OnDisk
from zerojax.zero.partition import PINNED_HOST
from zerojax.zero.report import NAMES, buffer_rows, human, shard_bytes, table
from zerojax.zero.state import Layout, State
from zerojax.zero.step import Step, TrainStep

Rows = list[tuple[str, int | None]]


@contextlib.contextmanager
def explained(what: str, details: Callable[[], str]) -> Iterator[None]:
    """An allocation that fails inside ends in an `OutOfMemoryError` of the first error and these details.

    Args:
      what: what did not fit, as in "a training step".
      details: makes the text; whatever goes wrong in it is a line of it, and the first error stays the cause.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        try:
            text = details()
        except Exception as failure:
            text = f"Where it goes could not be told: {type(failure).__name__}: {failure}"
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise OutOfMemoryError(f"{what} does not fit into the memory of a device: {first}", text) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or in host memory."""
    text = str(error)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def step_details(zero: Any, step: Step, layout: Layout, batch: Any) -> str:
    """Where the memory of a step goes, and settings under which the same batch fits.

    Args:
      zero: the settings.
      step: that failed.
      layout: of its state.
      batch: its placed batch; only shapes are read.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    compiled = _quietly(lambda: fit.compiled_only(step.lower(layout.abstract, shapes), layout.mesh))
    rows = _state_rows(layout.abstract)
    if compiled is not None:
        now = fit.Memory.of(compiled)
        rows.append(("batch", now.arguments - sum(bytes or 0 for _, bytes in rows)))
        rows.append(("temporaries", now.temporaries))
    else:  # the compiler itself refuses: anything that compiles is less
        now = fit.Memory(sum(bytes or 0 for _, bytes in rows), 0, 0)
    if isinstance(step, TrainStep):
        kept = _quietly(lambda: step.activations(layout.abstract, shapes))
        rows.append(("of them kept for the backward pass, as traced", kept))
    if compiled is not None:
        rows.append(("outputs not aliased", now.outputs))
    under = functools.partial(fit.step_memory, zero, step, layout, shapes)
    rows_of_device = fit.rows_of(shapes, layout.mesh) if isinstance(step, TrainStep) else 0
    return _text(zero, rows, now if compiled is not None else None, compiled, under, now, rows_of_device)


def init_details(zero: Any, lower: Callable[[Any], Any], state: State) -> str:
    """The same of a new state.

    Args:
      zero: the settings.
      lower: lowers the program that builds the state, with given settings.
      state: it, of shapes.
    """
    compiled = _quietly(lambda: fit.compiled_only(lower(zero), zero.mesh))
    rows = _state_rows(state)
    now = fit.Memory.of(compiled) if compiled is not None else None
    if now is not None:
        rows.append(("temporaries", now.temporaries))

    def under(changes: Mapping[str, Any]) -> fit.Memory:
        return fit.Memory.of(fit.compiled_only(lower(fit.changed(zero, changes)), zero.mesh))

    held = sum(bytes or 0 for _, bytes in rows)
    names = [leaf.name for leaf in jax.tree.leaves(dataclasses.replace(state, **state.layout.leaves))]
    return _text(zero, rows, now, compiled, under, now or fit.Memory(held, 0, 0), 0, names)


def _text(
    zero: Any,
    rows: Rows,
    total: fit.Memory | None,
    compiled: Any,
    under: Callable[[Mapping[str, Any]], fit.Memory],
    now: fit.Memory,
    rows_of_device: int,
    results: Sequence[str] = (),
) -> str:
    limit = fit.device_limit(zero.mesh)
    cells = [["memory of a device", "bytes"], *([name, human(n)] for name, n in rows if n is not None)]
    if total is not None:
        cells.append(["in all", human(total.total)])
    if limit is not None:
        cells.append(["a device has", human(limit)])
    blocks = [table(cells)]
    if compiled is not None:
        blocks.append(table(buffer_rows(largest_buffers(compiled.as_text(), results=results))))
    return "\n\n".join([*blocks, _settings(zero, under, now, limit, rows_of_device)])


def _settings(
    zero: Any, under: Callable[[Mapping[str, Any]], fit.Memory], now: fit.Memory, limit: int | None, rows: int
) -> str:
    if jax.process_count() > 1:
        return "Other settings are tried in a run of one process."  # compiling waits for the other processes
    search = fit.settings_that_fit(zero, under, now, now.total if limit is None else limit, rows)
    if search.fitting:
        head = "would have fitted" if limit is not None else "needs less"
        found: Sequence[fit.Fit] = search.fitting
        return table([[head, "bytes of a device"], *([str(f), human(f.memory.total)] for f in found)])
    if search.smallest is None:
        return "No other settings could be tried."
    return (
        f"None of {search.compiled} other settings fits; the smallest is {search.smallest} with "
        f"{human(search.smallest.memory.total)}."
    )


def _state_rows(state: State) -> Rows:
    """Bytes on a device of what a state holds; leaves in host memory or in files lie elsewhere."""
    fields = {"params": NAMES["parameters"], "frozen": NAMES["frozen"], "opt_state": NAMES["optimizer"]}
    on_device = lambda tree: sum(map(shard_bytes, (x for x in jax.tree.leaves(tree) if not _elsewhere(x))))
    rows: Rows = [(name, on_device(getattr(state, field))) for field, name in fields.items()]
    rest = (state.step, state.variables, state.rng, state.loss_scale)
    return [row for row in rows if row[1]] + [("other state", on_device(rest))]


def _elsewhere(x: Any) -> bool:
    return isinstance(x, OnDisk | DiskArray) or x.sharding.memory_kind == PINNED_HOST


def _quietly(make: Callable[[], Any]) -> Any:
    """What `make` returns, or `None` where it fails: the table goes without it."""
    try:
        return make()
    except (jax.errors.JaxRuntimeError, MemoryError, RunError):
        return None
