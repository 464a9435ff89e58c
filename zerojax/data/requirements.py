"""Optional packages, and the command that installs a missing one."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from zerojax.errors import UserError


def require_module(name: str, install: str) -> ModuleType:
    """Imports an optional module; where it is absent, a ``UserError`` gives the command that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _missing(error.name or name, install) from error


def require_folder(package: str, install: str) -> Path:
    """The folder of an optional package that is used for its files and is not imported."""
    folder = find_folder(package)
    if folder is None:
        raise _missing(package, install)
    return folder


def find_folder(package: str) -> Path | None:
    """The folder of an installed package, or None where it is absent."""
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _missing(name: str, install: str) -> UserError:
    return UserError(f"the Python package {name!r} is not installed: {install}")
