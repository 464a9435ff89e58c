"""From DeepSpeed's configuration to zerojax's settings, beside what DeepSpeed makes of the same configuration."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax.config.deepspeed import resolve
from zerojax.config.deepspeed.keys import KEYS, Status
from zerojax.errors import UserError

BATCHES = json.loads((Path(__file__).parents[1] / "golden" / "batch_config.json").read_text())["rows"]
BATCH_NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Our words for the kinds of errors in the golden file.
KINDS = {
    "neither_given": "train_batch_size and train_micro_batch_size_per_gpu are not given",
    "mismatch": "train_batch_size is {}, which is not",
    "train_not_positive": "train_batch_size is {}; accepted: a positive integer",
    "micro_not_positive": "train_micro_batch_size_per_gpu is {}; accepted: a positive integer",
    "gas_not_positive": "gradient_accumulation_steps is {}; accepted: a positive integer",
    "other": " is 'auto'; pass ",
}
VERBATIM = {
    "train_batch_size": 8,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
}


def settings(world_size=1, /, **config):
    return resolve({"train_batch_size": 8, **config}, world_size=world_size)


def zero(**config):
    return {"zero_optimization": config}


def complaint(config, **arguments) -> str:
    with pytest.raises(UserError) as error:
        resolve(config, **{"world_size": 1, **arguments})
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("row", BATCHES, ids=lambda row: f"{row['world']}-{list(row['given'].values())}")
def test_batch_sizes_are_deepspeed_s(row):
    if "resolved" in row:
        config = resolve(row["given"], world_size=row["world"])
        sizes = config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps
        assert sizes == tuple(row["resolved"].values())
        assert all(type(size) is int for size in sizes)
        return
    message = complaint(row["given"], world_size=row["world"])
    before, _, after = KINDS[row["kind"]].partition("{}")
    assert before in message and after in message
    if row["kind"] != "other":
        assert f"{row['world']} device" in message and all(name in message for name in BATCH_NAMES)


@pytest.mark.parametrize("devices", [1, 8])
def test_the_first_configuration_one_writes(devices):
    config = resolve(VERBATIM, world_size=devices)
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == (8 // devices, 1)
    assert config.zero_arguments == {
        "stage": 2,
        "precision": zerojax.Precision(compute="float16", loss_scale=zerojax.LossScale()),
        "micro_batches": 1,
        "clip_norm": 1.0,
    }
    assert (config.optimizer.type, config.optimizer.params) == ("AdamW", {"lr": 0.0001})
    assert config.scheduler is None and config.notes == ()


def test_the_arguments_make_a_zero():
    config = resolve({**VERBATIM, "gradient_accumulation_steps": 1}, world_size=jax.device_count())
    training = zerojax.Zero(**config.zero_arguments)
    state = training.init(lambda rng: {"w": jax.random.normal(rng, (64, 32))}, optax.adamw(1e-3))
    step = training.train_step(lambda model, batch, rng: jnp.mean((batch @ model["w"]) ** 2))
    assert int(step(state, jnp.ones((8, 64)))[1]["step"]) == 1


@pytest.mark.parametrize("offloads", [True, False])
def test_checkpoints_in_the_host_s_memory(offloads):
    config = settings(activation_checkpointing={"cpu_checkpointing": offloads, "partition_activations": True})
    assert config.zero_arguments.get("remat") == ("offload" if offloads else None)
    assert [note.partition(" ")[0] for note in config.notes] == ["activation_checkpointing.partition_activations"]


@pytest.mark.parametrize(
    "given, clip_norm", [({}, 1.0), ({"gradient_clipping": 0.5}, 0.5), ({"gradient_clipping": 0.0}, None)]
)
def test_gradient_clipping_is_1_unless_it_is_given(given, clip_norm):
    assert settings(**given).zero_arguments["clip_norm"] == clip_norm


# What DeepSpeedConfig 0.19.8 makes of an fp16 section: the static scale, or the dynamic one's first value, window,
# delayed shift, consecutive hysteresis and minimum.
@pytest.mark.parametrize(
    "section, static, initial, window, hysteresis, consecutive, minimum",
    [
        ({}, None, 65536, 1000, 2, False, 1),
        ({"loss_scale": 128}, 128.0, 128, 1000, 2, False, 1),
        ({"loss_scale_window": 10}, None, 65536, 10, 2, False, 1),
        ({"initial_scale_power": 8, "hysteresis": 1}, None, 256, 1000, 1, False, 1),
        ({"consecutive_hysteresis": True, "min_loss_scale": 2}, None, 65536, 1000, 2, True, 2),
    ],
)
def test_fp16_has_deepspeed_s_loss_scale(section, static, initial, window, hysteresis, consecutive, minimum):
    precision = settings(fp16={"enabled": True, **section}).precision
    scale = precision.loss_scale
    assert precision.compute == jnp.float16 and precision.master == jnp.float32
    assert (scale.static, scale.initial, scale.window, scale.hysteresis) == (static, initial, window, hysteresis)
    assert (scale.consecutive_hysteresis, scale.minimum) == (consecutive, minimum)


def test_the_range_of_a_dynamic_scale_counts_only_where_there_is_one():
    bad = {"loss_scale_window": 0, "min_loss_scale": 0}
    assert settings(fp16={"enabled": False, **bad}).precision == zerojax.Precision()
    assert settings(fp16={"enabled": True, "loss_scale": 8, **bad}).precision.loss_scale.static == 8
    message = complaint({"train_batch_size": 1, "fp16": {"enabled": True, **bad}})
    assert message == "config: fp16.loss_scale_window is 0; accepted: a positive integer"


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, {}),
        ({"bf16": {"enabled": True}}, {"compute": "bfloat16", "skip_nonfinite": True}),
        ({"bfloat16": {"enabled": True, "check_grad_overflow": False}}, {"compute": "bfloat16"}),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            {"compute": "bfloat16", "skip_nonfinite": True, "master": "bfloat16", "accumulate": "bfloat16"},
        ),
        ({"communication_data_type": "bf16"}, {"reduce": "bfloat16"}),
        ({"data_types": {"grad_accum_dtype": "bf16", "param_dtype": "fp32"}}, {"accumulate": "bfloat16"}),
    ],
)
def test_precision(config, expected):
    assert settings(**config).precision == zerojax.Precision(**expected)


def test_a_parameter_dtype_beside_another_precision():
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}
    assert complaint(config) == (
        "config: data_types.param_dtype is 'float16' beside bf16; accepted: 'bfloat16' or null"
    )


def test_small_parameters_stay_whole_at_stage_3_as_far_as_it_is_given():
    threshold = {"stage3_param_persistence_threshold": 5e4}
    assert settings(**zero(stage=3, **threshold)).zero_arguments["min_shard_size"] == 50_000
    assert "min_shard_size" not in settings(**zero(stage=3)).zero_arguments
    below = settings(**zero(stage=2, **threshold))
    assert "min_shard_size" not in below.zero_arguments
    assert below.notes == ("zero_optimization.stage3_param_persistence_threshold = 50000: read at stage 3 alone",)


@pytest.mark.parametrize(
    ("keys", "offload"),
    [
        ({"offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5}}, ("optimizer",)),
        ({"offload_param": {"device": "cpu"}}, ("params",)),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "CPU"}}, ("optimizer", "params")),
        ({"cpu_offload": True, "cpu_offload_param": True}, ("optimizer", "params")),
        ({"offload_optimizer": {"device": "none"}, "cpu_offload_param": False}, ()),
        ({"offload_optimizer": {"device": "auto"}, "offload_param": {"device": None}}, ()),
    ],
)
def test_offload(keys, offload):
    config = settings(**zero(stage=3, **keys))
    assert config.offload == config.zero_arguments.get("offload", ()) == offload


def test_offload_to_files():
    nvme = {"device": "nvme", "nvme_path": "/nvme/run", "buffer_count": 5, "pipeline_read": True}
    config = settings(**zero(stage=2, offload_optimizer=nvme))
    assert config.zero_arguments["offload"] == ("optimizer",)
    assert config.offload_path == config.zero_arguments["offload_path"] == "/nvme/run"
    assert [note.partition(":")[0] for note in config.notes] == [
        "zero_optimization.offload_optimizer.buffer_count = 5",
        "zero_optimization.offload_optimizer.pipeline_read = True",
    ]
    assert "offload_path" not in settings(**zero(stage=0, offload_optimizer=nvme)).zero_arguments
    assert "offload_path" not in settings(**zero(stage=2, offload_optimizer=nvme | {"device": "cpu"})).zero_arguments


def test_offload_to_files_needs_a_path():
    message = complaint({"train_batch_size": 8, **zero(stage=1, offload_optimizer={"device": "nvme"})})
    assert message == (
        "config: zero_optimization.offload_optimizer.nvme_path is None beside the device 'nvme'; accepted: a directory"
    )


def test_offload_where_deepspeed_reads_it():
    keys = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert settings(**zero(stage=1, **keys)).offload == ("optimizer",)
    assert settings(**zero(stage=0, **keys)).notes == (
        "zero_optimization.offload_optimizer.device = 'cpu': read at stages 1 to 3 alone",
        "zero_optimization.offload_param.device = 'cpu': read at stage 3 alone",
    )
    old = settings(**zero(stage=2, cpu_offload_param=True))
    assert old.offload == () and old.notes == ("zero_optimization.cpu_offload_param = True: read at stage 3 alone",)


def test_mics_partitions_within_groups_of_neighbouring_devices():
    config = settings(8, **zero(stage=3, mics_shard_size=4))
    mesh = config.zero_arguments["mesh"]
    assert dict(mesh.shape) == {"replica": 2, "data": 4}
    assert [device.id for device in mesh.devices[0]] == [0, 1, 2, 3]
    far = resolve({"train_batch_size": 64, **zero(stage=3, mics_shard_size=8)}, world_size=64)  # no such devices here
    assert far.mesh_axes == {"replica": 8, "data": 8}
    message = complaint({"train_batch_size": 8, **zero(mics_shard_size=3)}, world_size=8)
    assert message == (
        "config: zero_optimization.mics_shard_size is 3; accepted: a divisor of the 8 devices, or -1 for all of them"
    )


def test_logs_printing_and_data():
    config = settings(
        tensorboard={"enabled": True, "output_path": "logs", "job_name": "a"},
        csv_monitor={"enabled": True},
        steps_per_print=10,
        wall_clock_breakdown=True,
        dataloader_drop_last=True,
        checkpoint={"tag_validation": "Ignore"},
    )
    assert (config.tensorboard.enabled, config.tensorboard.output_path, config.tensorboard.job_name) == (
        True,
        "logs",
        "a",
    )
    assert config.csv_monitor.enabled and config.csv_monitor.job_name == "DeepSpeedJobName"
    assert (config.steps_per_print, config.wall_clock_breakdown) == (10, True)
    assert (config.dataloader_drop_last, config.tag_validation) == (True, "IGNORE")
    plain = settings()
    assert not (plain.tensorboard.enabled or plain.csv_monitor.enabled or plain.wall_clock_breakdown)
    assert (plain.steps_per_print, plain.tag_validation) == (None, "WARN")


@pytest.mark.parametrize(
    "config, key, instead",
    [
        (
            zero(offload_param={"device": "nvme", "nvme_path": "/x"}),
            "zero_optimization.offload_param.device",
            "'none' or 'cpu' here, and 'nvme' as offload_optimizer.device",
        ),
        (zero(zero_quantized_gradients=True), "zero_optimization.zero_quantized_gradients", "bf16"),
        (zero(zero_hpz_partition_size=8), "zero_optimization.zero_hpz_partition_size", "mics_shard_size"),
        (zero(zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow", "leave it out"),
        ({"sparse_gradients": True}, "sparse_gradients", "dense"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages", "stage 3"),
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size", "make_mesh"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "mean"),
        ({"wandb": {"enabled": True, "project": "p"}}, "wandb.enabled", "tensorboard"),
        ({"amp": {"enabled": True, "opt_level": "O2", "verbosity": 0}}, "amp.enabled", "bf16"),
        ({"elasticity": {"enabled": True, "min_gpus": 2}}, "elasticity.enabled", "any number of devices"),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, "compression_training", "model"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention", "attention is the model's"),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast", "cast them in the model"),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm",
            "gradient_clipping",
        ),
    ],
)
def test_what_zerojax_does_not_do_is_refused_and_says_what_to_do(config, key, instead):
    message = complaint({"train_batch_size": 8, **config})
    assert message.startswith(f"config: {key}") and "not supported: " in message
    assert instead in message and "`" not in message and "and so are" not in message


def test_all_that_is_refused_is_told_at_once():
    config = {
        "train_batch_size": 8,
        "sparse_gradients": True,
        "wandb": {"enabled": True},
        "autotuning": {"enabled": True},
    }
    assert complaint(config).endswith("accepted: False (and so are wandb.enabled, autotuning.enabled)")


def test_values_that_ask_for_nothing_are_fine():
    config = settings(
        **zero(
            offload_optimizer={"device": "none", "pin_memory": True},
            offload_param={"device": None},
            zero_hpz_partition_size=1,
            zero_quantized_weights=False,
        ),
        sparse_gradients=False,
        pipeline={"stages": "auto"},
        gradient_allreduce_op="mean",
        tensor_parallel={"autotp_size": 1},
        sequence_parallel_size=1,
        sparse_attention={},
    )
    assert config.stage == 0
    assert settings(**zero(cpu_offload=False)).notes == ()


def test_what_is_off_asks_for_nothing():
    config = settings(
        fp16={"enabled": False, "auto_cast": True, "loss_scale": 128},
        wandb={"enabled": False, "project": "p"},
        elasticity={"enabled": False, "min_gpus": 4},
        amp={"opt_level": "O1"},
        flops_profiler={"enabled": False, "detailed": True},
        weight_quantization={"enabled": False, "num_bits": 4},
    )
    assert config.precision == zerojax.Precision() and config.notes == ()


def test_keys_that_need_nothing_are_explained():
    config = settings(**zero(stage=2, overlap_comm=True, reduce_bucket_size="auto"), prescale_gradients=True)
    assert config.notes == (
        "zero_optimization.overlap_comm = True: XLA schedules the collectives of the compiled step",
        "zero_optimization.reduce_bucket_size = 'auto': XLA schedules the collectives of the compiled step",
        "prescale_gradients = True: the mean is the same; communication_data_type says in what it is summed",
    )


AUTO = {
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "auto"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}
SOURCES = {
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-4,
    "warmup_steps": 100,
    "total_steps": 1000,
}


def test_auto_takes_what_is_given():
    config = resolve(
        AUTO,
        world_size=8,
        gradient_clipping=0.3,
        precision="bf16",
        betas=(0.9, 0.95),
        eps=1e-6,
        weight_decay=0.1,
        warmup_min_lr=1e-6,
        hidden_size=512,
        **SOURCES,
    )
    assert (config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps) == (64, 4, 2)
    assert config.gradient_clipping == 0.3 and config.precision.compute == jnp.bfloat16
    assert config.min_shard_size == 5120  # 10 x hidden size, as Hugging Face's integration sets it
    assert config.optimizer.params == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    schedule = {"warmup_min_lr": 1e-6, "warmup_max_lr": 3e-4, "warmup_num_steps": 100, "total_num_steps": 1000}
    assert config.scheduler.params == schedule


def test_auto_without_a_value_is_the_default():
    config = resolve(AUTO, world_size=8, **SOURCES)
    assert config.gradient_clipping == 1.0 and config.precision == zerojax.Precision() and config.min_shard_size is None
    assert config.optimizer.params == {"lr": 3e-4}
    assert config.scheduler.params == {"warmup_max_lr": 3e-4, "warmup_num_steps": 100, "total_num_steps": 1000}


@pytest.mark.parametrize(
    "missing, key",
    [
        ("micro_batch_size", "train_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("learning_rate", "optimizer.params.lr"),
        ("warmup_steps", "scheduler.params.warmup_num_steps"),
        ("total_steps", "scheduler.params.total_num_steps"),
    ],
)
def test_auto_that_nothing_replaces_says_what_to_pass(missing, key):
    message = complaint(AUTO, world_size=8, **{name: value for name, value in SOURCES.items() if name != missing})
    assert message.startswith(f"config: {key} is 'auto'; pass ")
    assert missing == "micro_batch_size" or f"pass {missing}=, " in message


def test_auto_batch_sizes_follow_from_the_other_two():
    config = resolve(
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"},
        world_size=8,
    )
    assert config.gradient_accumulation_steps == 2
    config = resolve({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, world_size=8)
    assert config.train_batch_size == 32


def test_auto_precisions_that_contradict():
    config = {"train_batch_size": 1, "fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}
    assert resolve(config, world_size=1).precision.compute == jnp.bfloat16
    assert "both true" in complaint(config, precision="fp16")


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"world_size": 0}, "world_size is 0; accepted: a positive integer"),
        ({"world_size": True}, "world_size is True; accepted: a positive integer"),
        ({"precision": "int8"}, "precision is 'int8'; accepted: 'fp32', 'fp16', 'bf16'"),
        (
            {"gradient_clipping": "much"},
            "config: gradient_clipping is 'auto', for which 'much' is given; accepted: a number of at least 0",
        ),
    ],
)
def test_arguments_that_are_wrong(arguments, told):
    assert complaint({"train_batch_size": 1, "gradient_clipping": "auto"}, **arguments) == told


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_section_without_its_type(section):
    message = complaint({"train_batch_size": 1, section: {"params": {"lr": 0.1}}})
    assert message == f"config: {section}.type is not given beside {section}.params.lr; accepted: a name"


# A value other than the default for each key that is honoured, so that none is read and then forgotten.
OTHERS = {
    "activation_checkpointing.cpu_checkpointing": True,
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "dataloader_drop_last": True,
    "zero_optimization.stage": 1,
    "zero_optimization.mics_shard_size": 2,
    "zero_optimization.stage3_param_persistence_threshold": 7,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.nvme_path": "/nvme",
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.cpu_offload": True,
    "zero_optimization.cpu_offload_param": True,
    "fp16.enabled": True,
    "fp16.loss_scale": 8,
    "fp16.initial_scale_power": 8,
    "fp16.loss_scale_window": 8,
    "fp16.hysteresis": 8,
    "fp16.consecutive_hysteresis": True,
    "fp16.min_loss_scale": 8,
    "bf16.enabled": True,
    "bf16.check_grad_overflow": False,
    "bf16.bf16_master_weights_and_grads": True,
    "data_types.grad_accum_dtype": "bf16",
    "data_types.param_dtype": "fp16",
    "optimizer.type": "Lion",
    "optimizer.params.lr": 0.5,
    "optimizer.params.betas": [0.5, 0.5],
    "optimizer.params.eps": 0.5,
    "optimizer.params.weight_decay": 0.5,
    "scheduler.type": "WarmupLR",
    "scheduler.params.warmup_min_lr": 0.5,
    "scheduler.params.warmup_max_lr": 0.5,
    "scheduler.params.warmup_num_steps": 5,
    "scheduler.params.total_num_steps": 500,
    "gradient_clipping": 0.5,
    "communication_data_type": "bf16",
    "steps_per_print": 5,
    "wall_clock_breakdown": True,
    "tensorboard.enabled": True,
    "tensorboard.output_path": "x",
    "tensorboard.job_name": "x",
    "csv_monitor.enabled": True,
    "csv_monitor.output_path": "x",
    "csv_monitor.job_name": "x",
    "checkpoint.tag_validation": "FAIL",
}
HONOURED = [key.path for key in KEYS if key.status is Status.HONOURED and not key.section and key.old_name_of is None]


@pytest.mark.parametrize("path", HONOURED)
def test_a_key_that_is_honoured_changes_something(path):
    def outcome(values):
        config = {}
        for place, value in values.items():
            *sections, name = place.split(".")
            inside = config
            for section in sections:
                inside = inside.setdefault(section, {})
            inside[name] = value
        try:
            return resolve(config, world_size=4)
        except UserError as error:
            return str(error)

    base = {"train_batch_size": 32, "zero_optimization.stage": 3, "optimizer.type": "Adam"}
    base |= {"scheduler.type": "WarmupDecayLR", "scheduler.params.total_num_steps": 100, "optimizer.params.lr": 0.1}
    if path.split(".")[0] in ("fp16", "bf16"):
        base[f"{path.split('.')[0]}.enabled"] = not path.endswith("enabled")
    if path.endswith("nvme_path"):
        base["zero_optimization.offload_optimizer.device"] = "nvme"
    assert outcome({**base, path: OTHERS[path]}) != outcome(base)
