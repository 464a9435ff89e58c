"""Arrays that wait in host memory pass through the device in turns, few of them at a time.

XLA is free to bring all of them at the start, and does. What holds it back is data that a copy waits for: the arrays of
a turn are tied, by an optimization barrier, to the results of the turn before the last. So one turn computes while the
next one's arrays arrive and the last one's results leave.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

AT_ONCE = 2  # turns whose arrays may be on the device together


@dataclasses.dataclass(frozen=True)
class Turn:
    """What is brought to the device together.

    Attributes:
      operands: numbers of the arrays in host memory.
      results: numbers of the results that are made of them.
      bytes: of the operands, on all devices.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    bytes: int


def in_turns(
    function: Callable[..., Any], *operands: Any, after: jax.Array, tell: Callable[[tuple[Turn, ...]], None]
) -> Any:
    """`function(*operands)`, those arrays of the operands that are in host memory brought to the device in turns.

    Which results are made of which operands is read off the traced function, so any function is computed as it is. If
    each of its results is made of all operands, as those of a `cond` around everything are, there is a single turn.

    Args:
      function: of pytrees of arrays; it moves to the device what it computes with.
      operands: its arguments.
      after: a value that is there when the first turns may begin. They would be brought at the start of the program.
      tell: called with the turns.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    run = _Run(program, jax.tree.leaves(operands))
    in_host = lambda x: jax.typeof(x).memory_space == jax.memory.Space.Host
    turns = turns_of(program.jaxpr.in_avals, run.needs(map(in_host, jax.tree.leaves(operands))))
    tell(turns)
    return jax.tree.unflatten(jax.tree.structure(shapes), run.results(turns, after))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a function that is compiled by itself.

    Attributes:
      turn: which results it returns, and which of its operands have waited for that.
      takes: numbers of the operands that it is called with.
      function: from a sequence of operands to a list of results; the same object for pieces that compute the same.
    """

    turn: Turn
    takes: tuple[int, ...]
    function: Callable[[Sequence[Any]], list[Any]]


def waiting_turns(program: core.ClosedJaxpr, waits: Iterable[bool]) -> tuple[Turn, ...]:
    """The turns of a traced function, of each of whose operands is given whether it waits for one.

    >>> program = jax.make_jaxpr(lambda a, b, c: (a + c, b + c, 2 * c))(1.0, 2.0, 3.0)
    >>> [(turn.operands, turn.results) for turn in waiting_turns(program, [True, True, False])]
    [((0,), (0,)), ((1,), (1,))]
    """
    return turns_of(program.in_avals, _abstract(program).needs(waits))


def pieces_of(program: core.ClosedJaxpr, turns: Sequence[Turn]) -> list[Piece]:
    """A traced function in pieces: one for each turn, and a last one for the results of none.

    >>> program = jax.make_jaxpr(lambda a, b, c: (a + c, b + c, 2 * c))(1.0, 2.0, 3.0)
    >>> first, second, rest = pieces_of(program, waiting_turns(program, [True, True, False]))
    >>> first.takes, second.takes, rest.takes, first.function is second.function
    ((0, 2), (1, 2), (2,), True)
    >>> second.turn.results, float(second.function([1.0, 2.0])[0])
    ((1,), 3.0)
    """
    made = {result for turn in turns for result in turn.results}
    rest = tuple(i for i in range(len(program.out_avals)) if i not in made)
    alike: dict[str, Callable[[Sequence[Any]], list[Any]]] = {}
    return [_piece(program, turn, alike) for turn in (*turns, *([Turn((), rest, 0)] if rest else []))]


def _piece(program: core.ClosedJaxpr, turn: Turn, alike: dict[str, Any]) -> Piece:
    """A piece whose function is one of `alike`, by their texts, if that computes the same."""
    takes = _abstract(program).operands_behind(turn.results)

    def function(given: Sequence[Any]) -> list[Any]:
        operands = dict(zip(takes, given, strict=True))
        return _Run(program, [operands.get(i) for i in range(len(program.in_avals))]).made(turn.results)

    traced = jax.make_jaxpr(function)([program.in_avals[i] for i in takes])
    text = traced.jaxpr.pretty_print(use_color=False, custom_pp_eqn_rules=False)
    if not traced.consts:
        function = alike.setdefault(text, function)
    return Piece(turn, takes, function)


def _abstract(program: core.ClosedJaxpr) -> "_Run":
    """A traced program whose operands are not there."""
    return _Run(program, [None] * len(program.in_avals))


def turns_of(operands: Sequence[Any], needs: Sequence[frozenset[int]]) -> tuple[Turn, ...]:
    """The turns of operands, given as abstract arrays, of which each result needs some.

    What a result needs comes in one turn. Small arrays share one, as long as it is not larger than the largest.

    >>> small, large = jax.ShapeDtypeStruct((8,), "float32"), jax.ShapeDtypeStruct((16,), "float32")
    >>> needs = [frozenset({0, 2}), frozenset({1}), frozenset({3})]
    >>> [(turn.operands, turn.bytes) for turn in turns_of([small, small, large, small], needs)]
    [((0, 2), 96), ((1, 3), 64)]
    """
    groups = _joined(needs)
    size = lambda group: sum(operands[i].size * operands[i].dtype.itemsize for i in group)
    largest = max(map(size, groups), default=0)
    packed: list[list[int]] = []
    for group in groups:
        fitting = (i for i, other in enumerate(packed) if size(other) + size(group) <= largest)
        if (i := next(fitting, None)) is None:
            packed.append(group)
        else:
            packed[i] = sorted([*packed[i], *group])
    made = lambda group: tuple(i for i, need in enumerate(needs) if need and need <= set(group))
    return tuple(Turn(tuple(group), made(group), size(group)) for group in packed)


