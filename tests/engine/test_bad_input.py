"""What is no step: an error of one line, after which the engine goes on."""

import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.engine import tiny

CONFIG = tiny.config(accumulation=3)
BATCH, OTHER, THIRD = tiny.batches(3)


@pytest.fixture
def engine(engines):
    return engines(CONFIG)


def complains(text):
    return pytest.raises(zerojax.UserError, match=text)


def test_backward_takes_this_engine_s_loss_as_it_is(engine, engines):
    loss = engine(BATCH)
    accepted = r"accepted: the loss that this engine's forward returned, as it is \(scale or add losses in loss_fn\)"
    for given in (1.5, jnp.float32(1.5), loss * 2, loss + engine(BATCH), None):
        with complains(f"backward was given .*; {accepted}") as told:
            engine.backward(given)
        assert "\n" not in str(told.value)
    other = engines(tiny.config(stage=3, accumulation=3))
    with complains("backward was given a loss of another engine"):
        other.backward(loss)
    assert engine.backward(loss) is loss


def test_forward_backward_and_step_alternate(engine):
    with complains("step was called without a backward before it"):
        engine.step()
    loss = engine(BATCH)
    with complains("step was called without a backward before it"):
        engine.step()
    engine.backward(loss)
    with complains("backward was called twice before step"):
        engine.backward(engine(BATCH))
    with complains("train_batch was called between backward and the boundary"):
        engine.train_batch(iter([BATCH] * 3))
    engine.step()
    with complains("step was called without a backward before it"):
        engine.step()
    with complains("backward was given a loss a second time"):
        engine.backward(loss)
    tiny.train(engine, [BATCH] * 2)
    with complains("backward was given a loss a second time"):
        engine.backward(loss)
    assert (engine.micro_steps, engine.global_steps) == (3, 1)


def test_a_micro_batch_has_its_rows(engine):
    for batch, told in (
        (tiny.batches(1, rows=7)[0], r"micro-batch leaf 'x' has 7 rows; accepted: 8 \(1 x 8 devices\)"),
        ({**BATCH, "y": BATCH["y"][:4]}, "micro-batch leaf 'y' has 4 rows; accepted: 8"),
        ({**BATCH, "scale": 2.0}, "micro-batch leaf 'scale' is 2.0; accepted: arrays whose first axis is the rows"),
        ({**BATCH, "name": "a"}, "micro-batch leaf 'name' is 'a'; accepted: arrays"),
        (np.zeros(3), "micro-batch leaf 'batch' has 3 rows"),
        ({}, "a micro-batch is {}; accepted: arrays"),
    ):
        with complains(told):
            engine(batch)
        with complains(told):
            engine.train_batch(iter([batch] * 3))


def test_micro_batches_of_a_step_are_alike(engine):
    tiny.train(engine, [])
    engine.backward(engine(BATCH))
    engine.step()
    longer = {**OTHER, "x": np.zeros((8, tiny.DIM + 1), np.float32)}
    with complains(r"micro-batch leaf 'x' is float32\[8, 6\] and float32\[8, 7\] within one step"):
        engine.backward(engine(longer))
    with complains("'y' is float32.* and int32"):
        engine.backward(engine({**OTHER, "y": np.zeros(8, np.int32)}))
    with complains("micro-batches of one step are .* and .*; accepted: one structure"):
        engine.backward(engine({**OTHER, "z": OTHER["y"]}))
    assert len(tiny.train(engine, [OTHER, THIRD])) == 2
    assert engine.global_steps == 1
    with complains("one structure"):
        engine.train_batch(iter([BATCH, {"x": BATCH["x"]}, BATCH]))


def test_data_that_ends_within_a_step(engine):
    with complains("train_batch has no data; accepted: an iterator, or initialize"):
        engine.train_batch()
    with complains("the data ended after 2 of 3 micro-batches"):
        engine.train_batch(iter([BATCH, OTHER]))
    with complains("the data ended after 0 of 3 micro-batches"):
        engine.eval_batch(iter([]))
    with complains(r"data_iter is \[.*; accepted: an iterator, such as iter\(loader\)"):
        engine.train_batch([BATCH, OTHER, THIRD])  # would begin anew at each call
    assert (engine.micro_steps, engine.global_steps) == (0, 0)
    assert float(engine.train_batch(iter([BATCH, OTHER, THIRD]))) > 0


def test_a_loss_function_that_fails_leaves_the_step_to_be_taken_again(tmp_path):
    """Here at the second call, as where a batch of another shape is traced."""

    def loss_fn(model, batch, rng):
        if batch["y"].dtype == jnp.int32:
            raise RuntimeError("no loss of integers")
        return tiny.loss_fn(model, batch, rng)

    engine = tiny.start(tiny.config(), devices=2, loss_fn=loss_fn)
    data = tiny.batches(2, rows=2)
    tiny.train(engine, data[:1])
    loss = engine.backward(engine({**data[1], "y": np.zeros(2, np.int32)}))
    with pytest.raises(RuntimeError, match="no loss of integers"):
        engine.step()
    assert (engine.micro_steps, engine.global_steps) == (1, 1)
    with complains("between two boundaries"):
        engine.save_checkpoint(tmp_path)
    with pytest.raises(RuntimeError, match="no loss of integers"):
        loss.item()
