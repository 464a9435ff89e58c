"""Runs of a model that compiles at once: what they tell and leave, and how they end."""

import functools
import logging
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import runs
from tests.monitor.test_files import largest_file
from zerojax import LossScale, Precision, UserError, Weighted, Zero, trainer
from zerojax.checkpoint import CheckpointError, Checkpoints
from zerojax.data import text_dataset
from zerojax.errors import RunError
from zerojax.monitor.progress import Progress
from zerojax.trainer import train
from zerojax.zero.loss_scale import initial_state

VOCAB, LENGTH, STEPS, DROPOUT = 256, 16, 12, 0.2


class Bigram(nnx.Module):
    """Logits of the next byte from the last one, a table of which 8 devices cannot hold equal parts."""

    def __init__(self, rngs: nnx.Rngs, width: int = 30):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, width)))
        self.out = nnx.Param(jax.random.normal(rngs.params(), (width, VOCAB)) * 0.1)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table[...][tokens] @ self.out[...]


def loss_fn(model, batch, rng, dropout=DROPOUT):
    """Cross-entropy over a random part of the targets, so that a run depends on its keys."""
    tokens = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    weights = batch.get("weights", jnp.ones_like(losses))
    kept = weights * jax.random.bernoulli(rng, 1 - dropout, losses.shape)
    return Weighted(jnp.sum(losses * kept), jnp.sum(kept))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).choice(["to", "be", "or", "not\n", "question"], 1200)
    path.write_text(" ".join(words))
    return str(path)


def run(text, run_dir, steps=STEPS, **changes):
    settings = {
        "model": Bigram,
        "loss_fn": loss_fn,
        "optimizer": optax.adamw(1e-2),
        "dataset": text_dataset(text, length=LENGTH),
        "validation": text_dataset(text, length=LENGTH, split="validation"),
        "batch_size": 16,
        "validate_every": 5,
        "save_every": 4,
        "zero": Zero(stage=3, min_shard_size=64),
        "config_text": f"# {steps} steps\n",
    }
    return train(steps=steps, run_dir=str(run_dir), **(settings | changes))


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return directory, run(text, directory)


def stopped_at(step, whole_run, directory):
    """A copy of the whole run that has saved nothing after `step`."""
    shutil.copytree(whole_run[0], directory, dirs_exist_ok=True)
    for later in (4, 8, 12):
        if later > step:
            shutil.rmtree(directory / "checkpoints" / f"step_{later:08d}")


def contents(directory):
    """Everything that a run has written, but for the speed."""
    tables = [runs.table(directory / f"{name}.csv") for name in ("train", "validation")]
    events = {tag: values for tag, values in runs.events(directory).items() if "tokens_per_second" not in tag}
    return tables, events, (directory / "config.gin").read_text()


def assert_same_run(directory, summary, whole_run):
    wanted_directory, wanted = whole_run
    assert contents(directory) == contents(wanted_directory)
    assert summary.step == wanted.step and summary.validation == wanted.validation
    runs.assert_same_arrays(summary.state, wanted.state)


def test_the_tables_have_every_step_and_every_validation(whole_run):
    directory, summary = whole_run
    table = runs.table(directory / "train.csv")
    assert table["step"] == list(range(1, STEPS + 1))
    assert table.keys() == {"step", "loss", "grad_norm", "loss_scale", "skipped"}
    assert runs.table(directory / "validation.csv")["step"] == [5, 10, 12]
    assert (directory / "config.gin").read_text() == "# 12 steps\n"
    assert Checkpoints(directory / "checkpoints").steps() == [4, 8, 12]
    assert summary.step == int(summary.state.step) == STEPS


def test_tensorboard_has_what_the_tables_have(whole_run):
    directory, _ = whole_run
    events = runs.events(directory)
    for name in ("train", "validation"):
        table = runs.table(directory / f"{name}.csv")
        for column in table.keys() - {"step"}:
            steps, values = zip(*events[f"{name}/{column}"], strict=True)
            assert list(steps) == table["step"]
            np.testing.assert_array_equal(values, np.float32(table[column]))


