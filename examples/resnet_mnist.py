"""A ResNet with batch norm on handwritten digits: `python examples/resnet_mnist.py [STEPS]`.

The norms take their statistics over the whole batch, not over each device's rows, so that eight devices compute what
one would. The images are shifted at random, each time in another way. Needs the packages of data-packages.txt.
"""

import itertools
import sys

import jax
import optax
from flax import nnx

import zerojax
from zerojax.data import Augmented, RandomShift, batches_in_order, loader, mnist_images
from zerojax.models import ResNet, image_classification_loss

jax.config.update("jax_num_cpu_devices", 8)  # a machine without accelerators stands in for eight of them

BATCH, STEPS, PEAK = 64, 500, 3e-3

steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
images, held_out = mnist_images("train"), mnist_images("validation")
batches = loader(Augmented(images, RandomShift(2), copies=10), BATCH)


def make_model(rng: jax.Array) -> ResNet:
    return ResNet(classes=10, channels=1, widths=(16, 32, 64), depths=(1, 1, 1), rngs=nnx.Rngs(rng))


zero = zerojax.Zero(stage=1)
schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK, warmup_steps=steps // 10, decay_steps=steps)
state = zero.init(make_model, optax.adamw(schedule, weight_decay=1e-2))
step = zero.train_step(image_classification_loss)
for i, batch in enumerate(itertools.islice(batches, steps), 1):
    state, metrics = step(state, batch)
    if i % 20 == 0 or i == steps:
        told = f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.3f}"
        print(f"step {i}/{steps}: {told} on a batch", flush=True)
batches.close()

evaluate = zero.eval_step(image_classification_loss)  # with the running means of the statistics
metrics = [evaluate(state, batch) for batch in batches_in_order(held_out, batch_size=200)]
right, number = sum(m["accuracy"] * m["weight"] for m in metrics), sum(m["weight"] for m in metrics)
print(f"accuracy on {number:.0f} held-out images {right / number:.3f}")
