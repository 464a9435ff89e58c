"""The tiny models of transformers in tests/golden, and ours of the same sizes."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from zerojax.models import GPT
from zerojax.models.bert import BERT
from zerojax.weights import from_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
HEADS = {"bert_classes": dict(classes=3), "bert_masked": dict(masked_lm=True, pooler=False)}
KINDS = {"gpt2": "gpt2", "llama": "llama", "bert_classes": "bert", "bert_masked": "bert"}


def weights(name):
    return GOLDEN / f"weights_{name}.safetensors"


def tensors(name):
    return load_file(weights(name))


def arrays(name):
    return dict(np.load(GOLDEN / f"weights_{name}.npz"))


def make(name, seed=0, **arguments):
    """Our model of the sizes in the case's config.json."""
    kind, sizes = from_config(GOLDEN / f"weights_{name}.json")
    assert kind == KINDS[name]
    make_model = BERT if kind == "bert" else GPT
    return make_model(**sizes | HEADS.get(name, {}) | arguments, rngs=nnx.Rngs(seed))


def logits(name, model):
    given = {key: jnp.asarray(x) for key, x in arrays(name).items() if key != "logits"}
    if name == "bert_classes":
        return model.classify(**given)
    return model.predict(**given) if name == "bert_masked" else model(**given)
