"""The training step of a state that lies in files, and the making of such a state.

The gradients are one compiled program, and each turn of the update is one more: its files are read while the turn
before computes, and its results are written while the next one does.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.zero.disk import DiskArray
from zerojax.zero.loss_scale import after_step
from zerojax.zero.state import Layout, State
from zerojax.zero.streaming import AT_ONCE, Room, Stream
from zerojax.zero.turns import Turn, pieces_of, waiting_turns
from zerojax.zero.update import Gradients, UpdateSettings, metrics_after, prepared, update_of

MOVED = ("step", "variables", "loss_scale")  # what is known before the update


class StreamedStep:
    """`(state, batch) -> (state, metrics, losses)` for a layout with leaves in files."""

    def __init__(
        self,
        layout: Layout,
        gradients_in: Callable[[State, Any], Gradients],
        settings: UpdateSettings,
        tell: Callable[[tuple[Turn, ...]], None],
    ):
        self._layout, self._gradients_in, self._settings, self._tell = layout, gradients_in, settings, tell
        everywhere = NamedSharding(layout.mesh, PartitionSpec())
        moved = {field: getattr(layout.shardings, field) for field in MOVED}
        gradients = jax.tree.map(lambda leaf: NamedSharding(layout.mesh, leaf.spec), layout.leaves["params"])
        self._first = jax.jit(self._begin, donate_argnums=0, out_shardings=(moved, gradients, *[everywhere] * 4))

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, jax.Array], jax.Array]:
        update = self._update
        self._tell(update.turns)
        leaves, structure = jax.tree.flatten((state.params, state.opt_state))
        leaves = [x.successor() if isinstance(x, DiskArray) else x for x in leaves]
        with update.stream(leaves) as stream:
            moved, gradients, loss, losses, finite, metrics = self._first(*_parted(state), batch)
            if not self._settings.precision.skips or finite:
                loss.block_until_ready()  # no array of a file is on the device beside the gradients' program
                operands = [*leaves, *jax.tree.leaves(gradients), loss]
                del gradients
                leaves = update(stream, operands, leaves)
        params, opt_state = jax.tree.unflatten(structure, leaves)
        return dataclasses.replace(state, **moved, params=params, opt_state=opt_state), metrics, losses

    def lower(self, state: State, batch: Any) -> jax.stages.Lowered:
        """The program of the gradients, lowered; it has nearly all of the step's memory and communication."""
        self._tell(self._update.turns)
        return self._first.lower(*_parted(state), batch)

    def _begin(self, moved: dict[str, Any], kept: State, batch: Any) -> tuple[Any, ...]:
        """What comes before the update: the moved fields, and gradients, loss, losses, whether to update, metrics."""
        before = dataclasses.replace(kept, **moved)
        new, policy = self._gradients_in(before, batch), self._settings.precision
        gradients, norm, finite = prepared(self._layout, new.gradients, self._settings)
        after = {"step": before.step + 1, "variables": self._layout.store("variables", new.variables)}
        if policy.skips:
            after = {k: jax.tree.map(functools.partial(jnp.where, finite), x, moved[k]) for k, x in after.items()}
        after["loss_scale"] = after_step(policy.loss_scale, before.loss_scale, ~finite)
        metrics = new.metrics | metrics_after(after["step"], after["loss_scale"], norm)
        return after, gradients, new.loss, new.losses, finite, metrics

    @functools.cached_property
    def _update(self) -> "_Pieces":
        layout, update = self._layout, update_of(self._layout)
        form = layout.abstract
        like_array = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        gradient = lambda leaf: jax.ShapeDtypeStruct(leaf.stored_shape, self._settings.precision.accumulate)
        operands = (
            form.params,
            jax.tree.map(like_array, form.opt_state),
            jax.tree.map(gradient, layout.leaves["params"]),
            jax.ShapeDtypeStruct((), jnp.float32),
        )

        def updated(params: Any, opt_state: Any, gradients: Any, loss: jax.Array) -> tuple[Any, Any]:
            params, opt_state = layout.fetch("params", params), layout.fetch("opt_state", opt_state)
            params, opt_state = update(params, opt_state, gradients, loss)
            return layout.send("params", params), layout.send("opt_state", opt_state)

        program = jax.make_jaxpr(updated)(*operands)
        stored = jax.tree.leaves((layout.leaves["params"], layout.leaves["opt_state"]))
        waits = [leaf.directory is not None or leaf.offloaded for leaf in stored]
        waits += [False] * (len(program.in_avals) - len(waits))
        shardings = [leaf.sharding(layout.mesh) for leaf in stored]
        return _Pieces(program, waiting_turns(program, waits), shardings, in_place=True)


