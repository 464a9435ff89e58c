"""What a configuration binds, where each value was written, and what a run of it would use."""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import gin
from gin.config import ConfigurableReference as Reference

from zerojax.config.annotations import describe, fits
from zerojax.errors import UserError, nearest

MACRO = "gin.macro"

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Binding:
    """One ``scope/name.parameter = value`` and where it is written: "FILE:LINE", or the argument that holds it."""

    scope: str
    selector: str
    parameter: str
    value: Any
    place: str

    def __str__(self) -> str:
        if self.selector == MACRO:
            return self.scope
        return f"{self.scope}/{short(self.selector)}.{self.parameter}".lstrip("/")


class Call(NamedTuple):
    """A constructor that a run reaches, and the scopes it is called in.

    ``origin`` says in a message where it is named; ``complete`` that nobody but the configuration supplies arguments.
    """

    scopes: tuple[str, ...]
    selector: str
    origin: str
    complete: bool


@dataclass(frozen=True)
class Config:
    """A configuration that has been read. The values themselves are in gin, this says where they are from.

    Attributes:
        source: the file it was read from.
        bindings: the last binding of each (scope, complete name, parameter).
    """

    source: str
    bindings: Mapping[Key, Binding]

    def check_values(self) -> None:
        """Raises a UserError for the first value that is missing, of a wrong type, or an unknown macro."""
        for binding in self.bindings.values():
            for reference in references(binding.value):
                self._check_reference(reference, binding)
            value = self._without_macros(binding.value)
            parameter = parameters(binding.selector).get(binding.parameter)
            if parameter is None or parameter.annotation is parameter.empty:
                continue
            if not isinstance(value, Reference):
                given, written, hint = value, repr(value), ""
            elif value.evaluate:  # what it returns is known when it is called
                continue
            else:
                given, written = value.configurable.wrapper, f"@{value.selector}"
                hint = f"; {written}() calls it"
            if not fits(given, parameter.annotation):
                accepted = describe(parameter.annotation)
                raise UserError(f"{binding.place}: {binding} = {written}: expected {accepted}{hint}")

    def check_call(self, selector: str, given: Collection[str] = ()) -> None:
        """Raises a UserError where the run of ``selector`` lacks a value, those ``given`` by its caller aside."""
        for call in self._calls(selector):
            bound = {*self._bound(call), *(given if call.selector == selector else ())}
            for name, parameter in parameters(call.selector).items():
                variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                if call.complete and name not in bound and parameter.default is parameter.empty and not variadic:
                    raise UserError(f"{call.origin}: {short(call.selector)}.{name} has no value")

    def located(self, error: UserError) -> UserError:
        """The error in one line, and where it speaks of a value that a binding holds, with the binding's place."""
        message = str(error).splitlines()[0]
        called = re.search(r"In call to configurable '(\w+)'", str(error))
        words = set(re.findall(r"\w+", message))
        for binding in self.bindings.values():
            written = self._written(binding)
            spoken_of = binding.parameter in words and str(written.value) in message
            if called and called[1] == short(binding.selector) and spoken_of:
                return UserError(f"{written.place}: {message}")
        return UserError(message)

    def resolved(self, selector: str, given: Collection[str] = ()) -> str:
        """The configuration of a run of ``selector`` as a gin file: every value that it reaches, given or default.

        Macros are replaced by their values. A default that gin cannot write stands in a comment. Values ``given`` by
        the caller of ``selector`` are left out.
        """
        lines = [f"# Every value of the run, given or default. Read from {self.source}"]
        for call in self._calls(selector):
            lines.append("")
            values = {name: parameter.default for name, parameter in parameters(call.selector).items()}
            values.update(self._bound(call))
            for parameter, value in values.items():
                if value is inspect.Parameter.empty or (call.selector == selector and parameter in given):
                    continue
                name = "/".join((*call.scopes, f"{call.selector}.{parameter}"))
                text = literal(self._without_macros(value))
                lines.append(f"# {name} keeps its default" if text is None else f"{name} = {text}")
        return "\n".join(lines) + "\n"

    def _calls(self, selector: str) -> Iterator[Call]:
        """The root and all that its values refer to, each once, from the root outwards."""
        waiting, seen = [Call((), selector, self.source, True)], set()
        while waiting:
            call = waiting.pop(0)
            if (call.scopes, call.selector) in seen:
                continue
            seen.add((call.scopes, call.selector))
            yield call
            for parameter, value in self._bound(call).items():
                for reference in references(self._without_macros(value)):
                    if reference.configurable.selector != "gin.constant":
                        waiting.append(self._call(reference, call, parameter))

    def _call(self, reference: Reference, caller: Call, parameter: str) -> Call:
        scopes = tuple(reference.scopes) or caller.scopes
        origin = f"{self._place(caller, parameter)}: {literal(reference)}"
        return Call(scopes, reference.configurable.selector, origin, reference.evaluate)

    def _place(self, call: Call, parameter: str) -> str:
        """Where a call's value is written: gin takes it from the innermost scope that has one."""
        scopes = ["/".join(call.scopes[:depth]) for depth in range(len(call.scopes), -1, -1)]
        found = (self.bindings.get((scope, call.selector, parameter)) for scope in scopes)
        return next((binding.place for binding in found if binding), self.source)

    def _bound(self, call: Call) -> dict[str, Any]:
        return gin.get_bindings("/".join((*call.scopes, call.selector)), resolve_references=False)

    def _check_reference(self, reference: Reference, binding: Binding) -> None:
        selector, name = reference.configurable.selector, "/".join(reference.scopes)
        if selector == MACRO and (name, MACRO, "value") not in self.bindings:
            macros = [scope for scope, macro, _ in self.bindings if macro == MACRO]
            raise UserError(f"{binding.place}: {binding} = %{name}: no such macro{nearest(name, macros)}")
        if selector == "gin.constant" and name == "gin.REQUIRED":
            raise UserError(f"{binding.place}: {binding} has no value: give one in the file or with --set")

    def _written(self, binding: Binding) -> Binding:
        """The binding itself, or that of the macro that it takes its value from."""
        value = binding.value
        if isinstance(value, Reference) and value.configurable.selector == MACRO:
            return self._written(self.bindings["/".join(value.scopes), MACRO, "value"])
        return binding

    def _without_macros(self, value: Any) -> Any:
        if isinstance(value, Reference) and value.configurable.selector == MACRO:
            return self._without_macros(self.bindings["/".join(value.scopes), MACRO, "value"].value)
        if type(value) in (list, tuple):
            return type(value)(map(self._without_macros, value))
        if type(value) is dict:
            return {key: self._without_macros(item) for key, item in value.items()}
        return value


