"""What is known of one key of a DeepSpeed configuration, and the words that make a table of such keys readable."""

import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from zerojax.errors import shown


class Status(enum.Enum):
    """What zerojax does about a key."""

    HONOURED = "honoured"
    NEEDLESS = "needs nothing"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a key takes: in words, as a test, and how one value is written in one way only."""

    words: str
    accepts: Callable[[Any], bool]
    normal: Callable[[Any], Any] = lambda value: value


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the configuration.

    Attributes:
      path: its complete name, dots between the levels.
      kind: the values it takes.
      default: DeepSpeed's default.
      status: what zerojax does about it; a refused key is refused when its value asks for something.
      why: what it becomes, why it needs nothing, or what to do instead.
      auto: whether "auto" may stand for its value.
      harmless: values beside the default that ask for nothing, where the key is refused.
      old_name_of: the key that this is an old or another name of.
      excludes: keys that replaced this one, so that both together contradict.
      section: whether it holds further keys.
      open: of a section, whether it takes names that are not in the table.
    """

    path: str
    kind: Kind
    default: Any
    status: Status
    why: str
    auto: bool = False
    harmless: tuple[Any, ...] = ()
    old_name_of: str | None = None
    excludes: tuple[str, ...] = ()
    section: bool = False
    open: bool = False

    @property
    def parent(self) -> str:
        """The complete name of the section that it is in; "" at the top.

        >>> Key("fp16.enabled", FLAG, False, Status.HONOURED, "").parent
        'fp16'
        """
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of its complete name."""
        return self.path.rpartition(".")[2]

    def asks_for_something(self, value: Any) -> bool:
        """Whether a value of a refused key is not the default or another that asks for nothing."""
        return not any(value == nothing for nothing in (self.default, None, *self.harmless))


def _whole(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, Integral) and not isinstance(value, bool)


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    magnitude: Any = abs(value)
    return bool(magnitude <= sys.float_info.max)


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
INTEGER = Kind("an integer", _whole, int)  # 5e8 is how bucket sizes are written, and JSON makes a float of it
COUNT = Kind("an integer of at least 0", lambda value: _whole(value) and value >= 0, int)
NUMBER = Kind("a number", _finite)
AMOUNT = Kind("a number of at least 0", lambda value: _finite(value) and value >= 0)
TEXT = Kind("a text", lambda value: isinstance(value, str))
LIST = Kind("a list", lambda value: isinstance(value, Sequence) and not isinstance(value, str), list)
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
ANYTHING = Kind("any value", lambda value: True)
# Frameworks on top of DeepSpeed write infinity for "never".
INTERVAL = Kind(
    "a positive integer or null",
    lambda value: value is None or value == math.inf or (_whole(value) and value > 0),
    lambda value: None if value in (None, math.inf) else int(value),
)

_SPELLINGS = {
    "float32": ("fp32", "float32", "float", "torch.float32"),
    "float16": ("fp16", "float16", "half", "torch.float16"),
    "bfloat16": ("bf16", "bfloat16", "torch.bfloat16"),
}
_DTYPES = {spelling: dtype for dtype, spellings in _SPELLINGS.items() for spelling in spellings}


def choice(*values: Any) -> Kind:
    """One of some values; texts in any case, as DeepSpeed reads them.

    >>> choice("WARN", "FAIL").words, choice("WARN", "FAIL").normal("warn")
    ("'WARN' or 'FAIL'", 'WARN')
    """
    known = {_folded(value): value for value in values}
    words = " or ".join(filter(None, (", ".join(map(shown, values[:-1])), shown(values[-1]))))
    accepts = lambda value: not isinstance(value, bool | list | dict) and _folded(value) in known
    return Kind(words, accepts, lambda value: known[_folded(value)])


def _folded(value: Any) -> Any:
    return value.casefold() if isinstance(value, str) else value


def optional(kind: Kind) -> Kind:
    """The kind's values, or null."""
    return Kind(
        f"{kind.words} or null",
        lambda value: value is None or kind.accepts(value),
        lambda value: None if value is None else kind.normal(value),
    )


DTYPE = optional(
    Kind(
        "'fp32', 'fp16' or 'bf16'",
        lambda value: isinstance(value, str) and value.lower() in _DTYPES,
        lambda value: _DTYPES[value.lower()],
    )
)


def kind_of(default: Any) -> Kind:
    """The kind of the values beside a default, for the keys that nothing reads: only gross mistakes are found.

    >>> kind_of(5), kind_of(None)
    (Kind(words='an integer', ...), Kind(words='any value', ...))
    """
    kinds = {bool: FLAG, int: INTEGER, float: NUMBER, str: TEXT, list: LIST, dict: OBJECT}
    return kinds.get(type(default), ANYTHING)


def honoured(path: str, kind: Kind, default: Any, why: str, **rest: Any) -> Key:
    return Key(path, kind, default, Status.HONOURED, why, **rest)


def needless(path: str, kind: Kind, default: Any, why: str, **rest: Any) -> Key:
    return Key(path, kind, default, Status.NEEDLESS, why, **rest)


def refused(path: str, kind: Kind, default: Any, why: str, **rest: Any) -> Key:
    return Key(path, kind, default, Status.REFUSED, why, **rest)


def old_name(path: str, of: Key) -> Key:
    """Another name of a key, given by its complete name; together they contradict."""
    return dataclasses.replace(of, path=path, why=f"another name of `{of.path}`", old_name_of=of.path)


def section(path: str, why: str, *keys: Key, status: Status = Status.HONOURED, **rest: Any) -> tuple[Key, ...]:
    """A section and its keys, which are named within it."""
    inside = (dataclasses.replace(key, path=f"{path}.{key.path}") for key in keys)
    return Key(path, OBJECT, None, status, why, section=True, **rest), *inside


def parts(status: Status, why: str, **defaults: Any) -> tuple[Key, ...]:
    """Keys of one fate, by their defaults."""
    return tuple(Key(name, kind_of(default), default, status, why) for name, default in defaults.items())


def feature(path: str, why: str, **defaults: Any) -> tuple[Key, ...]:
    """A section that `enabled` turns on, which is refused; the keys beside it are given by their defaults."""
    rest = parts(Status.REFUSED, f"read only where `{path}.enabled` is true", **defaults)
    return section(path, "", refused("enabled", FLAG, False, why), *rest)
