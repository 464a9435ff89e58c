"""What the tests run in processes of their own: python child.py <scenario> <directory> [arguments]."""

import os
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint import CheckpointError, Checkpoints
from zerojax.checkpoint.saving import start_save

BIG = 64 << 20


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "frozen"], meta_fields=["layout"])
@dataclass
class FakeState:
    """The part of a State that checkpoints look at."""

    step: Any
    params: Any
    frozen: Any
    layout: Any


def mesh_of(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("data",))


def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values that every process can make for itself."""
    return np.random.default_rng(sum(map(ord, name))).standard_normal(shape).astype(np.float32)


def on(mesh: Mesh, array: np.ndarray, spec: P) -> jax.Array:
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)


def state(mesh: Mesh, step: int, width: int = 24) -> FakeState:
    """A leaf in shards whose 10 rows are padded to a multiple of the devices, and a whole one."""
    rows = -(-10 // mesh.size) * mesh.size
    w = np.zeros((rows, width), np.float32)
    w[:10] = value("w", (10, width)) + step
    arrays = {"w": on(mesh, w, P("data")), "b": on(mesh, value("b", (width,)) + step, P())}
    logical = {
        "step": jax.ShapeDtypeStruct((), np.int32),
        "params": {
            "w": jax.ShapeDtypeStruct((10, width), np.float32),
            "b": jax.ShapeDtypeStruct((width,), np.float32),
        },
        "frozen": {},
    }
    return FakeState(on(mesh, np.int32(step), P()), arrays, {}, SimpleNamespace(logical=logical))


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def check(restored: FakeState, step: int, width: int = 24) -> None:
    assert int(restored.step) == step
    expected = {"w": value("w", (10, width)) + step, "b": value("b", (width,)) + step}
    expected["w"] = np.pad(expected["w"], ((0, restored.params["w"].shape[0] - 10), (0, 0)))
    for name, array in restored.params.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[name][shard.index])


def killed_while_writing(directory: Path) -> None:
    mesh = mesh_of(len(jax.devices()))
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(state(mesh, 1), {"row": 1})
    big = {"w": on(mesh, np.ones((8, BIG // 32), np.float32), P("data"))}

    def kill_when_data_appears() -> None:
        while not any(path.stat().st_size for path in directory.glob("step_00000002.tmp/*/d/*")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_when_data_appears, daemon=True).start()
    start_save(directory / "step_00000002", big, big, {}).wait()


def killed_before_commit(directory: Path) -> None:
    mesh = mesh_of(len(jax.devices()))
    checkpoints = Checkpoints(directory)
    checkpoints.save(state(mesh, 1), {"row": 1})
    checkpoints.wait()
    Path.rename = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(state(mesh, 2))
    checkpoints.wait()


def file_size_limit(directory: Path) -> None:
    mesh = mesh_of(len(jax.devices()))
    checkpoints = Checkpoints(directory)
    checkpoints.save(state(mesh, 1), {"row": 1})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    checkpoints.save(state(mesh, 2, width=100_000))
    try:
        checkpoints.wait()
    except CheckpointError as error:
        print(error)
    assert checkpoints.steps() == [1]


def left_open(directory: Path) -> None:
    Checkpoints(directory).save(state(mesh_of(len(jax.devices())), 1))


def save_pair(directory: Path) -> None:
    with Checkpoints(directory) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state(mesh_of(8), step), {"row": step})


def restore_pair(directory: Path, step: str) -> None:
    template = state(mesh_of(8), 0)
    restored, extra = Checkpoints(directory).restore_latest(abstract(template))
    check(restored, int(step))
    assert extra == {"row": int(step)}


def one_of_pair_full(directory: Path) -> None:
    if jax.process_index() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    checkpoints = Checkpoints(directory)
    checkpoints.save(state(mesh_of(8), 3, width=100_000))
    try:
        checkpoints.wait()
    except CheckpointError as error:
        print(error)
    assert checkpoints.steps() == [1, 2]
    checkpoints.save(state(mesh_of(8), 3), {"row": 3})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2, 3]


def main() -> None:
    scenario, directory, *arguments = sys.argv[1:]
    if address := os.environ.get("PAIR_ADDRESS"):
        jax.distributed.initialize(address, num_processes=2, process_id=int(os.environ["PAIR_PROCESS"]))
    globals()[scenario](Path(directory), *arguments)


if __name__ == "__main__":
    main()
