"""Reading a DeepSpeed configuration: what was written, every key known and every value of its kind."""

import base64
import binascii
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zerojax.config.deepspeed.keys import BY_PATH, KEYS, Key, names_in
from zerojax.errors import UserError, nearest, shown

AUTO = "auto"
TEXT_SOURCE, DICT_SOURCE = "base64 config", "config"


@dataclasses.dataclass(frozen=True)
class RawConfig:
    """A configuration as it was written, with each key under its newest name.

    Attributes:
      source: what a message calls it: the file's path, or a word for a dict or a text.
      values: the values that were written, by complete key; sections are not in it, their keys are.
    """

    source: str
    values: Mapping[str, Any]

    def get(self, path: str) -> Any:
        """A key's value: what was written, or DeepSpeed's default."""
        return self.values.get(path, BY_PATH[path].default)

    def under(self, section: str) -> dict[str, Any]:
        """What was written in a section, by the names within it.

        >>> read({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}).under("optimizer.params")
        {'lr': 0.1}
        """
        start = f"{section}."
        return {path.removeprefix(start): value for path, value in self.values.items() if path.startswith(start)}

    def is_off(self, path: str) -> bool:
        """Whether a section around a key, or of that name, has an "enabled" that is false."""
        sections = [path.rsplit(".", depth)[0] for depth in range(path.count(".") + 1)]
        switches = (f"{section}.enabled" for section in sections)
        return any(switch != path and switch in BY_PATH and self.get(switch) is False for switch in switches)

    def error(self, path: str, message: str) -> UserError:
        """An error in one line that names the source and the key."""
        return UserError(f"{self.source}: {path}{message}")


def read(config: Mapping[str, Any] | str | os.PathLike[str]) -> RawConfig:
    """Reads a configuration and checks that every key is known and every value of its kind.

    Args:
      config: a dict, the path of a JSON file, or a JSON text in URL-safe base64.

    Raises:
      UserError: if there is no such file, it is not JSON, or a key is unknown, stands twice, stands beside the name
        that replaced it, or has a value of a wrong kind.

    >>> raw = read({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})
    >>> raw.get("zero_optimization.stage"), raw.get("zero_optimization.reduce_bucket_size"), raw.get("fp16.hysteresis")
    (2, 500000000, 2)
    """
    source, tree = _tree(config)
    if not isinstance(tree, Mapping):
        raise UserError(f"{source}: the configuration is {shown(tree)}; accepted: a JSON object")
    _check_repeats(source, tree)
    written = dict(_entries(source, tree, ""))
    values = {}
    for path, value in written.items():
        key = BY_PATH.get(path)
        if key is not None:
            replaced = key.excludes if key.old_name_of is None else (key.old_name_of,)
            for other in replaced:
                if other in written:
                    raise UserError(
                        f"{source}: {path} and {other} are both given; accepted: {other} alone, the newer name"
                    )
            if key.section:
                continue
        values[path if key is None or key.old_name_of is None else key.old_name_of] = value
    raw = RawConfig(source, MappingProxyType(values))
    check_contradictions(raw)
    return raw


def check_contradictions(raw: RawConfig) -> None:
    """Raises a UserError where two precisions are asked for."""
    if raw.get("fp16.enabled") is True and raw.get("bf16.enabled") is True:
        raise raw.error("fp16.enabled", " and bf16.enabled are both true; accepted: one of them")


class _Object(dict[str, Any]):
    """A JSON object that remembers a name which stands in it twice."""

    repeated: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object()
    for name, value in pairs:
        if name in made:
            made.repeated = name
        made[name] = value
    return made


def _tree(config: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[str, Any]:
    """What a message calls the configuration, and its content."""
    if isinstance(config, Mapping):
        return DICT_SOURCE, config
    if not isinstance(config, str | os.PathLike):
        raise UserError(f"config is {shown(config)}; accepted: a dict, the path of a JSON file, or JSON in base64")
    if isinstance(config, str) and not os.path.exists(config):
        text = _decoded(config)
        if text is not None:
            return TEXT_SOURCE, _parse(TEXT_SOURCE, text)
    return str(config), _parse(str(config), _file_text(Path(config)))


def _file_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot read the configuration: byte {error.start} is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # the latter for a path that no file system takes
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"config is {shown(str(path))}: {reason}; accepted: a dict, the path of a JSON file, or JSON in base64"
        ) from None


def _decoded(text: str) -> str | None:
    """The JSON object that a base64 text holds, or None for a text that is a path."""
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):  # a path has characters that base64 has not
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(source: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        place = source if source == TEXT_SOURCE else f"{source}:{error.lineno}"
        raise UserError(f"{place}: not JSON: {error.msg} at column {error.colno}; accepted: a JSON object") from None
    except RecursionError:
        raise UserError(f"{source}: not a configuration: its objects lie too deep in each other") from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{source}: not a configuration: {error}") from None


def _check_repeats(source: str, tree: Any) -> None:
    """Raises a UserError for a name that stands twice in an object, wherever it is."""
    waiting = [("", tree)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _Object) and value.repeated is not None:
            raise UserError(f"{source}: {_joined(path, value.repeated)} stands twice; accepted: one value for a key")
        if isinstance(value, Mapping):
            waiting += [(_joined(path, str(name)), item) for name, item in value.items()]
        elif isinstance(value, list):
            waiting += [(path, item) for item in value]


def _entries(source: str, tree: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """The keys of an object and of the sections in it, with their values in normal form."""
    for name, value in tree.items():
        path = _joined(section, str(name))
        key = BY_PATH.get(path)
        if key is None:
            if section and BY_PATH[section].open:
                _check_free(source, path, value)
                yield path, value
                continue
            raise UserError(f"{source}: {path}: unknown key{_suggestion(str(name), section)}")
        if key.section:
            if value is None:
                continue
            _check_kind(source, key, value)
            yield path, None
            yield from _entries(source, value, path)
        elif key.auto and value == AUTO:
            yield path, value
        else:
            _check_kind(source, key, value)
            yield path, key.kind.normal(value)


def _check_kind(source: str, key: Key, value: Any) -> None:
    if not key.kind.accepts(value):
        accepted = key.kind.words + (f" or {AUTO!r}" if key.auto else "")
        raise UserError(f"{source}: {key.path} is {shown(value)}; accepted: {accepted}")


def _check_free(source: str, path: str, value: Any) -> None:
    """What a section with names of its own holds is for its reader to check, "auto" aside."""
    if value == AUTO:
        autos = ", ".join(key.name for key in KEYS if key.auto and key.parent == path.rpartition(".")[0])
        raise UserError(f"{source}: {path} is {AUTO!r}; accepted: a value{autos and f', or {AUTO!r} for {autos}'}")


def _suggestion(name: str, section: str) -> str:
    elsewhere = [key.path for key in KEYS if key.name == name and key.old_name_of is None]
    if len(elsewhere) == 1:
        return f"; it is known as {elsewhere[0]}"
    return nearest(name, names_in(section))


def _joined(section: str, name: str) -> str:
    name = name if name.isprintable() else repr(name)[1:-1]  # a message is one line
    return f"{section}.{name}" if section else name
