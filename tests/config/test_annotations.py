"""Which literals fit which annotations."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypeVar, Union

import jax
import pytest

from zerojax.config.annotations import describe, fits

Schedule = Union[float, jax.Array, Callable[[int], float]]  # noqa: UP007 - the form that optax writes


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, int, True),
        (1.0, int, False),
        (True, int, False),
        (True, bool, True),
        (1, float, True),
        (False, float, False),
        ("x", str, True),
        (1, str, False),
        (None, None, True),
        (None, int, False),
        (None, Optional[int], True),  # noqa: UP045 - the form that optax writes
        ("x", int | None, False),
        ([1, 2], tuple[int, ...], True),
        ((1, 2), Sequence[int], True),
        ("ab", Sequence[int], False),
        ({"a": 1}, dict[str, int], True),
        ([], dict, False),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False),
        (1, Literal[True], False),
        (0.1, Schedule, True),
        ("fast", Schedule, False),
        (3, Callable[[], int], False),
        (0.5, jax.Array, True),
        ("text", jax.Array, False),
        ("file", os.PathLike, True),
        ("file", Path, True),
        ("anything", Any, True),
        ("anything", TypeVar("T"), True),
        ("anything", "NotEvaluated", True),
        (1, Annotated[int, "a note"], True),
        ("x", Annotated[int, "a note"], False),
    ],
)
def test_fits(value, annotation, expected):
    assert fits(value, annotation) is expected


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "int"),
        (None | int, "int or None"),
        (Literal["a", "b"] | None, "'a' or 'b' or None"),
        (Schedule, "float or a function (@NAME)"),
        (tuple[int, int] | None, "tuple or None"),
        (jax.typing.ArrayLike, "float"),
    ],
)
def test_describe(annotation, words):
    assert describe(annotation) == words
