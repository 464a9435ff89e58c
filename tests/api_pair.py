"""One process of two: the reference's steps through the Python interface, with this process's share of each batch."""

import sys

import jax
import numpy as np

from tests.zero import reference
from zerojax import Zero
from zerojax.launch.distributed import initialize


def main(steps: int, results: str) -> None:
    zero = Zero(stage=3, micro_batches=2, clip_norm=reference.CLIP, min_shard_size=64)
    state = zero.init(reference.make_model, reference.adamw(3e-3))
    step = zero.train_step(reference.loss_fn)
    rows = reference.BATCH // jax.process_count()
    share = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    losses = []
    for batch in reference.batches(steps):
        state, metrics = step(state, {name: array[share] for name, array in batch.items()})
        losses.append(float(metrics["loss"]))
    params = jax.tree.leaves(jax.device_get(zero.gather(state)))
    np.savez(f"{results}_{jax.process_index()}.npz", *params, losses=np.array(losses))


if __name__ == "__main__":
    address, process, steps, results = sys.argv[1:]
    initialize(address, 2, int(process))
    main(int(steps), results)