def test_validation_is_that_of_the_gathered_model(text, tmp_path):
    zero = Zero(stage=3, min_shard_size=64)
    summary = run(text, tmp_path, steps=2, loss_fn=functools.partial(loss_fn, dropout=0.0), zero=zero)
    model = zero.gather(summary.state)
    tokens = text_dataset(text, length=LENGTH, split="validation").tokens.astype(int)
    logits = np.float64(model.table[...])[tokens[:-1]] @ np.float64(model.out[...])
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(tokens) - 1), tokens[1:]]
    assert len(losses) % (16 * LENGTH)  # the last batch is padded
    np.testing.assert_allclose(summary.validation["loss"], losses.mean(), rtol=1e-6)
    np.testing.assert_allclose(summary.validation["bits_per_byte"], losses.mean() / np.log(2), rtol=1e-6)


def test_more_steps_later_equal_all_at_once_bit_for_bit(text, tmp_path, whole_run):
    for steps in (3, 9):
        # A run's last step is validated too: once more is what the longer run would not have.
        run(text, tmp_path, steps=steps, validation=None)
    summary = run(text, tmp_path)
    assert runs.table(tmp_path / "train.csv") == runs.table(whole_run[0] / "train.csv")
    assert summary.validation == whole_run[1].validation
    runs.assert_same_arrays(summary.state, whole_run[1].state)


@pytest.mark.parametrize("error", [RuntimeError("out of order"), KeyboardInterrupt()])
def test_what_ends_a_run_comes_through_and_the_run_goes_on_later(text, tmp_path, monkeypatch, whole_run, error):
    def stop_at_11(self, step, metrics, tokens_per_second):
        if step == 11:
            raise error

    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", stop_at_11)
        with pytest.raises(type(error)) as raised:
            run(text, tmp_path)
    assert raised.value is error
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4, 8]
    for thread in set(threading.enumerate()) - threads:  # the loader's ends when it sees that nobody reads
        thread.join(10)
        assert not thread.is_alive()
    assert_same_run(tmp_path, run(text, tmp_path), whole_run)


def test_a_run_that_is_done_trains_no_more(text, tmp_path, capsys, whole_run):
    stopped_at(12, whole_run, tmp_path)
    for steps in (STEPS, 5):
        capsys.readouterr()
        summary = run(text, tmp_path, steps=steps, config_text=None)
        assert f"{tmp_path} is at step 12 of {steps} already: nothing is left to train" in capsys.readouterr().out
        assert_same_run(tmp_path, summary, whole_run)


def test_without_validation(text, tmp_path, capsys):
    summary = run(text, tmp_path, steps=1, validation=None)
    assert summary.validation == {}
    assert (tmp_path / "validation.csv").read_text() == ""
    assert "validation" not in capsys.readouterr().out


