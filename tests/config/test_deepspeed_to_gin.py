"""DeepSpeed's configuration as gin: what the text binds is what the configuration asks for."""

import gin
import jax
import numpy as np
import pytest

import zerojax
from zerojax.config.deepspeed import make_optimizer, resolve
from zerojax.config.deepspeed.to_gin import to_gin
from zerojax.config.gin import configured, load
from zerojax.errors import UserError

CONFIG = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5},
    "communication_data_type": "fp32",
    "zero_optimization": {
        "stage": 3,
        "mics_shard_size": 4,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 10,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.95], "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}},
    "tensorboard": {"enabled": True},
    "activation_checkpointing": {"cpu_checkpointing": True},
}


@pytest.fixture(autouse=True)
def forget_bindings():
    yield
    gin.clear_config()


@pytest.fixture
def loaded(tmp_path):
    def loaded(config, world_size=8):
        path = tmp_path / "converted.gin"
        path.write_text(to_gin(config, world_size=world_size))
        return load(path)

    return loaded


def test_the_settings_are_those_of_the_configuration(loaded):
    loaded(CONFIG)
    zero, resolved = configured("zerojax.Zero")(), resolve(CONFIG, world_size=8)
    assert zero == zerojax.Zero(**resolved.zero_arguments)
    assert zero.policy.loss_scale == zerojax.LossScale(initial_power=8, window=5)
    assert dict(zero.mesh.shape) == {"replica": 2, "data": 4}


@pytest.mark.parametrize(
    "optimizer, scheduler",
    [
        (CONFIG["optimizer"], CONFIG["scheduler"]),
        (CONFIG["optimizer"], None),
        ({"type": "Lamb", "params": {"lr": 0.1}}, None),
        ({"type": "Muon", "params": {"lr": 0.1, "adam_lr": 0.01}}, CONFIG["scheduler"]),
        (
            {"type": "Adam", "params": {"lr": 0.1}},
            {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 2}},
        ),
    ],
)
def test_the_optimizer_is_that_of_the_configuration(loaded, optimizer, scheduler):
    config = {"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler}
    binding = loaded(config).bindings["", "zerojax.trainer.train", "optimizer"]
    resolved = resolve(config, world_size=8)
    ours = configured(binding.value.selector)()
    theirs = make_optimizer("", resolved.optimizer, resolved.scheduler)
    params = {"kernel": jax.random.normal(jax.random.key(0), (4, 3))}
    states = [ours.init(params), theirs.init(params)]
    for seed in range(4):
        gradients = {"kernel": jax.random.normal(jax.random.key(seed), (4, 3))}
        first, states[0] = ours.update(gradients, states[0], params)
        second, states[1] = theirs.update(gradients, states[1], params)
        np.testing.assert_array_equal(first["kernel"], second["kernel"])


@pytest.mark.parametrize(
    "precision, written",
    [
        ({}, "Zero.precision = 'fp32'"),
        ({"fp16": {"enabled": True}}, "Zero.precision = 'fp16'"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "Zero.precision = 'bf16'"),
        ({"bf16": {"enabled": True}}, "Precision.skip_nonfinite = True"),
    ],
)
def test_a_precision_goes_by_its_name_where_it_has_one(loaded, precision, written):
    config = {"train_batch_size": 8, **precision}
    lines = to_gin(config, world_size=8).splitlines()
    assert written in lines
    loaded(config)
    assert configured("zerojax.Zero")().policy == resolve(config, world_size=8).precision


def test_the_whole_text():
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "csv_monitor": {"enabled": True},
    }
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "scheduler": {"type": "WarmupLR"}}
    assert to_gin(config, world_size=2) == (
        """\
# From 'config'. The batch of 8 is 4 (micro-batch) x 1 (accumulation) x 2 (devices).
# Include it in a file that binds the rest of train: its model, loss_fn, dataset, steps and run_dir.

train.batch_size = 8
train.zero = @Zero()
train.optimizer = @zerojax.optim.adamw()

Zero.stage = 2
Zero.precision = 'fp32'
Zero.micro_batches = 1
Zero.clip_norm = 1.0

zerojax.optim.adamw.learning_rate = @zerojax.optim.warmup_lr()

zerojax.optim.warmup_lr.optimizer_lr = 0.0001

# tensorboard, csv_monitor: train writes CSV, and TensorBoard events if it is installed, to its run_dir.
# zero_optimization.overlap_comm = True: XLA schedules the collectives of the compiled step
"""
    )


def test_a_scheduler_without_an_optimizer_is_bound_for_one(loaded):
    config = {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
    assert "learning rate of the optimizer that train.optimizer names is to be @zerojax.optim.warmup_lr()" in to_gin(
        config, world_size=8
    )
    loaded(config)
    assert float(configured("zerojax.optim.warmup_lr")()(2000)) == np.float32(0.1)


def test_what_is_refused_is_not_converted():
    with pytest.raises(UserError, match="sparse_gradients is True, which is not supported"):
        to_gin({"train_batch_size": 8, "sparse_gradients": True}, world_size=8)


def test_more_devices_than_there_are():
    assert "make_mesh.replica = 512" in to_gin({**CONFIG, "train_batch_size": 4096}, world_size=2048).splitlines()


def test_state_in_files(loaded):
    offload = {"device": "nvme", "nvme_path": "/nvme/run"}
    loaded({"train_batch_size": 8, "zero_optimization": {"stage": 1, "offload_optimizer": offload}})
    zero = configured("zerojax.Zero")()
    assert (zero.offload, zero.offload_path) == (("optimizer",), "/nvme/run")
