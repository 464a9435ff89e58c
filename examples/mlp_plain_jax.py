"""A plain-JAX MLP, trained at ZeRO stage 3: `python examples/mlp_plain_jax.py [STEPS]`.

`zerojax.block` says where a layer begins: there its parameters are gathered. The task: which of ten patterns of 8x8
pixels is hidden in the noise?
"""

import itertools
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax

jax.config.update("jax_num_cpu_devices", 8)  # a machine without accelerators stands in for eight of them

PIXELS, WIDTH, DEPTH, CLASSES, BATCH = 64, 256, 4, 10, 256


def make_model(rng: jax.Array) -> dict[str, jax.Array]:
    keys, shapes = jax.random.split(rng, 3), ((PIXELS, WIDTH), (DEPTH, WIDTH, WIDTH), (WIDTH, CLASSES))
    first, hidden, last = (jax.random.normal(k, s) * s[-2] ** -0.5 for k, s in zip(keys, shapes, strict=True))
    return {"first": first, "hidden": hidden, "last": last}


@jax.checkpoint  # the backward pass gathers a layer again, when it comes to it
@zerojax.block
def layer(kernel: jax.Array, h: jax.Array) -> jax.Array:
    return jax.nn.relu(h @ kernel)


def loss_fn(model: dict, batch: dict, rng: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    h = layer(model["first"], batch["images"])
    h, _ = jax.lax.scan(lambda h, kernel: (h + layer(kernel, h), None), h, model["hidden"])
    logits = zerojax.block(jnp.matmul)(h, model["last"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["labels"]).mean()}


def batches(seed: int) -> Iterator[dict[str, np.ndarray]]:
    patterns, rng = np.random.default_rng(0).normal(size=(CLASSES, PIXELS)), np.random.default_rng(seed)
    while True:
        labels = rng.integers(CLASSES, size=BATCH)
        noise = 2 * rng.normal(size=(BATCH, PIXELS))
        yield {"images": (patterns[labels] + noise).astype(np.float32), "labels": labels}


zero = zerojax.Zero(stage=3)
state = zero.init(make_model, optax.adamw(1e-3))
step = zero.train_step(loss_fn)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
for batch in itertools.islice(batches(seed=1), steps):
    state, metrics = jax.block_until_ready(step(state, batch))  # emulated devices can hang when many steps wait
print(zero.report(state, step, batch))
held_out = zero.eval_step(loss_fn)(state, next(batches(seed=2)))
print(f"\nafter {steps} steps: loss {metrics['loss']:.3f}, accuracy on new images {held_out['accuracy']:.3f}")
