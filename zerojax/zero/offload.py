"""What of a state lies in pinned host memory or in files between steps."""

import functools
import logging
import os
from typing import Any

from jax.sharding import Mesh

from zerojax.errors import UserError, shown
from zerojax.zero.partition import PINNED_HOST

_log = logging.getLogger(__name__)

# The fields of a state behind each name.
FIELDS = {"optimizer": ("opt_state",), "params": ("params", "frozen")}


def names_of(offload: Any) -> tuple[str, ...]:
    """The names in a setting, which may be one of them alone.

    Raises:
      UserError: if there is another.

    >>> names_of("params"), names_of(["optimizer", "params"]), names_of(())
    (('params',), ('optimizer', 'params'), ())
    """
    names = (offload,) if isinstance(offload, str) else offload
    if not isinstance(names, tuple | list) or any(name not in tuple(FIELDS) for name in names):
        raise UserError(f"offload is {shown(offload)}; accepted: 'optimizer', 'params', or a tuple of them")
    return tuple(name for name in FIELDS if name in names)


def path_of(offload_path: Any, offload: tuple[str, ...]) -> str | None:
    """The directory for the files of what is offloaded as "optimizer", or `None`.

    Raises:
      UserError: if it is no path, or there is nothing to be in it.
    """
    if offload_path is None:
        return None
    if not isinstance(offload_path, str | os.PathLike) or not os.fspath(offload_path):
        raise UserError(f"offload_path is {shown(offload_path)}; accepted: the path of a directory, or None")
    if "optimizer" not in offload:
        raise UserError(
            f"offload_path is {shown(offload_path)}, and offload is {shown(offload)}; "
            "accepted: 'optimizer' in offload, whose state lies in files"
        )
    return os.path.abspath(offload_path)


def offloaded_fields(offload: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """The fields of a state whose large leaves lie in host memory.

    Devices that a program is only compiled for list no memories, and are taken to have what is asked for.

    Raises:
      UserError: if the devices cannot copy from host memory by themselves.
    """
    if not offload:
        return ()
    device = mesh.local_devices[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kinds and PINNED_HOST not in kinds:
        raise UserError(
            f"offload is {shown(offload)}, and devices of the backend {device.platform!r} have memory of the kinds "
            f"{', '.join(map(repr, kinds))}; accepted: () there, or a backend with {PINNED_HOST!r}"
        )
    if device.platform == "cpu":
        _warn_of_no_effect(offload)
    return tuple(field for name in offload for field in FIELDS[name])


@functools.cache
def _warn_of_no_effect(offload: tuple[str, ...]) -> None:
    """Once for a setting."""
    _log.warning(
        "offload is %s, and devices of the backend 'cpu' compute in host memory: it saves no memory here, and the step "
        "computes the same",
        shown(offload),
    )
