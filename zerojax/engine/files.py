"""The engine's checkpoints: tags in a directory, and a file that names the latest."""

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint import load_extra, restore, save
from zerojax.checkpoint.names import named_leaves
from zerojax.checkpoint.processes import agreed, from_primary, is_primary
from zerojax.errors import UserError, shown
from zerojax.monitor.files import replace_text, writing
from zerojax.zero import State

LATEST = "latest"
UNFINISHED, REPLACED = ".new", ".old"


def save_tag(
    save_dir: str, tag: str, state: State, extra: Mapping[str, Any], *, latest: bool, frozen: bool, validation: str
) -> None:
    """As `Engine.save_checkpoint`. What had the tag before is there until the new one is complete."""
    directory, tag = _directory("save_dir", save_dir), _agreed_tag(tag, validation)
    target, fresh = directory / tag, directory / (tag + UNFINISHED)
    _on_primary(lambda: shutil.rmtree(fresh, ignore_errors=True))
    save(fresh, state, extra=extra, frozen=frozen)
    _on_primary(lambda: _put_in_place(fresh, target, directory / LATEST if latest else None))


def find_tag(load_dir: str, tag: str | None) -> Path | None:
    """The checkpoint of a tag, or of the latest; `None` where there is no latest.

    Raises:
      UserError: if there is no such tag; the message lists those that there are.
    """
    directory = _directory("load_dir", load_dir)
    if tag is None:
        if not (directory / LATEST).is_file():
            return None
        tag = (directory / LATEST).read_text(encoding="utf-8").strip()
    path = directory / tag
    if not path.is_dir():
        path = _left_over(directory, tag) or path
    if not path.is_dir():
        there = sorted(p.parent.name for p in directory.glob("*/manifest.json"))
        raise UserError(
            f"load_dir {load_dir} has no checkpoint of tag {tag!r}; accepted: {', '.join(there) or 'none is there'}"
        )
    return path


def load_tag(path: Path, zero: Any, make_model: Any, optimizer: Any, frozen: Any) -> tuple[State, dict[str, Any]]:
    """The state and the extra saved at `path`; parameters that it leaves out are those of `frozen`.

    Raises:
      UserError: if it is no checkpoint of an engine, or of another model.
      CheckpointError: if it is damaged.
    """
    extra = load_extra(path)
    if "engine" not in extra:
        raise UserError(f"checkpoint {path} was not saved by an engine; accepted: one of engine.save_checkpoint")
    return restore(path, zero, make_model, optimizer, frozen=frozen), extra


def save_16bit(save_dir: str, filename: str, state: State, dtype: Any) -> None:
    """Writes floating parameters in `dtype` as one safetensors file, under their paths with dots."""
    from safetensors.numpy import save_file

    directory = _directory("save_dir", save_dir)
    tensors = {name.replace("/", "."): x.astype(jnp.dtype(dtype)) for name, x in whole_leaves(state)}
    if is_primary():
        with writing(directory / filename):
            directory.mkdir(parents=True, exist_ok=True)
            save_file(tensors, directory / (filename + UNFINISHED), metadata={"format": "np"})
            os.replace(directory / (filename + UNFINISHED), directory / filename)


def whole_leaves(state: State) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters one by one by name, trained and frozen, whole, on the host of every process."""
    for field in ("params", "frozen"):
        values, leaves = named_leaves(getattr(state, field)), named_leaves(state.layout.leaves[field])
        for name, leaf in leaves.items():
            whole = jax.jit(lambda x: x, out_shardings=state.layout.replicated)(values[name])
            yield name, np.asarray(whole.addressable_data(0))[tuple(map(slice, leaf.shape))]


def _directory(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise UserError(f"{name} is {shown(value)}; accepted: the path of a directory")
    return Path(value).absolute()


def _agreed_tag(tag: str, validation: str) -> str:
    """The primary process's tag, after what `checkpoint.tag_validation` says of differing ones."""
    if not tag or "/" in tag or tag == LATEST or tag.endswith((UNFINISHED, REPLACED)):
        raise UserError(f"tag is {shown(tag)}; accepted: a name for a directory, other than {LATEST!r}")
    first = from_primary(lambda: tag)
    if first != tag and validation == "FAIL":
        raise UserError(
            f"tag is {tag!r} in process {jax.process_index()} and {first!r} in process 0; accepted: one tag"
        )
    if first != tag and validation == "WARN":
        warnings.warn(f"tag is {tag!r} in process {jax.process_index()}; {first!r} of process 0 is taken", stacklevel=4)
    return first


def _on_primary(action: Any) -> None:
    agreed("checkpoint", lambda: action() if is_primary() else None)


def _put_in_place(fresh: Path, target: Path, latest: Path | None) -> None:
    old = target.with_name(target.name + REPLACED)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    if latest is not None:
        replace_text(latest, target.name)
    shutil.rmtree(old, ignore_errors=True)


def _left_over(directory: Path, tag: str) -> Path | None:
    """What a process killed while it replaced the tag has left: the new one if it is complete, else the old."""
    for ending in (UNFINISHED, REPLACED):
        if (directory / (tag + ending) / "manifest.json").exists():
            return directory / (tag + ending)
    return None
