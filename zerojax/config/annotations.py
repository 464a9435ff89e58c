"""Whether a value written in a configuration fits a parameter's annotation, and the annotation in words."""

import collections.abc
import os
import types
import typing
from collections.abc import Iterator
from typing import Any

# What a configuration can write down; an annotation of any other class may take a number (an array does), never text.
_LITERALS: tuple[type, ...] = (bool, int, float, str, list, tuple, dict, types.NoneType)


def fits(value: Any, annotation: Any) -> bool:
    """Whether a literal may be passed where ``annotation`` stands; doubtful cases fit.

    An int fits float, a bool fits neither, a list fits tuple and any sequence; what is inside is not looked at.

    >>> fits(1, float), fits(True, int), fits("fp32", typing.Literal["fp32", "bf16"]), fits("3", int | None)
    (True, False, True, False)
    """
    return any(_fits(value, member) for member in _members(annotation))


def describe(annotation: Any) -> str:
    """The annotation in words.

    >>> describe(int | None), describe(typing.Literal["fp32", "bf16"])
    ('int or None', "'fp32' or 'bf16'")
    """
    members = list(_members(annotation))
    if any(member in (int, float) for member in members):  # an array type beside a number adds nothing one could write
        kept = (*_LITERALS, collections.abc.Callable)
        members = [member for member in members if member in kept or not isinstance(member, type)]
        members = [member for member in members if not (member is bool and float in members)]
        members = [member for member in members if not (member is int and float in members)]
    words = dict.fromkeys(_describe(member) for member in members)
    return " or ".join(sorted(words, key="None".__eq__))


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union, or of nested ones, without their type arguments; Literal stays whole."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    elif origin is typing.Annotated:
        yield from _members(typing.get_args(annotation)[0])
    elif annotation is None:
        yield types.NoneType
    else:
        yield annotation if origin is None or origin is typing.Literal else origin


def _fits(value: Any, member: Any) -> bool:
    if typing.get_origin(member) is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(member))
    if member is Any or not isinstance(member, type):  # or a type variable, or a name that is not evaluated
        return True
    if member is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if member is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if issubclass(member, tuple) or member is collections.abc.Sequence:
        return isinstance(value, (list, tuple))
    if member in _LITERALS:
        return isinstance(value, member)
    if isinstance(value, str):
        return issubclass(member, os.PathLike)
    if isinstance(value, (int, float)):
        return member is not collections.abc.Callable and not issubclass(member, type)
    try:
        return isinstance(value, member)
    except TypeError:  # a protocol that cannot be asked
        return True


def _describe(member: Any) -> str:
    if typing.get_origin(member) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(member)))
    if member is types.NoneType:
        return "None"
    if member is collections.abc.Callable:
        return "a function (@NAME)"
    return getattr(member, "__name__", str(member))
