"""What the tests of states in files run in processes of their own: python -m tests.zero.disk_child SCENARIO ..."""

import os
import signal
import sys

import jax
import numpy as np
import optax

import zerojax
from zerojax.launch.distributed import initialize
from zerojax.zero.disk import DiskArray

WRITES = 8  # arrays in files that a step writes: two moments of four leaves


def killed(path: str, checkpoint: str) -> None:
    """Saves after two steps, and is killed in the middle of the fourth, with some of its files written."""
    from tests.zero.test_offload import BATCHES, loss_fn, make_model, optimizer, settings

    zero = settings(stage=3, offload="optimizer", offload_path=path)
    state, step = zero.init(make_model, optimizer()), zero.train_step(loss_fn)
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
    zerojax.save(checkpoint, state)
    write, written = DiskArray.write, []

    def write_or_die(self, array):
        written.append(self)
        if len(written) == WRITES + WRITES // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, array)

    DiskArray.write = write_or_die
    for batch in BATCHES[2:]:
        state, _ = step(state, batch)


def pair(address: str, process: str, path: str, results: str) -> None:
    """One process of two: three steps, a checkpoint, and two more from there."""
    initialize(address, 2, int(process))
    from tests.zero.test_offload import BATCHES, loss_fn, make_model, settings  # which makes arrays

    zero = settings(stage=3, offload="optimizer", offload_path=path)
    rows = len(BATCHES[0]) // 2
    share = slice(int(process) * rows, (int(process) + 1) * rows)
    state, step, losses = zero.init(make_model, optax.adamw(1e-2)), zero.train_step(loss_fn), []
    for i, batch in enumerate(BATCHES):
        if i == 3:
            zerojax.save(f"{results}/checkpoint", state)
            state = zerojax.restore(f"{results}/checkpoint", zero, make_model, optax.adamw(1e-2))
        state, metrics = step(state, np.asarray(batch)[share])
        losses.append(float(metrics["loss"]))
    files = [file for x in jax.tree.leaves(state.opt_state) if isinstance(x, DiskArray) for file in x.files]
    np.savez(
        f"{results}/{process}.npz",
        *jax.tree.leaves(jax.device_get(zero.gather(state))),
        losses=np.array(losses),
        held=np.array(sum(file.stat().st_size for file in files)),
        directories=np.array(len({file.parent for file in files})),
    )


if __name__ == "__main__":
    {"killed": killed, "pair": pair}[sys.argv[1]](*sys.argv[2:])
