"""One process of two: reads weights into shards over both, checks its own, and writes them again."""

import resource
import sys
from pathlib import Path

import jax
import numpy as np
import optax

from tests.weights import golden
from zerojax import Zero
from zerojax.checkpoint import CheckpointError
from zerojax.errors import UserError
from zerojax.launch.distributed import initialize
from zerojax.weights import load_weights, save_weights


def main(folder: Path) -> None:
    zero = Zero(stage=3, min_shard_size=16)
    state = load_weights(golden.weights("llama"), zero.init(lambda key: golden.make("llama"), optax.sgd(0.1)), "llama")
    embedding = golden.tensors("llama")["model.embed_tokens.weight"]
    for shard in state.params["embedding"].addressable_shards:
        assert shard.data.size < embedding.size
        np.testing.assert_array_equal(shard.data, embedding[shard.index])
    save_weights(folder / "whole", state, "llama")
    try:
        save_weights(folder / "whole", state, "llama")
    except UserError as error:
        print(error)
    if jax.process_index() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        save_weights(folder / "cut", state, "llama")
    except CheckpointError as error:
        print(error)


if __name__ == "__main__":
    address, process, folder = sys.argv[1:]
    initialize(address, 2, int(process))
    main(Path(folder))
