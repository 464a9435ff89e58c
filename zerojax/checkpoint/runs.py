"""The checkpoints of a run: the last few, saved in the background, restored by themselves."""

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from zerojax.checkpoint import manifest
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.loading import load
from zerojax.checkpoint.processes import from_primary
from zerojax.checkpoint.saving import TEMPORARY, PendingSave, start_save
from zerojax.errors import UserError
from zerojax.zero.state import check_not_given

_log = logging.getLogger(__name__)

# A step saved again while its first checkpoint is there gets a name of its own: nothing is ever written over.
_NAME = re.compile(r"step_\d+(\.\d+)?")


class Checkpoints:
    """The checkpoints of a run, in one directory, `step_00000100` and so on; every process makes one.

    `save` returns when the arrays are copied; one save at a time is in the background, and what stopped it is raised
    by the next `save`, `wait` or `close`. A save supersedes the checkpoints of its step and of later ones (left by a
    run that went on from an earlier step), and of the earlier ones all but `keep - 1`; nothing is deleted before the
    new one is complete. Close it, or use it in a `with` statement: a program that ends during a save loses that save.

    Args:
      directory: where the checkpoints are, made if it is not there; shared by all processes.
      keep: how many are kept.

    Raises:
      UserError: if `keep` is less than 1, or `directory` is a file or cannot be made.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> from types import SimpleNamespace
    >>> from zerojax.checkpoint import Checkpoints
    >>> with Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
    ...     checkpoints.latest_step()  # none yet
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise UserError(f"keep={keep}: the number of checkpoints to keep; accepted: 1 or more")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._pending: PendingSave | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"checkpoint directory {directory}: {error.strerror}; accepted: a directory") from error

    def save(self, state: Any, extra: Mapping[str, Any] | None = None) -> None:
        """Starts to save `state`, after waiting for the save before; it may be donated as soon as this returns.

        Args:
          state: a State; its step names the checkpoint.
          extra: a dict as `json.dumps` writes it, given back by `restore_latest`; the primary process's is saved.

        Raises:
          UserError: if a step was given this state.
          CheckpointError: if the save before this one failed, or this one cannot begin.
        """
        self.wait()
        check_not_given(state)
        step = int(state.step)
        name = from_primary(lambda: self._new_name(step))
        self._pending = start_save(
            self._directory / name, state, state.layout.logical, extra or {}, on_commit=lambda: self._supersede(name)
        )

    def wait(self) -> None:
        """Returns when nothing is being saved.

        Raises:
          CheckpointError: if the last save failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def close(self) -> None:
        """Waits for the last save; the same as `wait`, for the end."""
        self.wait()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            _log.error("%s", failure)  # what ended the program is told by the error itself

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        return sorted({_order(path.name)[0] for path in self._found() if (path / manifest.FILE).exists()})

    def latest_step(self) -> int | None:
        """The step of the last complete checkpoint, None where there is none."""
        return max(self.steps(), default=None)

    def restore_latest(self, abstract_state: Any) -> tuple[Any, dict[str, Any]] | None:
        """The last good checkpoint's state, in the form and shardings of `abstract_state`, and its `extra`.

        A checkpoint that is damaged is passed over, with a warning that names it and the fault, for the one before.
        Half-written ones are ignored. None where nothing was ever saved.

        Raises:
          CheckpointError: if there are checkpoints and all of them are damaged.
          UserError: if the last good one is of another model, or of a newer format.
        """
        self.wait()
        names = from_primary(lambda: [path.name for path in reversed(self._found())])
        for path in self._left_over():
            _log.warning("checkpoint %s was not complete when its run ended; it is ignored", path)
        faults = []
        for name in names:
            try:
                return load(self._directory / name, abstract_state, abstract_state.layout.logical)
            except CheckpointError as error:
                faults.append(str(error))
                _log.warning("%s; going back to the checkpoint before it", error)
        if faults:
            raise CheckpointError(
                f"no good checkpoint in {self._directory}: {'; '.join(faults)};"
                " move these directories away to start from the beginning"
            )
        return None

    def _found(self) -> list[Path]:
        found = [path for path in self._directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: _order(path.name))

    def _left_over(self) -> list[Path]:
        return [path for path in self._directory.glob("step_*" + TEMPORARY) if path.is_dir()]

    def _new_name(self, step: int) -> str:
        taken = [_order(path.name)[1] for path in self._found() if _order(path.name)[0] == step]
        return f"step_{step:08d}" + (f".{max(taken) + 1}" if taken else "")

    def _supersede(self, name: str) -> None:
        """Deletes what the new checkpoint `name` makes superfluous, and what was left half-written."""
        others = [path for path in self._found() if path.name != name]
        earlier = [path for path in others if _order(path.name)[0] < _order(name)[0]]
        kept = earlier[max(0, len(earlier) - (self._keep - 1)) :]
        for path in others:
            if path not in kept:
                _delete(path)
        for path in self._left_over():
            shutil.rmtree(path, ignore_errors=True)


def _order(name: str) -> tuple[int, int]:
    step, _, attempt = name.removeprefix("step_").partition(".")
    return int(step), int(attempt or 1)


def _delete(path: Path) -> None:
    # Renamed first: a deletion that is interrupted leaves nothing that looks like a checkpoint.
    doomed = path.with_name(path.name + TEMPORARY)
    try:
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        _log.warning("checkpoint %s could not be deleted: %s", path, error)
