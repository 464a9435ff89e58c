"""The command from end to end: runs that are killed, moved to other devices, damaged, or wrong from the start."""

import os
import shutil
import signal

import jax
import numpy as np
import pytest

import zerojax
from tests import runs
from zerojax import Zero, cli
from zerojax.checkpoint.names import named_leaves
from zerojax.config import gin

ZERO = Zero(stage=3, min_shard_size=64)

# The command in a process that is killed, as if from outside, when it has told of the step given.
KILLED = """
import os, signal, sys
from zerojax import cli
from zerojax.monitor import RunLogs
write = RunLogs.write
def write_and_die(self, table, step, values):
    write(self, table, step, values)
    if step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
RunLogs.write = write_and_die
cli.main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return runs.write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert runs.run(config, directory) == 0
    return directory


@pytest.mark.slow
def test_killed_and_started_again_equals_uninterrupted_bit_for_bit(config, uninterrupted, tmp_path):
    killed = runs.start(["-c", KILLED, "19", *runs.arguments(config, tmp_path)], devices=8)
    assert runs.finish([killed])[0][0] == -signal.SIGKILL
    assert runs.table(tmp_path / "train.csv")["step"] == list(range(1, 20))
    code, output, errors = runs.run_alone(config, tmp_path, devices=8)
    assert code == 0, errors
    assert "going on from step 16" in output or "going on from step 8" in output
    for name in ("train.csv", "validation.csv"):
        assert runs.table(tmp_path / name) == runs.table(uninterrupted / name)
    (state, extra), (wanted, wanted_extra) = (runs.last_state(path, ZERO) for path in (tmp_path, uninterrupted))
    assert int(wanted.step) == 24
    assert extra == wanted_extra
    runs.assert_same_arrays(state, wanted)


def without_padding(state):
    """The leaves by name without their padding, on the host, and the largest number in any padding."""
    logical, leaves, beyond = named_leaves(state.layout.logical), {}, 0.0
    for name, leaf in named_leaves(state).items():
        inside = tuple(slice(size) for size in logical[name].shape)
        rest = np.array(leaf)
        leaves[name] = rest[inside].copy()
        rest[inside] = 0
        beyond = max(beyond, np.abs(rest).max())
    return leaves, beyond


@pytest.mark.parametrize(("stage", "devices"), [(1, 4), (0, 1), (2, 3)])
def test_saved_on_8_devices_restored_on_fewer_at_another_stage(uninterrupted, tmp_path, stage, devices):
    state, _ = runs.last_state(uninterrupted, ZERO)
    path = uninterrupted / "checkpoints" / "step_00000024"
    mesh = zerojax.make_mesh(devices=jax.devices()[:devices])
    zero = Zero(stage=stage, mesh=mesh, min_shard_size=64)
    restored = zerojax.restore(path, zero, runs.make_model, runs.OPTIMIZER)
    (leaves, _), (found, beyond) = without_padding(state), without_padding(restored)
    padded = {name for name, leaf in named_leaves(state).items() if leaf.shape != leaves[name].shape}
    assert {name.split("/")[0] for name in padded} == {"params", "opt_state"}
    assert found.keys() == leaves.keys()
    for name in leaves:
        np.testing.assert_array_equal(found[name], leaves[name], err_msg=name)
    assert beyond == 0
    zerojax.save(tmp_path / "again", restored)
    back = zerojax.restore(tmp_path / "again", ZERO, runs.make_model, runs.OPTIMIZER)
    runs.assert_same_arrays(back, state)


@pytest.mark.slow
def test_a_run_goes_on_at_other_stages_and_from_a_damaged_checkpoint(config, uninterrupted, tmp_path):
    """Without dropout from here on: its masks depend on the number of devices."""
    moved, stayed = tmp_path / "moved", tmp_path / "stayed"
    for directory in (moved, stayed):
        shutil.copytree(uninterrupted, directory)
        shutil.rmtree(directory / "checkpoints/step_00000024")
    damaged = max((moved / "checkpoints/step_00000016").rglob("d/*"), key=lambda path: path.stat().st_size)
    os.truncate(damaged, 100)
    shutil.rmtree(stayed / "checkpoints/step_00000016")

    assert runs.run(config, stayed, "GPT.dropout=0.0") == 0
    code, output, errors = runs.run_alone(
        config, moved, "GPT.dropout=0.0", "Zero.stage=1", "train.steps=15", "train.validate_every=15", devices=4
    )
    assert code == 0, errors
    assert "step_00000016: file d/" in errors and "going back to the checkpoint before it" in errors
    assert "stage 1 on data 4, 15 steps, going on from step 8" in output
    code, output, errors = runs.run_alone(config, moved, "GPT.dropout=0.0", "Zero.stage=0", devices=1)
    assert (code, errors) == (0, "")
    assert "stage 0 on data 1, 24 steps, going on from step 15" in output

    got, wanted = (runs.table(directory / "train.csv") for directory in (moved, stayed))
    assert got["step"] == wanted["step"]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5)


def test_the_configuration_beside_the_logs_is_that_of_the_run(uninterrupted):
    written = (uninterrupted / "config.gin").read_text()
    again = gin.load(uninterrupted / "config.gin").resolved(cli.TRAIN, given=("config_text",))
    assert sorted(again.splitlines()[1:]) == sorted(written.splitlines()[1:])
    assert "zerojax.models.gpt.GPT.dropout = 0.1" in written.splitlines()


MESH = "Zero.mesh=@make_mesh()"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("Zeor.stage=1",), "--set Zeor.stage=1: unknown name 'Zeor'; nearest accepted: Zero"),
        (("Zero.stge=1",), "--set Zero.stge=1: Zero has no parameter 'stge'; nearest accepted: stage"),
        (("Zero.stage=4",), "--set Zero.stage=4: stage is 4; accepted: 0, 1, 2 or 3"),
        (("Zero.stage='3'",), "--set Zero.stage='3': Zero.stage = '3': expected int"),
        (
            ("train.optimizer=@optax.sgd",),
            "--set train.optimizer=@optax.sgd: train.optimizer = @optax.sgd: expected GradientTransf",
        ),
        ((MESH, "make_mesh.data=3"), "--set make_mesh.data=3: mesh replica 1 x data 3 does not make 8 devices"),
        ((MESH, "make_mesh.tensor=16"), "--set make_mesh.tensor=16: mesh replica 1 x data * x tensor 16 does not"),
        (("Zero.mesh='model'",), "--set Zero.mesh='model': Zero.mesh = 'model': expected Mesh or None"),
        (("train.batch_size=12",), "--set train.batch_size=12: batch_size is 12; accepted: a multiple of 8"),
        (("Zero.micro_batches=3",), "CONFIG:5: batch_size is 16; accepted: a multiple of 24"),
        (("text_dataset.source='nowhere'",), "--set text_dataset.source='nowhere': source='nowhere' matches no file"),
        (("GPT.vocab_size=100",), "the model's vocab_size is 100; accepted: 256 or more, as tokenizer 'bytes' has"),
        (("GPT.dim=24",), "checkpoint RUN/checkpoints/step_00000024 is of another model or optimizer: opt_state/"),
        (("train.batch_size=32",), "--set train.batch_size=32: the saved data position belongs to other data: "),
    ],
)
def test_wrong_input_is_one_line_and_changes_nothing(config, uninterrupted, capsys, settings, message):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")}
    assert runs.run(config, uninterrupted, *settings) == 2
    printed = capsys.readouterr()
    wanted = message.replace("CONFIG", str(config)).replace("RUN", str(uninterrupted))
    assert printed.err.startswith(f"zerojax: error: {wanted}")
    assert printed.err.count("\n") == 1 and printed.out == ""
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")} == before


def test_a_file_for_a_run_directory(config, capsys):
    assert runs.run(config, config) == 2
    assert capsys.readouterr().err == (
        f"zerojax: error: --run-dir {config}: run_dir is '{config}': File exists; "
        "accepted: a directory, or a path for one\n"
    )


@pytest.mark.slow
def test_overflows_at_the_smallest_loss_scale_are_a_failed_run(tmp_path, capsys):
    scaled = """
Zero.precision = @Precision()
Precision.compute = "float16"
Precision.loss_scale = @LossScale()
LossScale.initial_power = 101
LossScale.minimum = 1e30  # which no gradient in float16 survives
LossScale.hysteresis = 1
"""
    assert runs.run(runs.write_config(tmp_path, scaled), tmp_path / "run") == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line]
    print(errors)
    assert [line for line in errors if line.startswith("zerojax: error: ")] == errors
    (line,) = errors
    assert "step 3 overflowed at the smallest loss scale, 1e+30: gradients are not finite; lower" in line
    assert runs.table(tmp_path / "run" / "train.csv")["skipped"] == [1, 2, 3]


def test_every_checkpoint_damaged_is_a_failed_run(config, uninterrupted, tmp_path, capsys, caplog):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    for manifest in tmp_path.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    assert runs.run(config, tmp_path) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"zerojax: error: no good checkpoint in {tmp_path}/checkpoints: ")
    assert printed.err.count("\n") == 1 and printed.out == ""
