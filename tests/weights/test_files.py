"""Files that are damaged, do not match or are spelt otherwise; and how new ones are laid out."""

import json
import re
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.weights import golden
from zerojax.checkpoint import CheckpointError
from zerojax.errors import UserError
from zerojax.models import GPT
from zerojax.models.bert import BERT
from zerojax.weights import load_weights, save_weights
from zerojax.weights.files import TensorFiles, TensorWriter


def load(tmp_path, name, tensors, model=None, **options):
    save_file(tensors, tmp_path / "model.safetensors")
    return load_weights(tmp_path, golden.make(name) if model is None else model, golden.KINDS[name], **options)


def assert_equal(a, b):
    a, b = (dict(nnx.to_flat_state(nnx.state(model, nnx.Param))) for model in (a, b))
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path][...], b[path][...])


@pytest.fixture(scope="module")
def gpt2():
    return load_weights(golden.weights("gpt2"), golden.make("gpt2"), "gpt2")


# --- what does not match


def test_every_difference_is_listed_and_nothing_is_loaded(tmp_path):
    tensors = golden.tensors("bert_classes")
    del tensors["bert.encoder.layer.1.attention.self.key.weight"], tensors["classifier.bias"]
    tensors["bert.encoder.layer.2.output.dense.bias"] = np.zeros(24, np.float32)
    tensors["bert.pooler.dense.weight"] = np.zeros((24, 23), np.float32)
    tensors["bert.pooler.dense.bias"] = np.zeros(24, np.int32)
    model = golden.make("bert_classes")
    before = nnx.clone(model)
    with pytest.raises(UserError) as caught:
        load(tmp_path, "bert_classes", tensors, model)
    message = str(caught.value)
    assert "\n" not in message and f"weights {tmp_path} do not match the model as kind 'bert'" in message
    assert "missing: bert.encoder.layer.1.attention.self.key.weight, classifier.bias;" in message
    assert "not of the model: bert.encoder.layer.2.output.dense.bias;" in message
    assert "bert.pooler.dense.bias I32[24], expected [24]" in message
    assert "bert.pooler.dense.weight F32[24, 23], expected [24, 24]" in message
    assert_equal(model, before)


def test_a_long_list_is_whole(tmp_path):
    with pytest.raises(UserError, match=r"missing: (\S+ ){27}\S+; not of the model: x$"):
        load(tmp_path, "gpt2", {"x": np.zeros(1, np.float32)})


def test_a_state_is_whole_after_a_refusal(tmp_path):
    import optax

    from zerojax import Zero

    zero = Zero(stage=3, min_shard_size=16)
    state = zero.init(lambda key: golden.make("gpt2"), optax.sgd(0.1))
    with pytest.raises(UserError, match="do not match"):
        load(tmp_path, "gpt2", {"x": np.zeros(1, np.float32)}, state)
    assert np.isfinite(np.asarray(state.params["embedding"])).all()


def test_a_head_may_start_fresh_where_it_is_named(tmp_path):
    tensors = {name: x for name, x in golden.tensors("bert_classes").items() if "classifier" not in name}
    with pytest.raises(UserError, match="missing: classifier.bias, classifier.weight$"):
        load(tmp_path, "bert_classes", tensors)
    model = golden.make("bert_classes")
    loaded = load(tmp_path, "bert_classes", tensors, model, fresh=["head/*"])
    np.testing.assert_array_equal(loaded.head.kernel[...], model.head.kernel[...])
    np.testing.assert_array_equal(loaded.embedding[...], tensors["bert.embeddings.word_embeddings.weight"])


