"""Reading DeepSpeed's JSON: where it comes from, and every mistake in one line that names the file and the key."""

import base64
import json

import pytest

from zerojax.config.deepspeed import read
from zerojax.errors import UserError

VERBATIM = """{
  "train_batch_size": 8,
  "fp16": {"enabled": true},
  "zero_optimization": {"stage": 2},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}
}"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> str:
        (tmp_path / "ds.json").write_bytes(text.encode() if isinstance(text, str) else text)
        return "ds.json"

    return write


def complaint(config) -> str:
    with pytest.raises(UserError) as error:
        read(config)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_dict_a_path_and_base64_read_the_same(write, tmp_path):
    path = write(VERBATIM)
    text = base64.urlsafe_b64encode(VERBATIM.encode()).decode()
    values = {
        "train_batch_size": 8,
        "fp16.enabled": True,
        "zero_optimization.stage": 2,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": 0.0001,
    }
    for config in json.loads(VERBATIM), path, tmp_path / path, text, json.dumps(json.loads(VERBATIM)) and path:
        assert read(config).values == values
    assert read(path).source == "ds.json"


def test_a_byte_order_mark_and_sections_of_null_are_fine(write):
    assert read(write(b"\xef\xbb\xbf{}")).values == {}
    assert read({"fp16": None, "zero_optimization": {"offload_param": None}}).values == {}


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "ds.json:1: not JSON"),
        ('{\n"fp16": {"enabled": true},\n}', "ds.json:3: not JSON"),  # Python 3.13 blames line 2
        ("[]", "ds.json: the configuration is []; accepted: a JSON object"),
        (b'{"\xff": 1}', "ds.json: cannot read the configuration: byte 2 is not UTF-8 text"),
        ("[" * 100_000, "ds.json: not a configuration: its objects lie too deep"),
        ('{"train_batch_size": ' + "1" * 5000 + "}", "ds.json: not a configuration: Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_configuration(write, text, told):
    message = complaint(write(text))
    assert message.startswith(told) or message.startswith(told.replace(":3:", ":2:"))


@pytest.mark.parametrize("config", ["absent.json", "absent", "", ".", "abcd", "a\0b", "x" * 5000, VERBATIM])
def test_a_text_that_is_neither_a_file_nor_base64(write, config):
    assert "accepted: a dict, the path of a JSON file, or JSON in base64" in complaint(config)


@pytest.mark.parametrize("config", [None, 3, ["fp16"]])
def test_a_configuration_of_another_type(config):
    assert complaint(config).startswith("config is ")


def test_base64_of_bad_json():
    text = base64.urlsafe_b64encode(b'{"fp16": }').decode()
    assert complaint(text).startswith("base64 config: not JSON")


@pytest.mark.parametrize(
    "text, key",
    [
        ('{"train_batch_size": 8, "train_batch_size": 16}', "train_batch_size"),
        ('{"fp16": {"enabled": true, "enabled": true}}', "fp16.enabled"),
        ('{"optimizer": {"type": "Adam", "params": {"lr": 1, "lr": 2}}}', "optimizer.params.lr"),
        ('{"fp16": {}, "fp16": {"enabled": true}}', "fp16"),
        ('{"elasticity": {"micro_batch_sizes": [{"a": 1, "a": 2}]}}', "elasticity.micro_batch_sizes.a"),
    ],
)
def test_a_key_that_stands_twice(write, text, key):
    assert complaint(write(text)) == f"ds.json: {key} stands twice; accepted: one value for a key"


@pytest.mark.parametrize(
    "config, key, near",
    [
        ({"zero_optimzation": {}}, "zero_optimzation", "zero_optimization"),
        ({"train_batchsize": 1}, "train_batchsize", "train_batch_size"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge", "stage"),
        ({"zero_optimization": {"offload_param": {"devic": "cpu"}}}, "zero_optimization.offload_param.devic", "device"),
        ({"fp16": {"enable": True}}, "fp16.enable", "enabled"),
        ({"bfloat16": {"enable": True}}, "bfloat16.enable", "enabled"),
        ({"optimizer": {"typ": "Adam"}}, "optimizer.typ", "type"),
        (
            {"checkpoint": {"parallel_write": {"stage": True}}},
            "checkpoint.parallel_write.stage",
            "zero_optimization.stage",
        ),
        ({"tensorboard": {"enabled": False, "path": ""}}, "tensorboard.path", "output_path"),
        ({"stage": 3}, "stage", "zero_optimization.stage"),
        ({"a\nb": 3}, "a\\nb", "amp"),
        ({"autotuning": {"enabled": False, "fats": True}}, "autotuning.fats", "fast"),
    ],
)
def test_an_unknown_key_at_any_level(config, key, near):
    message = complaint(config)
    assert message.startswith(f"config: {key}: unknown key; ")
    assert near in message


@pytest.mark.parametrize(
    "config, key, accepted",
    [
        ({"train_batch_size": "8"}, "train_batch_size", "an integer or null or 'auto'"),
        ({"train_batch_size": True}, "train_batch_size", "an integer or null or 'auto'"),
        ({"train_batch_size": 8.5}, "train_batch_size", "an integer or null or 'auto'"),
        ({"gradient_clipping": 10**400}, "gradient_clipping", "a number of at least 0 or 'auto'"),
        ({"gradient_clipping": -1}, "gradient_clipping", "a number of at least 0 or 'auto'"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"zero_optimization": 2}, "zero_optimization", "an object"),
        ({"zero_optimization": True}, "zero_optimization", "an object"),
        ({"zero_optimization": {"overlap_comm": "auto"}}, "zero_optimization.overlap_comm", "true or false or null"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "zero_optimization.reduce_bucket_size", "an integer of at"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled", "true or false or 'auto'"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale", "a number of at least 0"),
        ({"fp16": {"loss_scale": float("inf")}}, "fp16.loss_scale", "a number of at least 0"),
        ({"fp16": {"loss_scale": float("nan")}}, "fp16.loss_scale", "a number of at least 0"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale", "a number of at least 0"),
        ({"fp16": {"loss_scale": "abc"}}, "fp16.loss_scale", "a number of at least 0"),
        ({"communication_data_type": "int8"}, "communication_data_type", "'fp32', 'fp16' or 'bf16' or null"),
        ({"checkpoint": {"tag_validation": "foo"}}, "checkpoint.tag_validation", "'WARN', 'IGNORE' or 'FAIL'"),
        ({"steps_per_print": 0}, "steps_per_print", "a positive integer or null"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, "optimizer.params.lr", "a number or 'auto'"),
        ({"optimizer": {"type": "Adam", "params": []}}, "optimizer.params", "an object"),
        ({"autotuning": {"fast": "yes"}}, "autotuning.fast", "true or false"),
    ],
)
def test_a_value_of_a_wrong_kind(config, key, accepted):
    message = complaint(config)
    assert message.startswith(f"config: {key} is ")
    assert f"accepted: {accepted}" in message


def test_auto_for_a_parameter_that_no_framework_fills_in():
    config = {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "freeze_step": "auto"}}}
    assert complaint(config) == (
        "config: optimizer.params.freeze_step is 'auto'; accepted: a value, or 'auto' for lr, betas, eps, weight_decay"
    )


def test_two_precisions_contradict():
    config = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert complaint(config) == "config: fp16.enabled and bf16.enabled are both true; accepted: one of them"
    config["bf16"]["enabled"] = False
    assert read(config).get("fp16.enabled") is True


@pytest.mark.parametrize(
    "config, old, new",
    [
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16", "bf16"),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16", "bf16"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.cpu_offload",
            "zero_optimization.offload_optimizer",
        ),
        (
            {"zero_optimization": {"cpu_offload_param": False, "offload_param": {}}},
            "zero_optimization.cpu_offload_param",
            "zero_optimization.offload_param",
        ),
        (
            {"zero_optimization": {"cpu_offload_use_pin_memory": True, "offload_param": {}}},
            "zero_optimization.cpu_offload_use_pin_memory",
            "zero_optimization.offload_param",
        ),
        (
            {
                "zero_optimization": {
                    "stage3_gather_fp16_weights_on_model_save": True,
                    "stage3_gather_16bit_weights_on_model_save": True,
                }
            },
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
    ],
)
def test_an_old_name_beside_the_new_one(config, old, new):
    assert complaint(config) == f"config: {old} and {new} are both given; accepted: {new} alone, the newer name"


def test_other_names_of_a_key():
    config = {"bfloat16": {"enabled": True}, "zero_optimization": {"param_persistence_threshold": 1e4}}
    values = {"bf16.enabled": True, "zero_optimization.stage3_param_persistence_threshold": 10_000}
    assert read(config).values == values


def test_what_lies_deep_is_read(write):
    assert read(write('{"optimizer": {"params": {"a": ' + "[" * 900 + "]" * 900 + "}}}")).under("optimizer.params")


def test_values_in_one_form():
    config = {
        "zero_optimization": {"reduce_bucket_size": 5e8},
        "communication_data_type": "FP16",
        "data_types": {"grad_accum_dtype": "torch.float32"},
        "checkpoint": {"tag_validation": "Fail"},
        "steps_per_print": float("inf"),
    }
    assert list(read(config).values.values()) == [500_000_000, "float16", "float32", "FAIL", None]
