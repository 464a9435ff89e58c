"""How exactly the stages are ZeRO's: against a plain optax loop, and against ZeRO's formulas.

    python benchmarks/fidelity.py

First the largest relative difference, in loss and in any parameter, to a plain loop on one device after 20 AdamW steps
with clipping, two micro-batches and unequal weights (the loop of tests/zero/reference.py). Then, for a GPT of four
scanned layers, what a compiled step sends over the parameters' bytes, state between steps over ZeRO's formula, and
temporaries.
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax
from tests.zero import reference
from zerojax.models.gpt import GPT, next_token_loss

STEPS = 20
SIZES = dict(vocab_size=512, dim=256, layers=4, heads=4, max_length=64, remat=True)


def main() -> None:
    compare_with_a_plain_loop()
    compare_with_formulas()


def compare_with_a_plain_loop() -> None:
    optimizer = reference.adamw(3e-3)
    losses, params = reference.train(optimizer, STEPS)
    replicas = zerojax.make_mesh(replica=2)
    for name, stage, mesh in [*((f"stage {n}", n, None) for n in range(4)), ("stage 3, 2 replicas", 3, replicas)]:
        zero = zerojax.Zero(stage=stage, mesh=mesh, micro_batches=2, clip_norm=reference.CLIP, min_shard_size=64)
        state, step = zero.init(reference.make_model, optimizer), zero.train_step(reference.loss_fn)
        found = []
        for batch in reference.batches(STEPS):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        of_loss = np.max(np.abs(np.array(found) - losses) / np.abs(losses))
        pairs = zip(jax.tree.leaves(jax.device_get(zero.gather(state))), jax.tree.leaves(params), strict=True)
        of_params = max(np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in pairs)
        print(f"{name}: loss within {of_loss:.1e}, parameters within {of_params:.1e} of the plain loop", flush=True)


def compare_with_formulas() -> None:
    for stage in range(4):
        for micro_batches in (1, 4):
            zero = zerojax.Zero(stage=stage, micro_batches=micro_batches)
            state = zero.abstract_state(lambda key: GPT(**SIZES, rngs=nnx.Rngs(key)), optax.adamw(1e-3))
            batch = {"tokens": jax.ShapeDtypeStruct((32, SIZES["max_length"] + 1), jnp.int32)}
            report = zero.report(state, zero.train_step(next_token_loss), batch)
            sent = report.sent.bytes / (4 * report.n_parameters)
            print(
                f"stage {stage}, {micro_batches} micro-batches: sends {sent:.3f} of the parameters' bytes, "
                f"state {report.state.bytes / report.state.expected:.4f} of the formula, "
                f"temporaries {report.temporaries / 1e6:.1f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
