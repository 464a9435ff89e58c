"""What of a file makes up what of a model: one piece for a parameter, or for one layer of a stack of them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from zerojax.weights.formats import LAYER, Format, Rule
from zerojax.weights.transforms import Shape, Transform


@dataclasses.dataclass(frozen=True)
class Piece:
    """A parameter, or a layer of a parameter that holds one for each layer.

    Attributes:
        parameter: the parameter's name.
        layer: the index along its first dim; None for all of it.
        tensors: the shapes of the tensors that make it up, by name.
        transform: how they do.
    """

    parameter: str
    layer: int | None
    tensors: Mapping[str, Shape]
    transform: Transform


def pieces_of(parameters: Mapping[str, Shape], rules: Iterable[Rule]) -> dict[str, list[Piece]]:
    """The pieces of each parameter, by its name; none for a parameter that no rule is about.

    >>> from zerojax.weights.transforms import Joined
    >>> rules = [Rule("blocks/{layer}/up", ("h.{layer}.fc",), Joined())]
    >>> [piece.tensors for piece in pieces_of({"blocks/up": (2, 8, 32)}, rules)["blocks/up"]]
    [{'h.0.fc': (32, 8)}, {'h.1.fc': (32, 8)}]
    >>> [piece.tensors for piece in pieces_of({"blocks/[1]/up": (8, 32)}, rules)["blocks/[1]/up"]]
    [{'h.1.fc': (32, 8)}]
    """
    by_parameter = {rule.parameter: rule for rule in rules}
    stacked = {rule.parameter.replace(f"/{LAYER}", ""): rule for rule in rules if LAYER in rule.parameter}
    pieces: dict[str, list[Piece]] = {}
    for name, shape in parameters.items():
        if name in stacked:
            pieces[name] = [_piece(name, i, i, shape[1:], stacked[name]) for i in range(shape[0])]
            continue
        number = re.search(r"/\[(\d+)\]", name)
        rule = by_parameter.get(name.replace(number[0], f"/{LAYER}") if number else name)
        pieces[name] = [] if rule is None else [_piece(name, None, int(number[1]) if number else 0, shape, rule)]
    return pieces


def _piece(parameter: str, index: int | None, layer: int, shape: Shape, rule: Rule) -> Piece:
    names = (name.replace(LAYER, str(layer)) for name in rule.tensors)
    return Piece(parameter, index, dict(zip(names, rule.transform.shapes(shape), strict=True)), rule.transform)


def complete_names(names: Iterable[str], form: Format) -> dict[str, str]:
    """A file's names of its tensors by the names that the rules have for them; buffers are left out."""
    found: dict[str, str] = {}
    for name in names:
        complete = form.complete(name)
        if not form.is_buffer(complete):
            # Of two spellings of one name, the second stays one that no rule knows.
            found[name if complete in found else complete] = name
    return found


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` matches one of the patterns, in which ``*`` stands for any text."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
