"""Orbax under the checkpoints: named arrays written to, merged in and read from a directory."""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from zerojax.zero.disk import DiskArray

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

# A reader whose shards are cut otherwise than the writer's reads whole chunks: this bounds what it reads in vain.
_CHUNK_BYTES = 64 << 20


def start_write(directory: Path, arrays: Mapping[str, jax.Array | DiskArray]) -> list[Callable[[], Any]]:
    """Copies this process's shards of `arrays` to the host and starts to write them; those in files are read and
    written one after the other, and that is waited for.

    Returns when the copies are made: the arrays may then be donated. Each function returned waits for a part of the
    writing and raises what stopped it.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    save_args = {key: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for key in arrays}
    args = ocp.args.PyTreeSave(dict(arrays), save_args=save_args)
    return [future.result for future in _run(_handler().async_save(epath.Path(directory), args=args)) or ()]


def written_by(directory: Path, process: int) -> list[Path]:
    """The files that `process` alone has written."""
    return [path for path in (directory / f"ocdbt.process_{process}").rglob("*") if path.is_file()]


def merge(directory: Path) -> None:
    """Joins what the processes have written into one store; for one process, after all have written."""
    from etils import epath

    _handler().finalize(epath.Path(directory))


def read(directory: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays of a directory, those that have a target, each read into the shards of its target's sharding.

    A target may be longer or shorter than the stored array along a dimension: it is filled up with zeros or cut.
    Only the chunks that this process's shards overlap are read.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    restore_args = {
        key: ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.shape, strict=False)
        for key, target in targets.items()
    }
    wanted = ocp.args.PyTreeRestore(item=dict(targets), restore_args=restore_args, partial_restore=True)
    return _handler().restore(epath.Path(directory), args=wanted)


@functools.cache
def _handler() -> "ocp.PyTreeCheckpointHandler":
    # Orbax takes half a second to import, which `import zerojax.checkpoint` does not have to pay.
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(_is_news)

    class Handler(ocp.type_handlers.ArrayHandler):
        """Of arrays, and of those in files, which are in memory one at a time."""

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            entries = list(zip(values, infos, args, strict=True))
            arrays = [entry for entry in entries if not isinstance(entry[0], DiskArray)]
            futures = list(await super().serialize(*zip(*arrays, strict=True))) if arrays else []
            for value, info, arg in entries:
                if isinstance(value, DiskArray):
                    for future in await super().serialize([value.read()], [info], [arg]):
                        future.result()
            return futures

    handler = Handler(
        # With one process, slices of replicas only make more and smaller chunks.
        use_replica_parallel=jax.process_count() > 1,
        enable_write_sharding_file=False,
        array_metadata_store=None,
    )
    registry = ocp.type_handlers.create_type_handler_registry()
    registry.add((jax.Array, DiskArray), handler)
    return ocp.PyTreeCheckpointHandler(
        # Trained weights compress by a few percent, at several times the cost of writing them.
        use_compression=False,
        type_handler_registry=registry,
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record is kept: not orbax's running commentary, nor the trace of an error we raise ourselves."""
    path = record.pathname.replace("\\", "/")
    return "/orbax/" not in path or (record.levelno >= logging.WARNING and not path.endswith("futures/future.py"))


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, also where an event loop already runs (notebooks)."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
