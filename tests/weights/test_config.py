"""What of a config.json is taken, and what is refused."""

import json

import pytest

from tests.weights import golden
from zerojax.errors import UserError
from zerojax.weights import from_config


def changed(tmp_path, name, **changes):
    config = json.loads((golden.GOLDEN / f"weights_{name}.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return from_config(tmp_path)


def test_llama_with_grouped_queries():
    kind, arguments = from_config(golden.GOLDEN / "weights_llama.json")
    assert kind == "llama"
    assert arguments == dict(
        vocab_size=48, dim=24, layers=2, heads=6, kv_heads=2, max_length=16, mlp_dim=40, norm="rmsnorm",
        norm_epsilon=1e-6, mlp="swiglu", positions="rope", rope_theta=10_000.0, bias=False, tied=False,
    )  # fmt: skip


def test_llama_of_older_files(tmp_path):
    older = dict(rope_parameters="absent", head_dim="absent", rope_scaling=None, rope_theta=500_000.0)
    assert changed(tmp_path, "llama", **older).arguments["rope_theta"] == 500_000.0


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("llama", dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "rope_type is 'llama3'; accepted: 'defa"),
        ("llama", dict(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"}), "rope_type is 'yarn'; accepted"),
        ("llama", dict(head_dim=8), "head_dim is 8; accepted: hidden_size / num_attention_heads = 4"),
        ("llama", dict(attention_bias=True), "attention_bias is True; accepted: False"),
        ("gpt2", dict(activation_function="relu"), "activation_function is 'relu'; accepted: 'gelu_new', 'gelu_pyt"),
        ("gpt2", dict(n_layer="absent"), "n_layer is missing; accepted: a gpt2 config with it"),
        ("bert_masked", dict(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
        ("gpt2", dict(model_type="t5"), "model_type is 't5'; accepted: 'bert', 'gpt2', 'llama'"),
    ],
)
def test_what_our_models_do_not_compute_is_refused(tmp_path, name, changes, message):
    with pytest.raises(UserError, match=message):
        changed(tmp_path, name, **changes)


def test_a_file_that_is_absent_or_no_config_is_named(tmp_path):
    with pytest.raises(UserError, match=f"config {tmp_path}/config.json: No such file or directory; accepted"):
        from_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json: not JSON"):
        from_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="model_type is None"):
        from_config(tmp_path)
