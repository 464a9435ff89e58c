"""Reading a gin configuration, with every fault told in one line: file and line, the value, and what is accepted.

The statements are read by gin's own parser and bound one by one, so that each keeps the place where it was written;
gin's parse_config_file keeps none, and a fault found later could not say where it comes from.
"""

import importlib
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gin
from gin import config_parser
from gin.config import ConfigurableReference, ParsedBindingKey, ParserDelegate

from zerojax.config.bindings import MACRO, Binding, Config, Key, parameters, short
from zerojax.errors import UserError, nearest

# What a message calls the place of a line of a text.
Place = Callable[[int], str]


def load(path: str | Path, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Reads a gin file, then the overrides, after forgetting what was read before.

    Args:
        path: the file. An ``include`` is looked for beside the file that has it, then in the working directory.
        overrides: pairs of a binding in gin's syntax and what to call its place in a message.

    Raises:
        UserError: a file is missing or has bad syntax; a name or a parameter is unknown; a value has a wrong type.
    """
    from zerojax.config import registry  # it imports every library that a configuration may name

    registry.register()
    gin.clear_config()
    bindings: dict[Key, Binding] = {}
    _read_file(Path(path), (), bindings)
    for text, place in overrides:
        _read_text(text, partial(_same, place), None, (), bindings)
    config = Config(str(path), bindings)
    config.check_values()
    gin.finalize()
    return config


def configured(selector: str) -> Callable[..., Any]:
    """What a name stands for, with its arguments filled in from the configuration that was read last."""
    return gin.get_configurable(selector)


def _read_file(path: Path, including: tuple[Path, ...], bindings: dict[Key, Binding]) -> None:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot read the configuration: byte {error.start} is not UTF-8 text") from None
    _read_text(text, lambda line: f"{path}:{line}", path, (*including, path.resolve()), bindings)


def _read_text(
    text: str, place: Place, path: Path | None, including: tuple[Path, ...], bindings: dict[Key, Binding]
) -> None:
    for statement in _statements(text, place):
        here = place(statement.location.line_num)
        if isinstance(statement, config_parser.BindingStatement):
            _bind(statement, here, bindings)
        elif isinstance(statement, config_parser.BlockDeclaration):
            _check_name(statement.selector, f"{here}: ")
        elif isinstance(statement, config_parser.ImportStatement):
            _import(statement, here)
        else:
            _include(statement.filename, here, path, including, bindings)


def _same(place: str, line: int) -> str:
    """An argument is one line; it is its own place."""
    return place


def _statements(text: str, place: Place) -> Iterator[Any]:
    """gin's statements one by one; what its parser raises becomes a UserError that names the place."""
    try:
        yield from config_parser.ConfigParser(text, _CheckedNames())
    except _UnknownReference as error:  # gin adds the line to the message
        line = re.search(r"bindings string line (\d+)\n", str(error))
        raise UserError(f"{place(int(line[1]) if line else 1)}: {str(error).splitlines()[0]}") from None
    except SyntaxError as error:
        written, reason = (error.text or "").strip(), str(error.msg).splitlines()[-1].strip().rstrip(".")
        raise UserError(
            f"{place(error.lineno or 1)}: cannot read {written!r}: {reason}; a value is a Python literal (text in "
            "quotes), @NAME, @NAME() or %MACRO"
        ) from None
    except tokenize.TokenError as error:
        reason, (line_number, _) = error.args
        raise UserError(f"{place(line_number)}: cannot read the text up to here: {reason}") from None


class _UnknownReference(UserError):
    """An unknown name behind an @, found while gin's parser is at work."""


class _CheckedNames(ParserDelegate):
    """gin's maker of references, with an unknown name told apart from the parser's other faults."""

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> ConfigurableReference:
        try:
            _check_name(scoped_selector.rpartition("/")[2], "")
        except UserError as error:
            raise _UnknownReference(str(error)) from None
        return super().configurable_reference(scoped_selector, evaluate)


def _bind(statement: config_parser.BindingStatement, place: str, bindings: dict[Key, Binding]) -> None:
    scope, selector, parameter = statement.scope, statement.selector, statement.arg_name
    if not parameter:  # NAME = VALUE defines a macro
        scope, selector, parameter = f"{scope}/{selector}".lstrip("/"), MACRO, "value"
    _check_name(selector, f"{place}: ")
    try:
        parsed = ParsedBindingKey.parse((scope, selector, parameter))
    except ValueError:
        accepted = nearest(parameter, list(parameters(selector)))
        raise UserError(f"{place}: {selector} has no parameter {parameter!r}{accepted}") from None
    gin.bind_parameter(parsed, statement.value)
    complete = parsed.complete_selector
    bindings[scope, complete, parameter] = Binding(scope, complete, parameter, statement.value, place)


def _import(statement: config_parser.ImportStatement, place: str) -> None:
    if statement.module.startswith("__gin__"):
        raise UserError(f"{place}: {statement.format()}: not supported; import a module that registers its names")
    try:
        importlib.import_module(statement.module)
    except ImportError as error:
        raise UserError(f"{place}: {statement.format()}: {error}") from None


def _include(
    name: str, place: str, path: Path | None, including: tuple[Path, ...], bindings: dict[Key, Binding]
) -> None:
    candidates = dict.fromkeys((Path(name),) if path is None else (path.parent / name, Path(name)))
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise UserError(f"{place}: include {name!r}: no such file: tried {', '.join(map(str, candidates))}")
    if found.resolve() in including:
        raise UserError(f"{place}: include {name!r}: the file includes itself")
    _read_file(found, including, bindings)


def _check_name(selector: str, before: str) -> None:
    """Raises a UserError, with the text ``before`` in front, for a name that is unknown or ambiguous."""
    from zerojax.config import registry

    try:
        gin.get_configurable(selector)
    except KeyError as error:  # several complete names end in it
        raise UserError(f"{before}{str(error.args[0]).rstrip('.')}") from None
    except ValueError:
        accepted = [name if "." in selector else short(name) for name in registry.register()]
        raise UserError(f"{before}unknown name {selector!r}{nearest(selector, accepted)}") from None
