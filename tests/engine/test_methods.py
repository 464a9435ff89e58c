"""What the engine is asked between steps, method by method."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.engine import tiny
from zerojax.config.deepspeed import resolve
from zerojax.engine.optimizers import optimizer_of

CYCLE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2, "cycle_min_mom": 0.8},
}


def test_the_boundary_is_every_nth_step(engines):
    engine = engines(tiny.config(accumulation=3))
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()
    assert engine.gradient_accumulation_steps() == 3
    assert (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()) == (1, 24)
    seen = []
    for batch in tiny.batches(6):
        loss = engine(batch)
        boundary = engine.is_gradient_accumulation_boundary()
        assert engine.backward(loss) is loss
        assert engine.is_gradient_accumulation_boundary() is boundary
        before = engine.state.params
        assert engine.step() is None
        assert (engine.state.params is not before) is boundary
        seen.append((boundary, engine.was_step_applied(), engine.global_steps, engine.micro_steps))
    assert seen == [
        (False, False, 0, 1),
        (False, False, 0, 2),
        (True, True, 1, 3),
        (False, False, 1, 4),
        (False, False, 1, 5),
        (True, True, 2, 6),
    ]
    assert (engine.global_samples, engine.skipped_steps, engine.loss_scale) == (48, 0, 1.0)
    assert engine.zero_optimization_stage() == 0


def gradient_norm(params, batch):
    """Of the mean loss over all rows, without dropout."""
    gradients = jax.grad(lambda params: tiny.loss_fn(params, batch, None, dropout=0.0))(params)
    return float(optax.tree.norm(gradients))


def test_the_norm_is_that_before_clipping():
    """Of a step on two micro-batches: the norm of the gradient of their mean loss, and the update of a clipped one."""
    sgd = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.0}}
    config = tiny.config(2, 2, optimizer=sgd)
    del config["scheduler"]
    engine = tiny.start(config, loss_fn=functools.partial(tiny.loss_fn, dropout=0.0))
    before, data = engine.module, tiny.batches(2)
    tiny.train(engine, data)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, engine.module, before))
    assert moved == pytest.approx(tiny.CLIP, rel=1e-5)
    want = gradient_norm(before, jax.tree.map(lambda *xs: np.concatenate(xs), *data))
    assert engine.get_global_grad_norm() == pytest.approx(want, rel=1e-5)
    assert want > tiny.CLIP
    assert (engine.get_lr(), engine.get_mom(), engine.get_type()) == ([1.0], [0.0], ["SGD"])


def test_the_learning_rate_is_the_schedule_s(engines):
    engine = engines(tiny.config())
    rates = []
    for k, batch in enumerate(tiny.batches(6)):
        rates += engine.get_lr()
        assert engine.lr_scheduler.get_lr() == engine.lr_scheduler.get_last_lr() == engine.get_lr()
        assert engine.lr_scheduler.last_batch_iteration == k - 1
        tiny.train(engine, [batch])
    np.testing.assert_allclose(rates, tiny.RATES[:6], rtol=1e-6)
    assert (engine.get_type(), engine.get_mom()) == (["AdamW"], [(0.9, 0.999)])


@pytest.mark.parametrize(
    ("optimizer", "types", "rates", "momenta"),
    [
        (
            {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3}},
            ["Muon"] * 2,
            [0.02, 1e-3],
            [0.95, (0.9, 0.95)],
        ),
        ({"type": "sgd", "params": {"lr": 0.1, "momentum": 0.7}}, ["sgd"], [0.1], [0.7]),
        ({"type": "Adagrad", "params": {}}, ["Adagrad"], [0.01], [0.0]),
        ({"type": "Lion", "params": {"betas": [0.8, 0.9]}}, ["Lion"], [0.001], [(0.8, 0.9)]),
    ],
)
def test_groups_are_told_in_lists(optimizer, types, rates, momenta):
    config = resolve({"train_batch_size": 2, "optimizer": optimizer}, world_size=2)
    groups = optimizer_of(config, None, None)
    assert (list(groups.types), [rate(3) for rate in groups.rates]) == (types, rates)
    assert [momentum(3) for momentum in groups.momenta] == momenta


def test_the_momentum_cycles_against_the_learning_rate():
    """OneCycle over two steps up and two down: the rate from 0.001 to 0.01, the momentum from 0.9 to 0.8. As DeepSpeed,
    which begins with both of them at their lowest."""
    engine = tiny.start(tiny.config(scheduler=CYCLE), devices=2)
    rates, momenta = [], []
    for batch in tiny.batches(4, rows=2):
        rates += engine.get_lr()
        momenta += engine.get_mom()
        tiny.train(engine, [batch])
    np.testing.assert_allclose(rates, [0.001, 0.0055, 0.01, 0.0055], rtol=1e-5)
    np.testing.assert_allclose([b1 for b1, _ in momenta], [0.8, 0.85, 0.8, 0.85], rtol=1e-5)
    assert {b2 for _, b2 in momenta} == {0.99}


class Net(nnx.Module):
    """Dropout between two layers, and the loss of a batch of inputs and targets."""

    def __init__(self, rngs):
        self.up = nnx.Linear(tiny.DIM, tiny.HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(tiny.HIDDEN, 1, rngs=rngs)

    def __call__(self, x, y):
        return jnp.mean(jnp.square(self.down(self.dropout(jnp.tanh(self.up(x))))[:, 0] - y))


def test_evaluation_has_no_dropout():
    engine = tiny.start(tiny.config(accumulation=2), devices=2, model=lambda key: Net(nnx.Rngs(key)), loss_fn=None)
    data = [(batch["x"], batch["y"]) for batch in tiny.batches(4, rows=2)]
    model = engine.module
    assert isinstance(model, Net)
    model.eval()
    want = [float(model(*batch)) for batch in data]
    dropped = engine(data[0]).item()
    assert engine.eval() is engine
    assert [float(engine(batch)) for batch in data] == pytest.approx(want, rel=1e-5)
    assert isinstance(engine(data[0]), jax.Array)
    assert abs(float(engine(data[0])) - dropped) > 1e-3
    assert engine.train() is engine
    assert engine(data[0]).item() == dropped
    assert float(engine.eval_batch(data[0])) == pytest.approx(want[0], rel=1e-5)
    iterator = iter(data)
    assert float(engine.eval_batch(iterator)) == pytest.approx(np.mean(want[:2]), rel=1e-5)
    assert len(list(iterator)) == 2
    larger = tuple(np.concatenate(parts) for parts in zip(*data, strict=True))  # of any rows that the devices divide
    assert float(engine.eval_batch(larger)) == pytest.approx(np.mean(want), rel=1e-5)
    assert engine.micro_steps == 0
    tiny.train(engine, data[:2])
    assert engine.global_steps == 1


def test_no_sync_is_for_stages_that_reduce_once(engines):
    engine = engines(tiny.config(accumulation=3))
    want = tiny.train(engine, tiny.batches(3))
    engine = engines(tiny.config(accumulation=3))
    losses = []
    for i, batch in enumerate(tiny.batches(3)):
        if i < 2:
            with engine.no_sync():
                losses.append(engine.backward(engine(batch)))
        else:
            losses.append(engine.backward(engine(batch)))
        engine.step()
    assert [loss.item() for loss in losses] == want
    with engine.no_sync():
        engine.backward(engine(tiny.batches(1)[0]))
        with pytest.raises(zerojax.UserError, match="step was called inside of no_sync"):
            engine.step()
        with pytest.raises(zerojax.UserError, match="no_sync was called inside of no_sync"), engine.no_sync():
            pass
        with pytest.raises(zerojax.UserError, match="inside of no_sync"):
            engine.step()  # which the inner one has not ended
    engine.step()
    engine = engines(tiny.config(stage=3, accumulation=3))
    with pytest.raises(zerojax.UserError, match="at stage 3; accepted: stages 0 and 1"), engine.no_sync():
        pass


def test_the_batch_size_changes_between_steps(engines):
    config = tiny.config(accumulation=3)
    engine = engines(config)
    tiny.train(engine, tiny.batches(3))
    engine.set_train_batch_size(16)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (2, 16)
    engine.backward(engine(tiny.batches(1)[0]))
    assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    for change in (lambda: engine.set_train_batch_size(24), lambda: engine.set_train_micro_batch_size(2)):
        with pytest.raises(zerojax.UserError, match="between two boundaries"):
            change()
    tiny.train(engine, tiny.batches(1))
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 5, 40)
    with pytest.raises(ValueError, match=r"train_batch_size is 20; accepted: a multiple of 8 \(1 rows x 8 devices\)"):
        engine.set_train_batch_size(20)
    for size in (0, -8, 8.0, True, "8"):
        with pytest.raises(zerojax.UserError, match="accepted: a positive integer"):
            engine.set_train_batch_size(size)
        with pytest.raises(zerojax.UserError, match="accepted: a positive integer"):
            engine.set_train_micro_batch_size(size)
    engine.set_train_micro_batch_size(2)
    assert (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()) == (2, 32)
    with pytest.raises(zerojax.UserError, match="has 8 rows; accepted: 16"):
        engine(tiny.batches(1)[0])
    assert engine.forward(tiny.batches(1, rows=16)[0]) is not None
    engine.set_train_micro_batch_size(1)
    engine.set_train_batch_size(24)


def test_an_engine_is_freed_with_its_state():
    """Nothing outlives it that holds its parameters: no cache of programs, no log that is yet to be written."""
    engine = tiny.start(tiny.config(steps_per_print=100), devices=2)
    tiny.train(engine, tiny.batches(1, rows=2))
    watched = weakref.ref(engine), weakref.ref(engine.state.params["up"])
    del engine
    gc.collect()
    assert [x() for x in watched] == [None, None]