def short(selector: str) -> str:
    """The last part of a complete name, as one writes it.

    >>> short("zerojax.models.gpt.GPT")
    'GPT'
    """
    return selector.rpartition(".")[2]


def parameters(selector: str) -> Mapping[str, inspect.Parameter]:
    """The parameters that a configuration may bind, by name."""
    function = gin.get_configurable(selector)
    if not inspect.isclass(function):
        return inspect.signature(function).parameters
    # gin's class is called through a metaclass that takes anything; __init__ has the parameters.
    found = dict(inspect.signature(function.__init__).parameters)
    del found[next(iter(found))]  # self
    return found


def references(value: Any) -> Iterator[Reference]:
    """The references in a value, nested ones included."""
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from references(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from references(item)


def literal(value: Any) -> str | None:
    """The value as gin reads it; None where it cannot be written.

    >>> literal({"a": (1, None)}), literal(float("inf"))
    ("{'a': (1, None)}", None)
    """
    if isinstance(value, Reference):
        name = "/".join((*value.scopes, value.configurable.selector))
        return f"@{name}()" if value.evaluate else f"@{name}"
    if type(value) in (list, tuple):
        items = [literal(item) for item in value]
        if None in items:
            return None
        inside = ", ".join(str(item) for item in items)
        return f"[{inside}]" if type(value) is list else f"({inside}{',' if len(items) == 1 else ''})"
    if type(value) is dict:
        pairs = [(literal(key), literal(item)) for key, item in value.items()]
        if any(None in pair for pair in pairs):
            return None
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    writable = value is None or type(value) in (bool, int, str) or (type(value) is float and abs(value) < float("inf"))
    return repr(value) if writable else None
