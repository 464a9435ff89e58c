"""One checkpoint in one directory: save and restore."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from zerojax.checkpoint import manifest
from zerojax.checkpoint.loading import load
from zerojax.checkpoint.processes import from_primary
from zerojax.checkpoint.saving import start_save
from zerojax.errors import UserError
from zerojax.zero.state import check_not_given


def save(
    path: str | os.PathLike[str], state: Any, *, extra: Mapping[str, Any] | None = None, frozen: bool = True
) -> None:
    """Saves `state` as the checkpoint `path` and returns when it is complete; every process calls it.

    Args:
      path: a directory that does not exist or is empty; shared by all processes.
      state: a State, of any stage and mesh.
      extra: a dict as `json.dumps` writes it, given back by `load_extra`; the primary process's is saved.
      frozen: whether the parameters that are not trained are saved too.

    Raises:
      UserError: if there is something at `path`, or a step was given this state.
      CheckpointError: if the checkpoint cannot be written; then there is nothing at `path`.

    >>> import tempfile, jax.numpy as jnp, optax, zerojax
    >>> make_model, optimizer = lambda rng: {"w": jnp.ones((64, 32))}, optax.sgd(0.1)
    >>> path = Path(tempfile.mkdtemp(), "checkpoint")
    >>> save(path, zerojax.Zero(stage=3).init(make_model, optimizer), extra={"epoch": 3})
    >>> restore(path, zerojax.Zero(stage=0), make_model, optimizer).params["w"].sharding.is_fully_replicated
    True
    >>> load_extra(path)
    {'epoch': 3}
    """
    check_not_given(state)
    target = Path(path).absolute()
    if not from_primary(lambda: _is_free(target)):
        raise UserError(f"checkpoint {path} exists already; accepted: a path where nothing is")
    saved, logical = (state, state.layout.logical) if frozen else without(state, ["frozen"])
    start_save(target, saved, logical, extra or {}).wait()


def restore(path: str | os.PathLike[str], zero: Any, make_model: Any, optimizer: Any, *, frozen: Any = None) -> Any:
    """The state saved at `path`, born in the shards that `zero` gives it; every process calls it.

    Stage, mesh, precision and number of processes are those of `zero`, whatever they were when it was saved.

    Args:
      path: a checkpoint.
      zero: a `zerojax.Zero`.
      make_model: as for `zero.init`; it is traced, not run.
      optimizer: as for `zero.init`.
      frozen: `state.frozen` of a state of the same model, for a checkpoint that was saved without.

    Raises:
      UserError: if `path` is no checkpoint, or one of another model or optimizer (what differs is listed).
      CheckpointError: if it is damaged.
    """
    return restore_into(path, zero.abstract_state(make_model, optimizer), frozen=frozen)


def restore_into(
    path: str | os.PathLike[str], abstract: Any, *, frozen: Any = None, leave_out: Sequence[str] = ()
) -> Any:
    """As `restore`, into the form of an abstract state; fields that are left out are `None` where they have arrays.

    Of these fields the checkpoint may have anything, such as the state of another optimizer.
    """
    directory = _existing(path)
    saved_frozen = any(name.startswith("frozen/") for name in manifest.leaf_names(directory))
    if not jax.tree.leaves(abstract.frozen) or saved_frozen:
        return load(directory, *without(abstract, leave_out), leave_out)[0]
    if frozen is None:
        raise UserError(
            f"checkpoint {path} was saved without its frozen parameters; accepted: restore(..., frozen=state.frozen) "
            "with those of a state that has them"
        )
    restored = load(directory, *without(abstract, ["frozen", *leave_out]), leave_out)[0]
    return dataclasses.replace(restored, frozen=jax.device_put(frozen, abstract.layout.shardings.frozen))


def without(state: Any, fields: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """A state, and its logical leaves, with `None` for the leaves of some fields."""
    holes = {field: jax.tree.map(lambda x: None, getattr(state, field)) for field in fields}
    return dataclasses.replace(state, **holes), state.layout.logical | holes


def load_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `extra` saved with the checkpoint `path`.

    Raises:
      UserError: if `path` is no checkpoint.
      CheckpointError: if its manifest is damaged.
    """
    return dict(manifest.read_manifest(_existing(path)).extra)


def _existing(path: str | os.PathLike[str]) -> Path:
    directory = Path(path).absolute()
    if not directory.is_dir():
        raise UserError(f"checkpoint {path}: no such directory; accepted: a directory that zerojax.save has written")
    return directory


def _is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))
