"""Tags, the file that names the latest, and what a checkpoint gives back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.engine import tiny
from zerojax.engine import EpochLoader

CONFIG = tiny.config(accumulation=2)
DATA = tiny.examples(10)  # of which an epoch is two and a half steps


def progress(engine):
    return (
        jax.device_get((engine.state.params, engine.state.opt_state, engine.state.rng, engine.state.loss_scale)),
        (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps, engine.get_lr()),
    )


def start(config=CONFIG, devices=2, **settings):
    return tiny.start(config, devices, training_data=DATA, **settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An engine that has saved after two steps and taken two more, the directory, and what was after two and four."""
    directory, engine = tmp_path_factory.mktemp("run"), start()
    losses = [float(engine.train_batch()) for _ in range(2)]
    two = progress(engine)
    assert engine.save_checkpoint(directory, client_state={"epoch": 3, "best": [0.5, None]}) is True
    losses += [float(engine.train_batch()) for _ in range(2)]
    return engine, directory, two, progress(engine), losses


@pytest.fixture(scope="module")
def other():
    """A second engine of the same configuration."""
    return start()


def test_a_run_goes_on_where_it_was(run, other, tmp_path):
    """In another engine, in its own, and after loading and saving: parameters, schedule, randomness and data."""
    engine, directory, two, four, losses = run
    path, client_state = other.load_checkpoint(directory)
    assert (path, client_state) == (str(directory / "global_step2"), {"epoch": 3, "best": [0.5, None]})
    tiny.assert_same(progress(other), two)
    other.save_checkpoint(tmp_path, "again")
    for _ in range(2):
        assert [float(other.train_batch()) for _ in range(2)] == losses[2:]
        tiny.assert_same(progress(other), four)
        other.load_checkpoint(tmp_path, "again")
    engine.load_checkpoint(directory)
    assert [float(engine.train_batch()) for _ in range(2)] == losses[2:]
    tiny.assert_same(progress(engine), four)
    assert tiny.compilations(engine) == 1  # the loaded state lies as the first did


def test_the_loader_goes_on_within_its_epoch(run, other):
    _, directory, *_ = run
    rows = lambda loader: [x.tolist() for batch in loader for x in batch["x"]]
    fresh = EpochLoader(DATA, 2)
    whole = rows(fresh), rows(fresh)
    assert whole[0] != whole[1]
    other.load_checkpoint(directory)  # after two steps of two micro-batches of two rows
    assert other.training_dataloader.position == (0, 8)
    assert rows(other.training_dataloader) == whole[0][8:]
    assert rows(other.training_dataloader) == whole[1]


def test_it_loads_at_another_stage_number_of_devices_and_precision(run):
    _, directory, two, *_ = run
    engine = start(CONFIG | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, devices=4)
    engine.load_checkpoint(directory)
    tiny.assert_same(engine.module_state_dict(), two[0][0])
    assert engine.global_steps == 2 and engine.training_dataloader.position == (0, 8)
    assert np.isfinite(float(engine.train_batch()))
    assert tiny.compilations(engine) == 1


def test_tags_and_the_latest(other, tmp_path):
    with pytest.warns(UserWarning, match="has no file named latest: no checkpoint was loaded"):
        assert other.load_checkpoint(tmp_path / "never") == (None, None)
    with pytest.raises(zerojax.UserError, match="no checkpoint of tag 'a'; accepted: none is there"):
        other.load_checkpoint(tmp_path, "a")
    other.save_checkpoint(tmp_path, "a", save_latest=False)
    with pytest.warns(UserWarning, match="latest"):
        assert other.load_checkpoint(tmp_path) == (None, None)
    other.save_checkpoint(tmp_path, "b", {"n": 1})
    other.save_checkpoint(tmp_path, 7, {"n": 7}, save_latest=False)
    assert (tmp_path / "latest").read_text() == "b"
    assert other.load_checkpoint(tmp_path) == (str(tmp_path / "b"), {"n": 1})
    assert other.load_checkpoint(tmp_path, "a") == (str(tmp_path / "a"), {})
    assert other.load_checkpoint(tmp_path, 7)[1] == {"n": 7}
    with pytest.raises(zerojax.UserError, match="has no checkpoint of tag 'c'; accepted: 7, a, b$"):
        other.load_checkpoint(tmp_path, "c")
    other.save_checkpoint(tmp_path, "b", {"n": 2})
    assert other.load_checkpoint(tmp_path)[1] == {"n": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "a", "b", "latest"]
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(zerojax.UserError, match="no checkpoint of tag 'gone'; accepted: 7, a, b$"):
        other.load_checkpoint(tmp_path)


