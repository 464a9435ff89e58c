"""The error that says a checkpoint could not be written or read."""

from pathlib import Path

from zerojax.errors import RunError
from zerojax.space import free_bytes, megabytes, says_full


class CheckpointError(RunError):
    """A checkpoint could not be written, or none could be read: one line that names the directory and the fault."""


def check_space(path: Path, needed: int) -> None:
    """Refuses to begin what cannot end: the writing of `path`, `needed` bytes of arrays in all.

    Raises:
      CheckpointError: if fewer bytes are free.
    """
    free = free_bytes(path)
    if free < needed:
        raise CheckpointError(
            f"checkpoint {path} was not saved: the disk is full: {megabytes(free)} free, {megabytes(needed)} needed;"
            " earlier checkpoints are intact"
        )


def write_error(path: Path, error: BaseException, needed: int) -> CheckpointError:
    """The one-line form of what stopped the writing of `path`, `needed` bytes of arrays in all."""
    if says_full(error):
        return CheckpointError(
            f"checkpoint {path} was not saved: the disk, a quota or a limit on a file's size is exhausted:"
            f" {megabytes(free_bytes(path))} free, {megabytes(needed)} needed; earlier checkpoints are intact"
        )
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"checkpoint {path} was not saved: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Class and first line of an error, for a message that has one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
