"""A Flax NNX transformer, trained at ZeRO stage 3: `python examples/nnx_model.py [STEPS]`.

Nothing in the model knows that its parameters are in shards. The task: put eight digits in order.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax

jax.config.update("jax_num_cpu_devices", 8)  # a machine without accelerators stands in for eight of them

DIGITS, LENGTH, WIDTH, DEPTH, BATCH = 10, 8, 128, 3, 64


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        h = h + self.attention(self.norm1(h))
        return h + self.down(jax.nn.gelu(self.up(self.norm2(h))))


class Sorter(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.digits, self.places = nnx.Embed(DIGITS, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(DEPTH))
        self.head = nnx.Linear(WIDTH, DIGITS, rngs=rngs)

    def __call__(self, digits: jax.Array) -> jax.Array:
        h = self.digits(digits) + self.places(jnp.arange(LENGTH))
        through = nnx.scan(nnx.remat(lambda block, h: block(h)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(through(self.blocks, h))


def loss_fn(model: Sorter, batch: np.ndarray, rng: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits, targets = model(batch), jnp.sort(batch)
    right = (logits.argmax(-1) == targets).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), {"accuracy": right}


zero = zerojax.Zero(stage=3, clip_norm=1.0)
state = zero.init(lambda key: Sorter(nnx.Rngs(key)), optax.adamw(2e-3))
step = zero.train_step(loss_fn)
steps, random = int(sys.argv[1]) if len(sys.argv) > 1 else 150, np.random.default_rng(0)
for i in range(1, steps + 1):
    batch = random.integers(DIGITS, size=(BATCH, LENGTH))
    state, metrics = jax.block_until_ready(step(state, batch))  # emulated devices can hang when many steps wait
    if i % 50 == 0 or i == steps:
        print(f"step {i}: loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.3f}")
print(f"\n{zero.report(state, step, batch)}")