def test_names_that_are_none(other, tmp_path):
    for directory in ("", None, 3):
        with pytest.raises(ValueError, match="accepted: the path of a directory"):
            other.save_checkpoint(directory)
        with pytest.raises(ValueError, match="accepted: the path of a directory"):
            other.load_checkpoint(directory)
        with pytest.raises(ValueError, match="accepted: the path of a directory"):
            other.save_16bit_model(directory)
    for tag in ("", "..", "latest", "a/b", "a.new", "a.old"):
        with pytest.raises(zerojax.UserError, match="accepted: a name for a directory, other than 'latest'"):
            other.save_checkpoint(tmp_path, tag)
        with pytest.raises(zerojax.UserError, match="accepted: a name for a directory"):
            other.load_checkpoint(tmp_path, tag)
    with pytest.raises(zerojax.UserError, match="client_state.* is not JSON"):
        other.save_checkpoint(tmp_path, "a", {"loss": jnp.ones(())})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("killed", ["before", "between", "at the end"])
def test_a_tag_that_was_being_replaced_is_there(other, tmp_path, killed):
    """What a process leaves that is killed before, between or after the two renames."""
    tag, fresh, old = tmp_path / "t", tmp_path / "t.new", tmp_path / "t.old"
    other.save_checkpoint(tmp_path, "new", {"n": 2})
    other.save_checkpoint(tmp_path, "t", {"n": 1})
    (tmp_path / "new").rename(fresh)
    if killed != "before":
        tag.rename(old)
    if killed == "at the end":
        fresh.rename(tag)
    want = {"n": 1} if killed == "before" else {"n": 2}
    assert other.load_checkpoint(tmp_path)[1] == want
    with pytest.raises(zerojax.UserError, match="accepted: t$"):
        other.load_checkpoint(tmp_path, "c")
    with pytest.raises(zerojax.UserError, match="not JSON"):  # a save that fails takes nothing away
        other.save_checkpoint(tmp_path, "t", {"n": {1: 2}})
    assert other.load_checkpoint(tmp_path)[1] == want
    other.save_checkpoint(tmp_path, "t", {"n": 3})
    assert other.load_checkpoint(tmp_path)[1] == {"n": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "t"]


def test_only_the_old_one_is_left(other, tmp_path):
    other.save_checkpoint(tmp_path, "t", {"n": 1})
    (tmp_path / "t").rename(tmp_path / "t.old")
    (tmp_path / "t.new").mkdir()
    (tmp_path / "t.new" / "params").write_text("half")
    assert other.load_checkpoint(tmp_path)[1] == {"n": 1}


def test_a_save_between_boundaries_is_refused_and_a_load_drops_what_waits(run, other, tmp_path):
    _, directory, two, *_ = run
    other.load_checkpoint(directory)
    loss = other.backward(other(tiny.batches(1, rows=2)[0]))
    other.step()
    with pytest.raises(zerojax.UserError, match="save_checkpoint was called between two boundaries"):
        other.save_checkpoint(tmp_path)
    other.load_checkpoint(directory)
    assert not other.is_gradient_accumulation_boundary()
    tiny.assert_same(progress(other), two)
    with pytest.raises(zerojax.UserError, match="the parameters had changed"):
        loss.item()


def test_parts_of_a_checkpoint(run, other, tmp_path):
    """Parameters alone, or all but the optimizer with its schedule."""
    _, directory, (two, counts), *_ = run
    other.load_checkpoint(directory)
    other.train_batch()
    (_, opt_state, _, _), (steps, samples, micro_steps, _, rates) = progress(other)
    other.load_checkpoint(directory, load_module_only=True)
    now = progress(other)
    tiny.assert_same(now[0][0], two[0])
    tiny.assert_same(now[0][1], opt_state)
    assert now[1] == (steps, samples, micro_steps, 0, rates)
    other.load_checkpoint(directory, load_optimizer_states=False)
    now = progress(other)
    tiny.assert_same((now[0][0], now[0][2]), (two[0], two[2]))
    tiny.assert_same(now[0][1], opt_state)
    assert now[1] == (*counts[:4], rates)


