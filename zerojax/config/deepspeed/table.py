"""The documentation's table of DeepSpeed's keys."""

import itertools
import json
import sys
from typing import Any

from zerojax.config.deepspeed.keys import KEYS, Key

HEADER = "| key | default | zerojax | how, why, or what instead |\n| --- | --- | --- | --- |\n"


def markdown_table() -> str:
    """Every key, a section's together; neighbours of one fate share a row, and other names stand beside the key's own.

    >>> print(markdown_table().splitlines()[4])
    | `gradient_accumulation_steps` | null | honoured | `Zero.micro_batches` |
    """
    keys = (key for key in KEYS if key.why and key.old_name_of is None)
    return HEADER + "".join(_row(list(group)) for _, group in itertools.groupby(keys, _fate))


def _fate(key: Key) -> tuple[Any, ...]:
    return key.parent, key.status, key.why, key.section


def _row(keys: list[Key]) -> str:
    names = ", ".join([_named(keys[0], keys[0].path), *(_named(key, key.name) for key in keys[1:])])
    defaults = ", ".join(_default(key) for key in keys)
    return f"| {names} | {defaults} | {keys[0].status.value} | {keys[0].why} |\n"


def _named(key: Key, shown: str) -> str:
    others = [f"`{other.name}`" for other in KEYS if other.old_name_of == key.path and other.parent == key.parent]
    return f"`{shown}`" + (f" (also {', '.join(others)})" if others else "")


def _default(key: Key) -> str:
    if key.section:
        return ""
    return "maxint" if key.default == sys.maxsize else json.dumps(key.default)
