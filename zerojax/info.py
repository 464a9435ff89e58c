"""What is installed and what it runs on."""

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

import jax

import zerojax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "gin-config")


@dataclass(frozen=True)
class Info:
    """Versions and hardware.

    Attributes:
        versions: version of each package, "not installed" where it is absent.
        platform: jax's backend, such as "cpu" or "gpu".
        devices: how many devices there are of each kind, over all processes.
        processes: how many processes there are.
        device_memory: bytes that jax may use on one of this process's devices; None where the backend does not say.
        host_memory: bytes of this host's memory.
        mesh: size of each axis of the default mesh.
        extras: for each of the package's extras, the packages that it lacks.
    """

    versions: Mapping[str, str]
    platform: str
    devices: Mapping[str, int]
    processes: int
    device_memory: int | None
    host_memory: int
    mesh: Mapping[str, int]
    extras: Mapping[str, tuple[str, ...]]


def gather() -> Info:
    """Looks around; starts jax's backend."""
    kinds = [device.device_kind for device in jax.devices()]
    statistics = jax.local_devices()[0].memory_stats() or {}
    return Info(
        versions={
            "zerojax": zerojax.__version__,
            "python": platform.python_version(),
            **{name: version(name) or "not installed" for name in PACKAGES},
        },
        platform=jax.default_backend(),
        devices={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        processes=jax.process_count(),
        device_memory=statistics.get("bytes_limit"),
        host_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        mesh=dict(zerojax.make_mesh().shape),
        extras=lacking(metadata.requires("zerojax") or []) if version("zerojax") else {},
    )


def version(package: str) -> str | None:
    """The version of an installed package; None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def lacking(requirements: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The packages that are absent, by the extra that asks for them.

    >>> lacking(["numpy", "numpy; extra == 'data'", "no-such-package>=2; extra == 'tracking'"])
    {'data': (), 'tracking': ('no-such-package',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    for requirement in requirements:
        if extra := extra_of(requirement):
            found[extra] = found.get(extra, ()) + absent(requirement)
    return found


def absent(requirement: str) -> tuple[str, ...]:
    """The packages that a requirement lacks, those behind an extra it names included: "jax[cuda12]" has its plugin.

    >>> absent("jax>=0.1"), absent("no-such-package")
    ((), ('no-such-package',))
    """
    parts = re.match(r"([\w.-]+)\s*(?:\[([^\]]*)\])?", requirement)
    assert parts, requirement
    if version(parts[1]) is None:
        return (parts[1],)
    extras = [extra.strip() for extra in (parts[2] or "").split(",")]
    inner = [other for other in metadata.requires(parts[1]) or [] if extra_of(other) in extras]
    return tuple(name for other in inner for name in absent(other))


def extra_of(requirement: str) -> str | None:
    """The extra that a requirement of a package's metadata belongs to."""
    extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
    return extra[1] if extra else None


def describe() -> str:
    """The information as lines of text."""
    info = gather()
    devices = ", ".join(f"{count} x {kind}" for kind, count in info.devices.items())
    memory = "not told by the backend" if info.device_memory is None else gigabytes(info.device_memory)
    rows = {
        **info.versions,
        "platform": info.platform,
        "devices": f"{devices} in {info.processes} {'process' if info.processes == 1 else 'processes'}",
        "device memory": memory,
        "host memory": gigabytes(info.host_memory),
        "default mesh": ", ".join(f"{axis} {size}" for axis, size in info.mesh.items()),
        **{
            f"extra {extra}": f"lacks {', '.join(absent)}" if absent else "installed"
            for extra, absent in sorted(info.extras.items())
        },
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def gigabytes(count: int) -> str:
    """Bytes in units of 10^9.

    >>> gigabytes(25_283_133_440)
    '25.3 GB'
    """
    return f"{count / 1e9:.1f} GB"
