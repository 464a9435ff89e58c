"""What `zerojax.initialize` takes for its arguments."""

import base64
import functools
import json

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.engine import tiny
from zerojax.engine.models import model_s_own_loss, source_of

VERBATIM = """
{
  "train_batch_size": 8,
  "fp16": {"enabled": true},
  "zero_optimization": {"stage": 2},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}
}
"""


def mean_square(y, batch):
    return jnp.mean(jnp.square(y[:, 0].astype(jnp.float32) - batch["y"]))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(tiny.DIM, tiny.HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.down = nnx.Linear(tiny.HIDDEN, 1, rngs=rngs)

    def __call__(self, batch):
        return mean_square(self.down(self.dropout(jnp.tanh(self.up(batch["x"])))), batch)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="down")(jnp.tanh(nn.Dense(tiny.HIDDEN, name="up")(x)))


class EquinoxNet(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up, self.down = eqx.nn.Linear(tiny.DIM, tiny.HIDDEN, key=key), eqx.nn.Linear(tiny.HIDDEN, 1, key=key)

    def __call__(self, batch):
        return mean_square(jax.vmap(lambda x: self.down(jnp.tanh(self.up(x))))(batch["x"]), batch)


def linen_loss(variables, batch, rng):
    return mean_square(LinenNet().apply(variables, batch["x"]), batch)


def linen_init(key):
    return LinenNet().init(key, jnp.zeros((1, tiny.DIM)))


MODELS = {
    "nnx module": (lambda: NnxNet(nnx.Rngs(0)), NnxNet, None),
    "linen variables": (lambda: linen_init(jax.random.key(0)), dict, linen_loss),
    "equinox module": (lambda: EquinoxNet(jax.random.key(0)), EquinoxNet, None),
    "dict": (
        lambda: {**tiny.make_model(jax.random.key(0)), "calls": np.arange(3), "n": 3},
        dict,
        functools.partial(tiny.loss_fn, dropout=0.0),
    ),
}


def arrays_of(model):
    leaves = jax.tree.leaves(nnx.state(model) if isinstance(model, nnx.Module) else model)
    return [np.array(x) for x in leaves if eqx.is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_taken_with_its_weights(kind):
    """Which train, and come back in what it was; the one that was given stays as it is."""
    make, type_, loss_fn = MODELS[kind]
    model = make()
    before, data = arrays_of(model), tiny.batches(3)
    engine = tiny.start(tiny.config(3), model=model, loss_fn=loss_fn)
    assert isinstance(engine.module, type_)
    tiny.assert_same(arrays_of(engine.module), before)
    losses = tiny.train(engine, data)
    assert losses[0] == pytest.approx(float((loss_fn or model_s_own_loss)(make(), data[0], None)), rel=1e-5)
    assert not np.array_equal(arrays_of(engine.module)[0], before[0])
    assert tiny.compilations(engine) == 1
    tiny.assert_same(arrays_of(model), before)


def test_arrays_of_a_model_are_operands():
    """As constants they would be in the text of a program, which takes minutes for a gigabyte."""
    source = source_of({"w": np.full((64, 32), 3.0), "n": 2, "b": jnp.ones(3)})
    assert [x.shape for x in source.arrays] == [(3,), (64, 32)]
    text = jax.jit(lambda arrays: source.make(arrays, None)["w"] * 2).lower(source.arrays).as_text()
    assert "3.0" not in text
    assert jax.eval_shape(source.make_model, jax.random.key(0))["w"].shape == (64, 32)


def test_functions_are_told_from_models():
    for function in (tiny.make_model, functools.partial(tiny.make_model), jax.jit(tiny.make_model)):
        source = source_of(function)
        assert (list(source.arrays), set(source.make_model(jax.random.key(0)))) == ([], {"up", "bias", "down"})
    net = EquinoxNet(jax.random.key(0))
    assert callable(net) and len(source_of(net).arrays) == 4
    with pytest.raises(zerojax.UserError, match="model is a Linen LinenNet, which holds no parameters"):
        tiny.start(tiny.config(), model=LinenNet())
    torch_s = type("Net", (type("Module", (), {"__module__": "torch.nn.modules.module"}),), {"__call__": print})
    with pytest.raises(zerojax.UserError, match="model is a torch Net; accepted: a JAX model"):
        tiny.start(tiny.config(), model=torch_s())
    for model in (3, None, {"n": 1}, {"n": jnp.arange(3)}):
        with pytest.raises(zerojax.UserError, match="without floating parameters"):
            tiny.start(tiny.config(), model=model)


def test_a_model_s_own_loss_takes_a_batch_or_its_parts():
    assert model_s_own_loss(lambda batch: batch, [1, 2], None) == [1, 2]
    assert model_s_own_loss(lambda x, y: (y, x), (1, 2), None) == (2, 1)
    engine = tiny.start(tiny.config(), devices=1, loss_fn=None)
    engine.backward(engine(tiny.batches(1, rows=1)[0]))
    with pytest.raises(zerojax.UserError, match="loss_fn is None, and the model is a dict, which cannot be called"):
        engine.step()


def test_the_configuration_comes_as_a_dict_a_file_or_a_text(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(VERBATIM)
    text = base64.urlsafe_b64encode(VERBATIM.encode()).decode()
    for config, source in (path, str(path)), (text, "base64 config"):
        assert tiny.start(config, devices=1).config.source == source
    engine, optimizer, loader, scheduler = zerojax.initialize(
        model=tiny.make_model, loss_fn=tiny.loss_fn, config=json.loads(VERBATIM)
    )
    assert (engine.config.source, engine.zero.stage, engine.train_batch_size()) == ("config", 2, 8)
    assert (optimizer, loader, engine.zero.mesh.size) == (engine.optimizer, None, 8)
    assert scheduler.get_lr() == engine.get_lr() == [0.0001]
    assert engine.loss_scale == 2**16
    losses = [tiny.train(engine, tiny.batches(1))[0] for _ in range(4)]
    assert all(map(np.isfinite, losses)) and engine.was_step_applied()
    assert capsys.readouterr() == ("", "")


def test_notes_are_told_once(capsys):
    config = tiny.config()
    config["zero_optimization"]["overlap_comm"] = True
    tiny.start(config, devices=1)
    output, errors = capsys.readouterr()
    assert output == (
        "config: zero_optimization.overlap_comm = True: XLA schedules the collectives of the compiled step\n"
    )
    assert errors == ""


def test_auto_is_filled_in():
    config = tiny.config(
        train_micro_batch_size_per_gpu="auto",
        train_batch_size="auto",
        gradient_accumulation_steps="auto",
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
    )
    del config["scheduler"]
    with pytest.raises(zerojax.UserError, match="optimizer.params.lr is 'auto'; pass learning_rate="):
        tiny.start(config, micro_batch_size=2)
    engine = tiny.start(config, micro_batch_size=2, gradient_accumulation_steps=3, learning_rate=0.25)
    assert (engine.train_batch_size(), engine.get_lr()) == (48, [0.25])
    with pytest.raises(zerojax.UserError, match="no argument 'learnin_rate'; nearest accepted: learning_rate"):
        tiny.start(config, learnin_rate=0.25)


def test_the_optimizer_is_the_configuration_s_or_the_caller_s():
    schedule = optax.linear_schedule(0.0, 0.01, 4)
    adamw = lambda: optax.adamw(schedule, weight_decay=0.1)
    config = tiny.config()
    scheduler = config.pop("scheduler")
    bare = {name: value for name, value in config.items() if name != "optimizer"}
    data = tiny.batches(3, rows=2)
    given, *_, told = tiny.initialize(bare, devices=2, optimizer=adamw, lr_scheduler=schedule)
    scheduled = tiny.start(config, devices=2, lr_scheduler=schedule)
    for engine in given, scheduled:
        rates = []
        for batch in data:
            rates += engine.get_lr()
            tiny.train(engine, [batch])
        assert rates == pytest.approx([0, 0.0025, 0.005])
    assert told is given.lr_scheduler
    for name, x in given.module_state_dict().items():
        np.testing.assert_allclose(x, scheduled.module_state_dict()[name], rtol=1e-4, atol=1e-6)
    untold, *_, nothing = tiny.initialize(bare, devices=2, optimizer=adamw())
    assert (nothing, untold.lr_scheduler, untold.get_type()) == (None, None, [])
    for method, text in (untold.get_lr, "learning rate is inside"), (untold.get_mom, "momentum is inside"):
        with pytest.raises(zerojax.UserError, match=text):
            method()
    for settings, changed, text in (
        ({"optimizer": adamw}, config, "optimizer was given beside config's optimizer.type 'AdamW'; accepted: one"),
        ({"optimizer": adamw}, bare | {"scheduler": scheduler}, "beside config's scheduler.type 'WarmupLR'"),
        ({"lr_scheduler": schedule}, config | {"scheduler": scheduler}, "lr_scheduler was given beside config's sch"),
        ({"lr_scheduler": 0.1}, config, "lr_scheduler is 0.1; accepted: a function of the number of updates"),
        ({"optimizer": 0.1}, bare, "optimizer is 0.1; accepted: an optax.GradientTransformation, or a function"),
        ({"optimizer": lambda: 0.1}, bare, "optimizer is 0.1; accepted: an optax.GradientTransformation"),
        ({}, bare, "config has no optimizer, and none was given"),
    ):
        with pytest.raises(zerojax.UserError, match=text):
            tiny.start(changed, devices=2, **settings)


def test_a_mesh_and_mics_agree():
    config = tiny.config(3)
    config["zero_optimization"]["mics_shard_size"] = 4
    engine, *_ = zerojax.initialize(model=tiny.make_model, loss_fn=tiny.loss_fn, config=config)
    assert dict(engine.zero.mesh.shape) == {"replica": 2, "data": 4}
    with pytest.raises(zerojax.UserError, match="8 devices on its 'data' axis beside .*mics_shard_size 4"):
        tiny.start(config)
    with pytest.raises(zerojax.UserError, match="mesh is 3"):
        tiny.start(config, mesh=3)


def test_training_data_is_loaded():
    data = tiny.examples(20)
    config = tiny.config(accumulation=2, train_micro_batch_size_per_gpu=2)
    engine, _, loader, _ = tiny.initialize(config, devices=2, training_data=data)
    assert (len(loader), loader.batch_size, engine.training_dataloader) == (5, 4, loader)
    assert [len(batch["y"]) for batch in loader] == [4] * 5
    assert float(engine.train_batch()) > 0
    assert loader.position == (1, 8)
    with pytest.raises(zerojax.UserError, match=r"training_data has 20 examples; accepted: 22 \(a micro-batch\)"):
        tiny.start(tiny.config(train_micro_batch_size_per_gpu=11), devices=2, training_data=data)
    with pytest.raises(zerojax.UserError, match="training_data is .*; accepted: examples by index, with a length"):
        tiny.start(config, devices=2, training_data=iter(data))
    engine.set_train_micro_batch_size(5)
    assert len(loader) == 2
    with pytest.raises(zerojax.UserError, match="training_data has 20 examples; accepted: 22"):
        engine.set_train_micro_batch_size(11)
    assert engine.train_micro_batch_size_per_gpu() == 5