class WithExtra(GPT):
    """A parameter of its own beside GPT's, as an adapter adds it."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.extra = nnx.Param(jnp.ones(3))


def test_a_parameter_that_no_file_has_may_start_fresh():
    model = WithExtra(vocab_size=48, dim=24, layers=2, heads=4, max_length=16, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="missing: any tensor for extra$"):
        load_weights(golden.weights("gpt2"), model, "gpt2")
    loaded = load_weights(golden.weights("gpt2"), model, "gpt2", fresh=["extra"])
    np.testing.assert_array_equal(loaded.extra[...], np.ones(3))
    np.testing.assert_array_equal(loaded.embedding[...], golden.tensors("gpt2")["transformer.wte.weight"])


def test_fresh_excuses_neither_a_part_nor_another_shape(tmp_path):
    tensors = golden.tensors("bert_classes")
    tensors["classifier.weight"] = np.zeros((2, 24), np.float32)
    del tensors["bert.encoder.layer.0.output.dense.bias"]
    faults = r"missing: bert.encoder.layer.0.output.dense.bias; of another shape or dtype: classif"
    with pytest.raises(UserError, match=faults):
        load(tmp_path, "bert_classes", tensors, fresh=["*"])


def test_tensors_are_left_out_where_they_are_named(tmp_path):
    tensors = golden.tensors("bert_classes")
    model = golden.make("bert_classes", classes=None)
    with pytest.raises(UserError, match="not of the model: classifier.bias, classifier.weight$"):
        load(tmp_path, "bert_classes", tensors, model)
    load(tmp_path, "bert_classes", tensors, model, ignore=["classifier.*"])


def test_a_tied_head_may_be_saved_twice_but_not_be_another(tmp_path, gpt2):
    tensors = golden.tensors("gpt2")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    assert_equal(load(tmp_path, "gpt2", tensors), gpt2)
    tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(UserError, match="differs: lm_head.weight, which the model ties to transformer.wte.weight$"):
        load(tmp_path, "gpt2", tensors)


def test_an_untied_head_is_its_own(tmp_path):
    tensors = golden.tensors("gpt2")
    tensors["lm_head.weight"] = 2 * tensors["transformer.wte.weight"]
    model = load(tmp_path, "gpt2", tensors, golden.make("gpt2", tied=False))
    np.testing.assert_array_equal(model.head.kernel[...], tensors["lm_head.weight"].T)


@pytest.mark.parametrize(
    "model, kind, message",
    [
        (lambda: golden.make("gpt2"), "gpt3", "kind='gpt3': must be one of 'bert', 'gpt2', 'llama'"),
        (lambda: golden.make("gpt2"), "bert", "kind='bert' is of BERT models: the model is a GPT"),
        (lambda: golden.make("llama"), "gpt2", "kind='gpt2' of a model with 2 key-value heads"),
        (lambda: {"w": jnp.ones(2)}, "gpt2", "must be an nnx.Module, or a State of one"),
        (
            lambda: golden.make("gpt2"),
            "llama",
            "no place for the model's blocks/attention/out/bias, .*, positions; nothing is written",
        ),
    ],
)
def test_a_kind_that_is_not_the_models_is_named(tmp_path, model, kind, message):
    with pytest.raises(UserError, match=message):
        save_weights(tmp_path, model(), kind)
    assert not list(tmp_path.iterdir())


def test_patterns_are_a_list():
    with pytest.raises(UserError, match=r"fresh='head/\*': must be a list of patterns"):
        load_weights(golden.weights("gpt2"), golden.make("gpt2"), "gpt2", fresh="head/*")


# --- files that are not there or damaged


def test_an_absent_file_is_named(tmp_path):
    accepted = "accepted: a .safetensors file, or a directory with model.safetensors or model.safetensors.index.json"
    with pytest.raises(UserError, match=f"weights {tmp_path}/none: no such file or directory; {accepted}"):
        load_weights(tmp_path / "none", golden.make("gpt2"), "gpt2")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=f"no model.safetensors and no model.safetensors.index.json in it; {accepted}"):
        load_weights(tmp_path, golden.make("gpt2"), "gpt2")


@pytest.mark.parametrize("cut", [0, 4, 2000, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path, cut):
    file = tmp_path / "weights.safetensors"
    file.write_bytes(golden.weights("gpt2").read_bytes()[:cut])
    with pytest.raises(UserError, match=re.escape(f"weights {file}: not a safetensors file: ")):
        load_weights(file, golden.make("gpt2"), "gpt2")


def test_an_index_that_is_none_or_whose_files_are_missing_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(UserError, match="not an index of safetensors files"):
        load_weights(tmp_path, golden.make("gpt2"), "gpt2")
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(UserError, match="the index names one.safetensors, two.safetensors, which the directory does"):
        load_weights(tmp_path, golden.make("gpt2"), "gpt2")


# --- other spellings


def test_names_without_the_prefix_and_with_buffers(tmp_path, gpt2):
    """As in the files of openai-community/gpt2."""
    tensors = {name.removeprefix("transformer."): x for name, x in golden.tensors("gpt2").items()}
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 16, 16), np.float32))
        tensors[f"h.{layer}.attn.masked_bias"] = np.full((), -1e4, np.float32)
    assert_equal(load(tmp_path, "gpt2", tensors), gpt2)


def test_the_norms_of_old_bert_files(tmp_path):
    """As in the files of google-bert/bert-base-uncased."""
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    tensors = {}
    for name, x in golden.tensors("bert_masked").items():
        for new in old:
            name = name.replace(new, old[new])
        tensors[name] = x
    want = load_weights(golden.weights("bert_masked"), golden.make("bert_masked"), "bert")
    assert_equal(load(tmp_path, "bert_masked", tensors), want)


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    tensors = golden.tensors("gpt2")
    tensors["wte.weight"] = tensors["transformer.wte.weight"]
    with pytest.raises(UserError, match="not of the model: (transformer.)?wte.weight$"):
        load(tmp_path, "gpt2", tensors)


# --- dtypes, shards of a file, memory


def test_16_bit_files_are_read_exactly_and_written_again(tmp_path):
    tensors = {name: x.astype(jnp.bfloat16) for name, x in golden.tensors("llama").items()}
    model = load(tmp_path, "llama", tensors)
    assert model.embedding[...].dtype == jnp.float32
    np.testing.assert_array_equal(model.embedding[...], tensors["model.embed_tokens.weight"].astype(np.float32))
    save_weights(tmp_path / "again", model, "llama", dtype="bfloat16")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {name: x.tobytes() for name, x in again.items()} == {name: x.tobytes() for name, x in tensors.items()}


def test_several_files_with_an_index(tmp_path, gpt2):
    save_weights(tmp_path, gpt2, "gpt2", shard_bytes=20_000)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [*(f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)), "model.safetensors.index.json"]
    index = json.loads((tmp_path / files[-1]).read_text())
    tensors = golden.tensors("gpt2")
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    for file in files[:-1]:
        found = load_file(tmp_path / file)
        assert sum(x.nbytes for x in found.values()) <= 20_000
        assert all(index["weight_map"][name] == file for name in found)
    assert_equal(load_weights(tmp_path, golden.make("gpt2", seed=1), "gpt2"), gpt2)


def test_nothing_is_written_over(tmp_path, gpt2):
    save_weights(tmp_path, gpt2, "gpt2")
    save_weights(tmp_path / "other.safetensors", gpt2, "gpt2")
    for path in (tmp_path, tmp_path / "other.safetensors"):
        with pytest.raises(UserError, match=r"safetensors: exists already; accepted: a new name"):
            save_weights(path, gpt2, "gpt2", shard_bytes=1000)


@pytest.mark.parametrize("options, message", [(dict(dtype="int8"), "dtype='int8': must be one of float64, float32"),
    (dict(dtype="half a float"), "dtype='half a float': must be"), (dict(shard_bytes=0), "shard_bytes=0: must be a")],
)  # fmt: skip
def test_wrong_options_are_named(tmp_path, gpt2, options, message):
    with pytest.raises(UserError, match=message):
        save_weights(tmp_path, gpt2, "gpt2", **options)


def test_what_cannot_be_written_leaves_nothing(tmp_path, gpt2, monkeypatch):
    write, count = TensorWriter.write, iter(range(100))

    def fails(self, name, tensor):
        if next(count) == 5:
            raise OSError(28, "No space left on device")
        write(self, name, tensor)

    monkeypatch.setattr(TensorWriter, "write", fails)
    with pytest.raises(CheckpointError, match="were not written: OSError: .*No space left on device"):
        save_weights(tmp_path / "new", gpt2, "gpt2")
    assert not list((tmp_path / "new").iterdir())


def test_the_host_holds_the_tensors_of_one_layer(monkeypatch):
    alive, most, read = 0, 0, TensorFiles.read

    def counted(self, name):
        nonlocal alive, most
        tensor = read(self, name)
        alive += tensor.nbytes
        most = max(most, alive)

        def end(size=tensor.nbytes):
            nonlocal alive
            alive -= size

        weakref.finalize(tensor, end)
        return tensor

    monkeypatch.setattr(TensorFiles, "read", counted)
    load_weights(golden.weights("llama"), golden.make("llama"), "llama")
    tensors = golden.tensors("llama")
    largest = max(tensors["model.embed_tokens.weight"].nbytes, 2 * tensors["model.layers.0.mlp.up_proj.weight"].nbytes)
    assert most <= 2 * largest  # the last layer's arrays may end when the next one's are there
    assert most < sum(x.nbytes for x in tensors.values()) / 2


def test_models_may_be_of_any_depth(tmp_path):
    """Ten layers and more: their numbers sort otherwise as text."""
    sizes = dict(vocab_size=8, dim=4, layers=12, heads=2, max_length=4, rngs=nnx.Rngs(0))
    for make in (GPT, BERT):
        for scan in (True, False):
            model, kind = make(**sizes, scan=scan), "bert" if make is BERT else "gpt2"
            save_weights(tmp_path / f"{kind} {scan}", model, kind)
            assert_equal(load_weights(tmp_path / f"{kind} {scan}", make(**sizes, scan=scan), kind), model)
