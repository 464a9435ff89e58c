"""The engine's checkpoints: tags in a directory, and a file that names the latest."""

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoint import CheckpointError, load_extra, save
from zerojax.checkpoint.errors import first_line
from zerojax.checkpoint.processes import agreed, from_primary, is_primary
from zerojax.checkpoint.single import restore_into
from zerojax.errors import RunError, UserError, shown
from zerojax.monitor.files import replace_text
from zerojax.zero import State

LATEST = "latest"
UNFINISHED, REPLACED = ".new", ".old"


def save_tag(
    save_dir: str, tag: Any, state: State, extra: Mapping[str, Any], *, latest: bool, frozen: bool, validation: str
) -> None:
    """As `Engine.save_checkpoint`. What had the tag before is there until the new one is complete."""
    directory, tag = directory_of("save_dir", save_dir), _agreed_tag(tag, validation)
    target, fresh = directory / tag, directory / (tag + UNFINISHED)
    what = f"checkpoint {target}"
    on_primary(what, lambda: _end_replacing(fresh, target))
    # Agreed, since every process looks for what it has saved, which must not be renamed before.
    agreed(what, lambda: save(fresh, state, extra=extra, frozen=frozen))
    on_primary(what, lambda: _put_in_place(fresh, target, directory / LATEST if latest else None))


def find_tag(load_dir: str, tag: Any) -> Path | None:
    """The checkpoint of a tag, or of the latest; `None` where there is no latest.

    Raises:
      UserError: if there is no such tag; the message lists those that there are.
    """
    directory = directory_of("load_dir", load_dir)
    wanted = None if tag is None else _checked_tag(tag)
    asked, found, there = from_primary(lambda: _look(directory, wanted))  # one process looks: all go the same way
    if asked is None:
        return None
    if found is None:
        raise UserError(
            f"load_dir {load_dir} has no checkpoint of tag {asked!r}; accepted: {', '.join(there) or 'none is there'}"
        )
    return directory / found


def load_tag(
    path: Path, zero: Any, make_model: Any, optimizer: Any, frozen: Any, with_optimizer: bool
) -> tuple[State, dict[str, Any]]:
    """The state and the extra saved at `path`; parameters that it leaves out are those of `frozen`.

    Where it is not wanted, the state of its optimizer, which may be another, is left out.

    Raises:
      UserError: if it is no checkpoint of an engine, or of another model.
      CheckpointError: if it is damaged.
    """
    extra = load_extra(path)
    if "engine" not in extra:
        raise UserError(f"checkpoint {path} was not saved by an engine; accepted: one of engine.save_checkpoint")
    abstract = zero.abstract_state(make_model, optimizer)
    return restore_into(path, abstract, frozen=frozen, leave_out=() if with_optimizer else ("opt_state",)), extra


def directory_of(name: str, value: Any) -> Path:
    """The directory that the argument `name` gives.

    Raises:
      UserError: if it is empty.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise UserError(f"{name} is {shown(value)}; accepted: the path of a directory")
    return Path(value).absolute()


def on_primary(what: str, action: Callable[[], None]) -> None:
    """Calls `action` on process 0; the others wait for it, and fail if it does.

    Raises:
      CheckpointError: if it raises an error of files.
    """

    def act() -> None:
        try:
            if is_primary():
                action()
        except CheckpointError:
            raise
        except (OSError, RunError) as error:
            raise CheckpointError(f"{what} was not saved: {first_line(error)}") from error

    agreed(what, act)


def _checked_tag(tag: Any) -> str:
    name = str(tag)
    if name in ("", ".", "..", LATEST) or "/" in name or name.endswith((UNFINISHED, REPLACED)):
        raise UserError(f"tag is {shown(tag)}; accepted: a name for a directory, other than {LATEST!r}")
    return name


def _agreed_tag(tag: Any, validation: str) -> str:
    """The primary process's tag, after what `checkpoint.tag_validation` says of differing ones."""
    first = _checked_tag(from_primary(lambda: str(tag)))
    if jax.process_count() == 1 or validation == "IGNORE":
        return first
    same = np.asarray(multihost_utils.process_allgather(np.array(str(tag) == first)))
    if not same.all():
        told = f"tag is {first!r} in process 0 and another one in process {int(np.argmin(same))}"
        if validation == "FAIL":
            raise UserError(f"{told}; accepted: one tag")
        warnings.warn(f"{told}; that of process 0 is taken", stacklevel=4)
    return first


def _look(directory: Path, tag: str | None) -> tuple[str | None, str | None, list[str]]:
    """The tag that is asked for, the name of the directory that has it, and the tags that there are."""
    if tag is None:
        if not (directory / LATEST).is_file():
            return None, None, []
        tag = (directory / LATEST).read_text(encoding="utf-8").strip()
    # A process killed while it replaced the tag has left the new one, complete, or the old.
    complete = lambda name: (directory / name / "manifest.json").is_file()
    found = next((name for name in (tag, tag + UNFINISHED, tag + REPLACED) if complete(name)), None)
    if found is None and (directory / tag).is_dir():
        found = tag  # whose fault is told by what reads it
    names = {
        path.parent.name.removesuffix(UNFINISHED).removesuffix(REPLACED) for path in directory.glob("*/manifest.json")
    }
    return tag, found, sorted(names)


def _end_replacing(fresh: Path, target: Path) -> None:
    """Leaves nothing beside the tag of what a killed process has left."""
    old = target.with_name(target.name + REPLACED)
    left = next((path for path in (fresh, old) if (path / "manifest.json").is_file()), None)
    if left is not None and not target.exists():
        left.rename(target)
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _put_in_place(fresh: Path, target: Path, latest: Path | None) -> None:
    old = target.with_name(target.name + REPLACED)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    if latest is not None:
        replace_text(latest, target.name)
    shutil.rmtree(old, ignore_errors=True)
