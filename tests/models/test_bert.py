"""BERT: its sizes, its padding, its heads and its losses. Its numbers are compared in tests/weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.models.sharded import assert_each_parameter_is_read_once, assert_shards_train_as_one_device_does
from zerojax.errors import UserError
from zerojax.models.bert import BERT, classification_loss, mask_tokens, masked_lm_loss

TINY = dict(vocab_size=64, dim=16, layers=2, heads=4, max_length=16)
HEADS = dict(classes=3, masked_lm=True)


def make(seed=0, **arguments):
    return BERT(**TINY | arguments, rngs=nnx.Rngs(seed))


def sentences(batch=8, length=12, seed=1):
    keys = jax.random.split(jax.random.key(seed), 3)
    lengths = jax.random.randint(keys[1], (batch, 1), 2, length + 1)
    return {
        "tokens": jax.random.randint(keys[0], (batch, length), 0, 64),
        "mask": (jnp.arange(length) < lengths).astype(jnp.int32),
        "labels": jax.random.randint(keys[2], (batch,), 0, 3),
    }


def masked_sentences():
    batch = sentences()
    masked = mask_tokens(jax.random.key(5), batch["tokens"], batch["mask"], mask_token=63, vocab_size=64)
    return {"mask": batch["mask"]} | masked


def count(**sizes):
    abstract = nnx.eval_shape(lambda: BERT(**sizes, rngs=nnx.Rngs(0)))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(abstract, nnx.Param)))


def test_the_published_sizes():
    base = dict(vocab_size=30522, dim=768, layers=12, heads=12, max_length=512)
    assert count(**base) == 109_482_240  # Hugging Face's google-bert/bert-base-uncased, BertModel
    assert count(**base, pooler=False, masked_lm=True) == 109_514_298  # and BertForMaskedLM
    assert count(**base, scan=False, classes=2) == 109_482_240 + 2 * 768 + 2
    mini = dict(vocab_size=30522, dim=384, layers=6, heads=12, mlp_dim=1536, max_length=512)
    assert count(**mini) == 22_713_216  # sentence-transformers/all-MiniLM-L6-v2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_outputs_have_the_dtype_of_the_parameters(dtype):
    graph, params = nnx.split(make(**HEADS))
    model, batch = nnx.merge(graph, optax.tree.cast(params, dtype)), sentences()
    given = batch["tokens"], batch["mask"]
    shapes = [model(*given), model.classify(*given), model.predict(*given), model.embed_sentences(*given)]
    assert [x.shape for x in shapes] == [(8, 12, 16), (8, 3), (8, 12, 64), (8, 16)]
    assert [x.dtype for x in shapes] == [dtype, dtype, dtype, jnp.float32]


def test_nothing_looks_at_padding():
    model, batch = make(), sentences()
    other = jnp.where(batch["mask"] == 0, (batch["tokens"] + 7) % 64, batch["tokens"])
    a, b = (model(tokens, batch["mask"]) for tokens in (batch["tokens"], other))
    np.testing.assert_array_equal(a * batch["mask"][..., None], b * batch["mask"][..., None])
    assert (a != b).any()
    short = model(batch["tokens"][:1, :2], jnp.ones((1, 2)))
    padded = model(batch["tokens"][:1], jnp.arange(12)[None] < 2)
    np.testing.assert_allclose(padded[:, :2], short, atol=1e-5)
    both = (batch["tokens"], batch["mask"]), (other, batch["mask"])
    np.testing.assert_allclose(*(model.embed_sentences(*given) for given in both), atol=1e-6)


def test_a_sentence_is_the_mean_of_its_tokens_of_length_1():
    model, batch = make(), sentences()
    h, mask = np.asarray(model(batch["tokens"], batch["mask"]), np.float64), np.asarray(batch["mask"], bool)
    means = np.stack([states[seen].mean(0) for states, seen in zip(h, mask, strict=True)])
    want = means / np.linalg.norm(means, axis=-1, keepdims=True)
    np.testing.assert_allclose(model.embed_sentences(batch["tokens"], batch["mask"]), want, atol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_equals_unscanned(remat):
    batch = sentences()
    losses = []
    for scan in (True, False):
        graph, params = nnx.split(make(classes=3, scan=scan, remat=remat))
        loss = lambda params, graph=graph: classification_loss(nnx.merge(graph, params), batch)[0].total
        value, gradient = jax.jit(jax.value_and_grad(loss))(params)
        losses.append((value, optax.tree.norm(gradient)))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_dropout_follows_its_key_and_ends_in_evaluation():
    model, batch = make(dropout=0.5, classes=3), sentences()
    given = batch["tokens"], batch["mask"], None
    a, b = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(model.classify(*given, a), model.classify(*given, a))
    assert (model.classify(*given, a) != model.classify(*given, b)).any()
    plain = make(classes=3).classify(*given)
    np.testing.assert_array_equal(model.classify(*given), plain)
    model.eval()
    np.testing.assert_array_equal(model.classify(*given, a), plain)


def test_weights_choose_the_sentences():
    model, batch = make(classes=3), sentences()
    weights = jnp.array([2.0, 0, 0, 1, 0, 0, 0, 0])
    loss, metrics = classification_loss(model, batch | {"weights": weights})
    logits = np.asarray(model.classify(batch["tokens"], batch["mask"]))
    nll = -np.asarray(jax.nn.log_softmax(logits))[np.arange(8), batch["labels"]]
    hits = logits.argmax(-1) == batch["labels"]
    np.testing.assert_allclose(loss, [2 * nll[0] + nll[3], 3.0], rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], [2.0 * hits[0] + hits[3], 3.0])


def test_only_masked_tokens_are_predicted():
    model, batch = make(masked_lm=True), masked_sentences()
    loss = masked_lm_loss(model, batch)
    log_p = np.asarray(jax.nn.log_softmax(model.predict(batch["tokens"], batch["mask"])))
    places = np.argwhere(np.asarray(batch["weights"]))
    want = -sum(log_p[i, j, batch["labels"][i, j]] for i, j in places)
    np.testing.assert_allclose(loss, [want, len(places)], rtol=1e-5)
    assert float(loss.total / loss.weight) == pytest.approx(math.log(64), abs=0.1)


def test_15_percent_are_chosen_and_treated_80_10_10():
    n = 200_000
    tokens, maskable = jnp.arange(n) % 1000, jnp.arange(n) % 2 == 0
    masked = mask_tokens(jax.random.key(0), tokens, maskable, mask_token=1000, vocab_size=500)
    chosen, seen = np.asarray(masked["weights"], bool), np.asarray(masked["tokens"])
    np.testing.assert_array_equal(masked["labels"], tokens)
    assert not chosen[1::2].any() and (seen == np.asarray(tokens))[~chosen].all()

    def assert_share(count, of, share):
        assert abs(count - share * of) < 4 * (of * share * (1 - share)) ** 0.5

    total = chosen.sum()
    assert_share(total, n / 2, 0.15)
    assert_share((seen[chosen] == 1000).sum(), total, 0.8)
    assert_share((seen[chosen] == np.asarray(tokens)[chosen]).sum(), total, 0.1 + 0.1 * 0.001)
    replaced = seen[chosen & (seen != 1000) & (seen != np.asarray(tokens))]
    assert replaced.max() < 500 and abs(replaced.mean() - 249.5) < 4 * 500 / 12**0.5 / len(replaced) ** 0.5
    again = mask_tokens(jax.random.key(0), tokens, maskable, mask_token=1000, vocab_size=500)
    other = mask_tokens(jax.random.key(1), tokens, maskable, mask_token=1000, vocab_size=500)
    np.testing.assert_array_equal(again["tokens"], seen)
    assert (other["tokens"] != seen).any()


def test_masking_keeps_the_tokens_dtype():
    tokens = np.arange(32, dtype=np.uint16)
    masked = mask_tokens(jax.random.key(0), jnp.asarray(tokens), tokens > 3, mask_token=103, vocab_size=30522)
    assert masked["tokens"].dtype == masked["labels"].dtype == jnp.uint16


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(heads=5), "heads=5: must be a positive divisor of dim=16"),
        (dict(dropout=-0.1), r"dropout=-0.1: must lie in \[0, 1\)"),
        (dict(classes=2, pooler=False), "classes=2 with pooler=False: a classifier reads the pooler's output"),
        (dict(attention_implementation="flash"), "attention_implementation='flash': must be one of None, 'xla'"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(UserError, match=message):
        make(**wrong)


def test_heads_that_are_not_there_and_long_sequences_are_named():
    model, tokens = make(), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UserError, match="classes=None: the model was made without a classifier"):
        model.classify(tokens)
    with pytest.raises(UserError, match="masked_lm=False: the model was made without the head"):
        model.predict(tokens)
    with pytest.raises(UserError, match="a sequence of 17 tokens: the model's max_length is 16"):
        model(jnp.zeros((1, 17), jnp.int32))


@pytest.mark.parametrize("scan, remat", [(True, True), (False, False)])
def test_each_parameter_is_read_once(scan, remat):
    batch = sentences()
    classifier = make(classes=3, scan=scan, remat=remat)
    assert_each_parameter_is_read_once(classifier, lambda model: model.classify(batch["tokens"], batch["mask"]))
    masked = make(pooler=False, masked_lm=True, scan=scan, remat=remat)
    assert_each_parameter_is_read_once(masked, lambda model: model.predict(batch["tokens"], batch["mask"]))


@pytest.mark.parametrize("loss_fn, batch", [(classification_loss, sentences), (masked_lm_loss, masked_sentences)])
def test_shards_train_as_one_device_does(loss_fn, batch):
    """The masked words are unevenly many on the devices: the loss says its weight."""
    make_model = lambda key: BERT(**TINY, **HEADS, rngs=nnx.Rngs(key))
    assert_shards_train_as_one_device_does(make_model, loss_fn, batch())