def _joined(needs: Iterable[frozenset[int]]) -> list[list[int]]:
    """Operands in groups, so that no result needs two of them."""
    group_of: dict[int, list[int]] = {}
    for need in needs:
        group = sorted({i for operand in need for i in group_of.get(operand, [operand])})
        group_of |= dict.fromkeys(group, group)
    return [group for first, group in sorted(group_of.items()) if first == group[0]]


@dataclasses.dataclass(frozen=True)
class _Operation:
    """One equation of a traced program, its values known by their numbers."""

    equation: core.JaxprEqn
    takes: tuple[int, ...]
    makes: tuple[int, ...]

    def __call__(self, *operands: Any) -> Sequence[Any]:
        primitive = self.equation.primitive
        with self.equation.ctx.manager:
            made = primitive.bind(*operands, **primitive.get_bind_params(self.equation.params))
        return made if primitive.multiple_results else [made]


class _Run:
    """A traced program that is computed piece by piece."""

    def __init__(self, program: core.ClosedJaxpr, operands: Sequence[Any]) -> None:
        self._values: dict[int, Any] = {}  # a value's number is its place in the order of their making
        self._count = 0
        self._operands = [self._new(x) for x in operands]
        self._operations: list[_Operation] = []
        self._results = self._read(program, self._operands)
        self._maker = {number: i for i, op in enumerate(self._operations) for number in op.makes}
        self._left = set(range(len(self._operations)))

    def _new(self, *value: Any) -> int:
        """A number for a value that is there already, or for one to come."""
        self._count += 1
        self._values |= zip([self._count], value, strict=False)
        return self._count

    def _read(self, program: core.ClosedJaxpr, operands: Sequence[int]) -> list[int]:
        """Adds the operations of a program, those of the functions that it calls in place of the calls."""
        jaxpr = program.jaxpr
        numbers = dict(zip(jaxpr.invars, operands, strict=True))
        numbers |= {variable: self._new(x) for variable, x in zip(jaxpr.constvars, program.consts, strict=True)}
        number = lambda atom: self._new(atom.val) if isinstance(atom, core.Literal) else numbers[atom]
        for eqn in jaxpr.eqns:
            if called := _called(eqn):
                made = self._read(called, [number(atom) for atom in eqn.invars])
            else:
                made = [self._new() for _ in eqn.outvars]
                self._operations.append(_Operation(eqn, tuple(number(atom) for atom in eqn.invars), tuple(made)))
            numbers |= dict(zip(eqn.outvars, made, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def needs(self, waits: Iterable[bool]) -> list[frozenset[int]]:
        """Of the operands that wait, those that each result is made of; what an operation makes needs all it takes."""
        waiting = enumerate(zip(self._operands, waits, strict=True))
        needs = {number: frozenset([i]) for i, (number, waits) in waiting if waits}
        nothing: frozenset[int] = frozenset()
        for op in self._operations:
            needs |= dict.fromkeys(op.makes, nothing.union(*(needs.get(number, nothing) for number in op.takes)))
        return [needs.get(number, nothing) for number in self._results]

    def results(self, turns: Sequence[Turn], after: jax.Array) -> list[Any]:
        """The program's results, computed turn by turn."""
        for i, turn in enumerate(turns):
            numbers = [self._operands[operand] for operand in turn.operands]
            earlier = turns[i - AT_ONCE].results if i >= AT_ONCE else ()
            awaited = [self._values[self._results[result]] for result in earlier] or [after]
            arrays, _ = jax.lax.optimization_barrier(([self._values[number] for number in numbers], awaited))
            self._values |= dict(zip(numbers, arrays, strict=True))
            self._compute(self._behind(self._results[result] for result in turn.results))
        self._compute(sorted(self._left))
        return [self._values[number] for number in self._results]

    def operands_behind(self, results: Iterable[int]) -> tuple[int, ...]:
        """The operands that some results are made of."""
        numbers = {self._results[result] for result in results}
        numbers |= {number for i in self._behind(numbers) for number in self._operations[i].takes}
        return tuple(i for i, number in enumerate(self._operands) if number in numbers)

    def made(self, results: Sequence[int]) -> list[Any]:
        """Some results, computed with nothing but the operations that they need."""
        numbers = [self._results[result] for result in results]
        self._compute(self._behind(numbers))
        return [self._values[number] for number in numbers]

    def _behind(self, numbers: Iterable[int]) -> list[int]:
        """The operations that are still to be computed for some values."""
        waiting, found = list(numbers), set[int]()
        while waiting:
            maker = self._maker.get(waiting.pop())
            if maker in self._left and maker not in found:
                found.add(maker)
                waiting += self._operations[maker].takes
        return sorted(found)

    def _compute(self, operations: Sequence[int]) -> None:
        for i in operations:
            op = self._operations[i]
            self._values |= dict(zip(op.makes, op(*map(self._values.__getitem__, op.takes)), strict=True))
        self._left -= set(operations)


def _called(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """The function that an equation calls, where the call says no more than that."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    given = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return None if any(isinstance(s, jax.sharding.Sharding) for s in given) else eqn.params["jaxpr"]
