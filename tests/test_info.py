"""What `zerojax info` finds out."""

import platform
import re
from importlib import metadata

import jax

from zerojax import info


def test_versions_are_those_of_the_installed_packages():
    versions = info.gather().versions
    assert versions["python"] == platform.python_version()
    assert versions["jax"] == jax.__version__
    for name in ("jaxlib", "flax", "optax", "orbax-checkpoint"):
        assert versions[name] == metadata.version(name)


def test_devices_and_mesh_are_jax_s():
    found = info.gather()
    assert sum(found.devices.values()) == jax.device_count()
    assert found.mesh == {"data": jax.device_count()}
    assert found.platform == jax.default_backend() and found.processes == jax.process_count()


def test_host_memory_is_the_kernel_s():
    with open("/proc/meminfo") as file:
        kilobytes = int(file.readline().split()[1])
    assert info.gather().host_memory == kilobytes * 1024


def test_absent_packages_by_extra():
    requirements = [
        "jax>=0.10",
        'grain>=0.2; extra == "data"',
        "no-such-package[x]>=1,<2; (python_version > '3') and extra == 'data'",
        "no.such_package2; extra == 'with-dash'",
    ]
    grain = () if info.version("grain") else ("grain",)
    assert info.lacking(requirements) == {
        "data": (*grain, "no-such-package"),
        "with-dash": ("no.such_package2",),
    }


def test_an_extra_of_another_package_is_looked_into(monkeypatch):
    needs = {
        "framework": ["numpy", "plugin[with-cuda]<=2; os_name == 'posix' and extra == 'cuda'", "other; extra == 'x'"],
        "plugin": ["cuda-runtime>=12; extra == 'with-cuda'", "cuda-blas; extra == 'with-cuda'"],
        "cuda-blas": None,
    }

    def version(name):
        if name not in needs:
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", needs.get)
    assert info.lacking(["framework[cuda]; extra == 'gpu'"]) == {"gpu": ("cuda-runtime",)}
    assert info.absent("framework >= 1") == ()


def test_description_has_a_line_for_each_thing():
    rows = [re.fullmatch(r"(\S+(?: \S+)*)  +(\S.*)", line) for line in info.describe().splitlines()]
    names = {row[1] for row in rows}
    assert {"zerojax", "python", "jax", "devices", "device memory", "host memory", "default mesh"} <= names
    assert len({row.start(2) for row in rows}) == 1  # the values stand in one column