def test_a_run_that_overflows_at_the_smallest_loss_scale_ends(text, tmp_path):
    scaled = Precision(compute="float16", loss_scale=LossScale(initial_power=3, minimum=2.0, hysteresis=2))
    infinite = lambda model, batch, rng: loss_fn(model, batch, rng).total * jnp.inf
    zero = Zero(stage=3, min_shard_size=64, precision=scaled)
    with pytest.raises(RunError, match="step 4 overflowed at the smallest loss scale, 2: gradients are not finite"):
        run(text, tmp_path, loss_fn=infinite, zero=zero, validation=None)
    table = runs.table(tmp_path / "train.csv")
    # The first overflow is waited for, the second and third halve 8 to 2, the fourth ends the run.
    assert (table["loss_scale"], table["skipped"]) == ([8, 8, 4, 2], [1, 2, 3, 4])
    assert Checkpoints(tmp_path / "checkpoints").steps() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 12}, r"batch_size is 12; .* a multiple of 8 \(8 data-parallel devices x 1 micro-batches\)"),
        ({"batch_size": 0}, "batch_size is 0; accepted: a multiple of 8"),
        ({"zero": Zero(micro_batches=4)}, "batch_size is 16; accepted: a multiple of 32"),
        ({"steps": 0}, "steps is 0; accepted: a positive integer"),
        ({"save_every": -1}, "save_every is -1; accepted: a positive integer"),
        ({"validate_every": 0}, "validate_every is 0; accepted: a positive integer"),
        ({"validation_batches": 0}, "validation_batches is 0; accepted: a positive integer"),
        ({"keep": 0}, "keep is 0; accepted: a positive integer"),
    ],
)
def test_arguments_out_of_range_leave_nothing_behind(text, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        run(text, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_is_a_file(text, tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="run_dir is .*; accepted: a directory, or a path for one"):
            run(text, path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": functools.partial(Bigram, width=31)},
            r"of another model or optimizer: .*params/table has shape \(256, 30\) in the checkpoint, \(256, 31\) here",
        ),
        ({"optimizer": optax.sgd(1e-2)}, r"of another model or optimizer: .*/mu/out is in the checkpoint only"),
        ({"batch_size": 32}, "belongs to other data: batch_size is 32 and was 16"),
        ({"seed": 1}, "belongs to other data: seed is 1 and was 0"),
    ],
)
def test_the_run_directory_of_another_run_is_left_alone(text, whole_run, changes, message):
    directory, _ = whole_run
    before = contents(directory)
    with pytest.raises(UserError, match=message):
        run(text, directory, config_text="# another\n", **changes)
    assert contents(directory) == before
    assert Checkpoints(directory / "checkpoints").steps() == [4, 8, 12]


def damage(directory, step):
    (file,) = sorted((directory / "checkpoints" / f"step_{step:08d}").rglob("d/*"), key=lambda p: -p.stat().st_size)[:1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_told_of(text, tmp_path, caplog, whole_run):
    stopped_at(12, whole_run, tmp_path)
    damage(tmp_path, 12)
    with caplog.at_level(logging.WARNING):
        summary = run(text, tmp_path)
    (warning,) = [record.getMessage() for record in caplog.records if "checksum" in record.getMessage()]
    assert "step_00000012" in warning and "going back to the checkpoint before it" in warning
    assert_same_run(tmp_path, summary, whole_run)


def test_damaged_checkpoints_only_are_no_new_start(text, tmp_path, whole_run):
    stopped_at(4, whole_run, tmp_path)
    damage(tmp_path, 4)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="no good checkpoint in .*checksum differs.*move these directories away"):
        run(text, tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of orbax, whose loop closes early
def test_a_disk_that_is_full_while_saving(text, tmp_path, whole_run):
    stopped_at(4, whole_run, tmp_path)
    with largest_file(20_000), pytest.raises(RunError, match="step_00000008 was not saved: the disk, .* are intact"):
        run(text, tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]
    assert_same_run(tmp_path, run(text, tmp_path), whole_run)


def test_a_disk_that_is_full_while_logging(text, tmp_path, whole_run):
    stopped_at(4, whole_run, tmp_path)
    size = (tmp_path / "train.csv").stat().st_size  # of all 12 steps
    with largest_file(size - 100), pytest.raises(RunError, match=r"cannot write .*: File too large"):
        run(text, tmp_path)
    assert 4 in Checkpoints(tmp_path / "checkpoints").steps()


def test_the_host_reads_a_step_once_the_next_has_begun():
    class Recorder:
        def __init__(self):
            self.steps = []

        def write(self, table, step, values):
            self.steps.append(step)

    logs = Recorder()
    reader = trainer._Metrics(logs, Progress(3, 0, quiet=True), 1, None, initial_state())
    seen = []
    for step in (1, 2, 3):
        reader.add(step, {"loss": jnp.zeros(()), "step": jnp.int32(step)}, initial_state())
        seen.append(list(logs.steps))
    assert seen == [[], [1], [1, 2]]
    reader.drain()
    assert logs.steps == [1, 2, 3]
