"""An LSTM that reads Shakespeare character by character: `python examples/lstm_language_model.py [STEPS]`.

Its kernels are gathered once in a pass, before the loop over time. Needs the package shakespeare of data-packages.txt;
without it the help texts in Python's own library take its place.
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax
from zerojax.data import bits_per_byte, entropy_baselines, evaluation_batches, loader, text_dataset
from zerojax.models import RNN, next_token_loss

jax.config.update("jax_num_cpu_devices", 8)  # a machine without accelerators stands in for eight of them

LENGTH, BATCH, STEPS = 64, 32, 600

steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
training, held_out = (text_dataset(length=LENGTH, split=split) for split in ("train", "validation"))
vocab_size = training.tokenizer.vocab_size


def make_model(rng: jax.Array) -> RNN:
    return RNN(vocab_size=vocab_size, dim=256, layers=1, cell="lstm", rngs=nnx.Rngs(rng))


zero = zerojax.Zero(stage=3, clip_norm=1.0)
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=steps // 10, decay_steps=steps)
state = zero.init(make_model, optax.adam(schedule))
step, batches = zero.train_step(next_token_loss), loader(training, BATCH)
for i, batch in enumerate(itertools.islice(batches, steps), 1):
    state, metrics = step(state, batch)
    if i % 50 == 0 or i == steps:
        print(f"step {i}/{steps}: loss {metrics['loss']:.3f}", flush=True)
batches.close()


@nnx.jit
def continued(model: RNN, start: jax.Array, rng: jax.Array) -> jax.Array:
    """The 200 characters that follow ``start`` (length,), drawn by the model's probabilities."""

    def turn(carry: tuple, rng: jax.Array) -> tuple[tuple, jax.Array]:
        logits, memory = carry
        token = jax.random.categorical(rng, logits)
        logits, memory = model.run(token[None, None], memory)
        return (logits[0, -1], memory), token

    logits, memory = model.run(start[None], None)
    return jax.lax.scan(turn, (logits[0, -1], memory), jax.random.split(rng, 200))[1]


start = "The "
tokens = continued(zero.gather(state), jnp.asarray(training.tokenizer.encode(start)), jax.random.key(0))
print(f"\n{start}{training.tokenizer.decode(np.asarray(tokens))}\n")

evaluate = zero.eval_step(next_token_loss)
metrics = [evaluate(state, batch) for batch in evaluation_batches(held_out, BATCH, batches=16)]
nats = sum(m["loss"] * m["weight"] for m in metrics) / sum(m["weight"] for m in metrics)
bigram = entropy_baselines(training.text, held_out.text).bigram
print(f"bits per character of unseen text {bits_per_byte(float(nats)):.2f} (counting pairs: {bigram:.2f})")