class _Pieces:
    """A traced function that is computed piece by piece, with operands from files and results into files.

    Args:
      program: the function.
      turns: its pieces.
      shardings: of its results.
      in_place: whether result i is a new value of operand i, and takes its place.
    """

    def __init__(self, program: Any, turns: tuple[Turn, ...], shardings: Sequence[Any], *, in_place: bool):
        self.turns = turns
        self._pieces, self._shardings, self._in_place = pieces_of(program, turns), shardings, in_place
        self._last_use = {i: n for n, piece in enumerate(self._pieces) for i in piece.takes}
        self._compiled = functools.cache(_compiled)
        self._rooms = [Room() for _ in range(AT_ONCE)]

    def stream(self, operands: Sequence[Any]) -> Stream:
        """A stream that reads the files of each piece, of those operands that are `DiskArray`s."""
        reads = [functools.partial(_load, _files(operands, piece.takes)) for piece in self._pieces]
        return Stream(reads, self._rooms)

    def __call__(self, stream: Stream, operands: list[Any], places: Sequence[Any]) -> list[Any]:
        """The results: arrays, or where `places` has a `DiskArray` this one, which `stream` writes.

        Operands are taken out of their list after their last use.
        """
        results = list(places)
        for n, piece in enumerate(self._pieces):
            loaded = stream.read()
            given = [operands[i].placed(loaded.pop(i)) if i in loaded else operands[i] for i in piece.takes]
            last = {i for i in piece.takes if self._last_use[i] == n}
            makes = piece.turn.results
            reused = tuple(self._in_place and i in last and i in makes for i in piece.takes)
            compute = self._compiled(piece.function, reused, tuple(self._shardings[i] for i in makes))
            made = dict(zip(makes, compute(*_divided(given, reused)), strict=True))
            del given
            for i in last:
                operands[i] = None
            files = _files(places, makes)
            stream.write(functools.partial(_store, files, {i: made.pop(i) for i in files}))
            for i, x in made.items():
                results[i] = x
        return results


def new_opt_state(layout: Layout, params: Any, places: Any) -> Any:
    """The state that the optimizer begins with; of what lies in files, few leaves at a time are in memory.

    Args:
      layout: of the state.
      params: the stored parameters.
      places: a tree of the optimizer's state with the `DiskArray`s that are written.
    """

    def init(params: Any) -> Any:
        return layout.store("opt_state", layout.optimizer.init(layout.view("params", layout.fetch("params", params))))

    leaves, structure = jax.tree.flatten(places)
    turns = tuple(Turn((), (i,), 0) for i, leaf in enumerate(leaves) if isinstance(leaf, DiskArray))
    shardings = jax.tree.leaves(layout.shardings.opt_state)
    pieces = _Pieces(jax.make_jaxpr(init)(params), turns, shardings, in_place=False)
    operands = jax.tree.leaves(params)
    with pieces.stream(operands) as stream:
        leaves = pieces(stream, operands, leaves)
    return jax.tree.unflatten(structure, leaves)


def _parted(state: State) -> tuple[dict[str, Any], State]:
    """The fields that the gradients' program moves, and a state with the others that it needs."""
    moved = {field: getattr(state, field) for field in MOVED}
    nothing: dict[str, Any] = dict.fromkeys((*MOVED, "opt_state"))
    return moved, dataclasses.replace(state, **nothing)


def _compiled(
    function: Callable[[Sequence[Any]], list[Any]], reused: tuple[bool, ...], shardings: tuple[Any, ...]
) -> Any:
    """A piece's function of the operands whose memory its results may take, and of the others."""

    def piece(given: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        operands = iter(given), iter(kept)
        return function([next(operands[not flag]) for flag in reused])

    return jax.jit(piece, donate_argnums=0, out_shardings=list(shardings))


def _divided(operands: Sequence[Any], reused: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    pick = lambda wanted: [x for x, flag in zip(operands, reused, strict=True) if flag is wanted]
    return pick(True), pick(False)


def _files(arrays: Sequence[Any], numbers: Sequence[int]) -> dict[int, DiskArray]:
    """Those of some arrays that lie in files; numbers beyond are of arrays that do not."""
    return {i: arrays[i] for i in numbers if i < len(arrays) and isinstance(arrays[i], DiskArray)}


def _load(arrays: Mapping[int, DiskArray], room: Room) -> dict[int, list[np.ndarray]]:
    """The shards of arrays, read into a room."""
    shards = iter(room.arrays([array.form_of_parts for array in arrays.values() for _ in array.parts]))
    loaded = {i: [next(shards) for _ in array.parts] for i, array in arrays.items()}
    for i, array in arrays.items():
        array.load(loaded[i])
    return loaded


def _store(arrays: Mapping[int, DiskArray], values: Mapping[int, jax.Array]) -> None:
    for i, array in arrays.items():
        array.write(values[i])