def test_parameters_of_a_run_of_another_optimizer(run):
    _, directory, (two, _), *_ = run
    config = tiny.config() | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config.pop("scheduler", None)
    other = tiny.start(config, devices=2, seed=5)
    with pytest.raises(zerojax.UserError, match="another model or optimizer"):
        other.load_checkpoint(directory)
    other.load_checkpoint(directory, load_module_only=True)
    for name, x in other.module_state_dict().items():
        np.testing.assert_array_equal(x, np.asarray(two[0][name])[tuple(map(slice, x.shape))])


def test_frozen_parameters_are_left_out(tmp_path):
    config, trainable = tiny.config(stage=2), lambda path, x: path != "up"
    engine = tiny.start(config, devices=2, trainable=trainable)
    assert set(engine.module_state_dict()) == {"up", "bias", "down"}
    engine.save_checkpoint(tmp_path, "all")
    engine.save_checkpoint(tmp_path, "trained", exclude_frozen_parameters=True)
    leaves = lambda tag: set(json.loads((tmp_path / tag / "manifest.json").read_text())["body"]["leaves"])
    assert leaves("all") - leaves("trained") == {"frozen/up"}
    other = tiny.start(config, devices=2, trainable=trainable, seed=1)
    own = np.asarray(other.module["up"])
    other.load_checkpoint(tmp_path, "trained")
    tiny.assert_same(other.state.params, engine.state.params)
    np.testing.assert_array_equal(other.module["up"], own)
    other.load_checkpoint(tmp_path, "all")
    tiny.assert_same(other.module, engine.module)


def test_a_checkpoint_of_another_kind_is_told(other, tmp_path):
    zerojax.save(tmp_path / "plain", other.state)
    with pytest.raises(zerojax.UserError, match="plain was not saved by an engine"):
        other.load_checkpoint(tmp_path, "plain")
    engine = tiny.start(tiny.config(), devices=2, model=lambda key: {"up": jnp.ones((3, 2))})
    engine.save_checkpoint(tmp_path, "another")
    with pytest.raises(zerojax.UserError, match="is of another model or optimizer"):
        other.load_checkpoint(tmp_path, "another")
    (tmp_path / "another" / "manifest.json").unlink()
    with pytest.raises(zerojax.errors.RunError, match="manifest.json is missing"):
        other.load_checkpoint(tmp_path, "another")
    (tmp_path / "file").write_text("")
    with pytest.raises(zerojax.errors.RunError, match="file"):
        other.save_checkpoint(tmp_path / "file")


def test_the_model_comes_whole_as_a_dict_and_as_a_file(tmp_path):
    """The dict in the model's own dtypes, the file in 16 bit."""
    from safetensors.numpy import load_file

    def make_model(key):
        model = tiny.make_model(key)
        return model | {"blocks": {"down": model.pop("down").astype(jnp.bfloat16)}, "calls": jnp.arange(3)}

    loss_fn = lambda model, batch, rng: tiny.loss_fn(model | model["blocks"], batch, rng)
    engine = tiny.start(tiny.config(3), model=make_model, loss_fn=loss_fn)
    tiny.train(engine, tiny.batches(3))
    found, model = engine.module_state_dict(), engine.module
    assert {name: (x.shape, x.dtype.name) for name, x in found.items()} == {
        "up": ((6, 204), "float32"),
        "bias": ((204,), "float32"),
        "blocks/down": ((204, 1), "bfloat16"),
        "calls": ((3,), "int32"),
    }
    np.testing.assert_array_equal(found["up"], model["up"])
    np.testing.assert_array_equal(found["blocks/down"], model["blocks"]["down"])
    assert engine.state.params["blocks"]["down"].dtype == jnp.float32
    assert engine.save_16bit_model(tmp_path / "deeper") is True
    assert [path.name for path in (tmp_path / "deeper").iterdir()] == ["model.safetensors"]
    tensors = load_file(tmp_path / "deeper" / "model.safetensors")
    assert set(tensors) == {"up", "bias", "blocks.down", "calls"}
    np.testing.assert_array_equal(tensors["up"], found["up"].astype("bfloat16"))
    np.testing.assert_array_equal(tensors["blocks.down"], found["blocks/down"])
    assert tensors["calls"].tolist() == [0, 1, 2]
    with pytest.raises(zerojax.UserError, match="save_filename is ''"):
        engine.save_16bit_model(tmp_path, "")
