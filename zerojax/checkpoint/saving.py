"""Writing one checkpoint: complete or invisible.

The arrays are written into <name>.tmp, each process its own shards. When all have written, the primary process joins
the parts, writes the manifest, and renames the directory to <name>: that rename is the commit.
"""

import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from zerojax.checkpoint import arrays, manifest
from zerojax.checkpoint.checksums import record_files
from zerojax.checkpoint.errors import CheckpointError, check_space, first_line, write_error
from zerojax.checkpoint.keys import key_data
from zerojax.checkpoint.manifest import FileRecord, LeafRecord, Manifest
from zerojax.checkpoint.names import named_leaves
from zerojax.checkpoint.processes import agreed, barrier, is_primary
from zerojax.errors import UserError
from zerojax.zero.disk import DiskArray

TEMPORARY = ".tmp"
DISCARD_ATTEMPTS, DISCARD_PAUSE = 20, 0.1  # seconds

_log = logging.getLogger(__name__)

# Every process starts the same saves in the same order, so a count names the barriers of each.
_saves = itertools.count()


class PendingSave:
    """A save whose arrays are copied and being written."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(finish,), name="zerojax-checkpoint")
        self._thread.start()

    def _run(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except BaseException as error:
            self._error = error
            if not threading.main_thread().is_alive():
                _log.error("%s (the program ended without waiting for it)", error)

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
          CheckpointError: if it could not be written.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


def start_save(
    target: Path, tree: Any, logical: Any, extra: Mapping[str, Any], on_commit: Callable[[], None] = lambda: None
) -> PendingSave:
    """Starts to write `tree` as the checkpoint `target`; every process calls it.

    Returns when the arrays are copied to the host, so that they may be donated.

    Args:
      target: the directory to come; it does not exist, or is empty.
      tree: a pytree of global `jax.Array`s and `DiskArray`s.
      logical: a tree of the same names with each leaf's logical shape and dtype.
      extra: a dict as `json.dumps` writes it; the primary process's is saved.
      on_commit: called by the primary process in the background, after the commit.

    Raises:
      CheckpointError: if the directory cannot be made.
      UserError: if a leaf is no array, or `extra` is not JSON.
    """
    leaves = named_leaves(tree)
    records = _records(leaves, logical)
    _check_json(extra)
    stored = {record.array: key_data(leaves[name]) for name, record in records.items() if record.array is not None}
    needed = sum(array.nbytes for array in stored.values())
    temporary = target.with_name(target.name + TEMPORARY)
    agreed(f"checkpoint {target}", lambda: _make_directory(target, temporary, needed))
    key = f"zerojax/checkpoint/{next(_saves)}"
    writes: list[Callable[[], Any]] = []
    try:
        writes = arrays.start_write(temporary, stored)
    except Exception as error:
        # The other processes are told at the end of their writing, as of any other failure.
        writes = [_raising(error)]

    def finish() -> None:
        fault = _write_part(temporary, writes)
        barrier(f"{key}/written")
        if is_primary():
            try:
                if fault is not None:
                    raise fault
                _commit(target, temporary, records, extra)
            except Exception as error:
                fault = error
                _discard(temporary)
            else:
                _call(on_commit)
        barrier(f"{key}/committed")
        if fault is None and not (target / manifest.FILE).exists():
            fault = CheckpointError(f"checkpoint {target} was not saved: another process failed, see its message")
        if fault is not None:
            raise write_error(target, fault, needed) from fault

    return PendingSave(finish)


def _records(leaves: Mapping[str, Any], logical: Any) -> dict[str, LeafRecord]:
    records = manifest.leaf_records(logical)
    if leaves.keys() != records.keys():
        raise UserError(f"state and logical shapes name different leaves: {sorted(leaves.keys() ^ records.keys())}")
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | DiskArray):
            raise UserError(f"leaf {name} of the state is a {type(leaf).__name__}; accepted: jax.Array")
        if str(leaf.dtype) != records[name].dtype:
            raise UserError(f"leaf {name} is {leaf.dtype}, its logical dtype {records[name].dtype}")
    return records


def _check_json(extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if not (isinstance(key, str) and _is_json(value)):
            raise UserError(
                f"extra[{key!r}] = {value!r:.80} is not JSON; accepted: dicts with text for keys, lists, text, numbers,"
                " booleans, None"
            )


def _is_json(value: Any) -> bool:
    match value:
        case None | bool() | int() | float() | str():
            return True
        case list() | tuple():
            return all(map(_is_json, value))
        case dict():
            # An integer key would come back as text.
            return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    return False


def _make_directory(target: Path, temporary: Path, needed: int) -> None:
    if not is_primary():
        return
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        check_space(target, needed)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise write_error(target, error, needed) from error


def _raising(error: Exception) -> Callable[[], Any]:
    def wait() -> None:
        raise error

    return wait


def _write_part(temporary: Path, writes: list[Callable[[], Any]]) -> Exception | None:
    """Waits for this process's writing and leaves a note of how it went; what failed, if something did."""
    process = jax.process_index()
    fault = None
    note: dict[str, Any]
    try:
        for wait in writes:
            try:
                wait()
            except Exception as error:
                fault = fault or error  # all of them end before anything is deleted
        if fault is not None:
            raise fault
        files = record_files(temporary, arrays.written_by(temporary, process))
        note = {"files": {name: asdict(record) for name, record in files.items()}}
    except Exception as error:
        fault = error
        note = {"fault": first_line(error)}
    with suppress(OSError):  # a note that does not fit on a full disk says as much by being absent
        _note(temporary, process).write_text(json.dumps(note))
    return fault


def _commit(target: Path, temporary: Path, records: Mapping[str, LeafRecord], extra: Mapping[str, Any]) -> None:
    files: dict[str, FileRecord] = {}
    for process in range(jax.process_count()):
        try:
            note = json.loads(_note(temporary, process).read_text())
        except (OSError, ValueError):
            note = {"fault": "it could not write"}
        if "fault" in note:
            raise CheckpointError(f"checkpoint {target} was not saved: process {process}: {note['fault']}")
        files |= {name: FileRecord(**record) for name, record in note["files"].items()}
        _note(temporary, process).unlink()
    arrays.merge(temporary)
    files |= record_files(
        temporary,
        (path for path in temporary.rglob("*") if path.is_file() and str(path.relative_to(temporary)) not in files),
    )
    with (temporary / manifest.FILE).open("w", encoding="utf-8") as stream:
        stream.write(manifest.encode(Manifest(records, dict(extra), files)))
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(target)
    _sync_directory(target.parent)


def _discard(temporary: Path) -> None:
    """Deletes what was written. Where one array failed, Orbax's threads may still be writing others for a moment."""
    for _ in range(DISCARD_ATTEMPTS):
        shutil.rmtree(temporary, ignore_errors=True)
        time.sleep(DISCARD_PAUSE)
        if not temporary.exists():
            return


def _call(on_commit: Callable[[], None]) -> None:
    try:
        on_commit()
    except OSError as error:  # the checkpoint is saved all the same
        _log.warning("%s", error)


def _note(temporary: Path, process: int) -> Path:
    return temporary / f"process_{process}.json"


def _sync_directory(path: Path) -> None:
    """Makes a rename inside `path` outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
