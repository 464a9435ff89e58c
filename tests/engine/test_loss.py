"""The loss that has its value when its step has been computed."""

import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.engine import tiny

CONFIG = tiny.config(stage=3, accumulation=3)


@pytest.fixture
def engine(engines):
    return engines(CONFIG)


def test_the_value_before_the_step_is_the_step_s(engine):
    """Dropout included, whose key is the micro-batch's own."""
    for _ in range(2):
        early, losses = [], []
        for i, batch in enumerate(tiny.batches(3)):
            loss = engine(batch)
            if i != 1:
                early.append(float(loss))  # before backward
            engine.backward(loss)
            early.append(loss.item())  # after it
            losses.append(loss)
            engine.step()
        np.testing.assert_allclose(
            [float(losses[0])] * 2 + [float(losses[1])] + [float(losses[2])] * 2, early, rtol=1e-6
        )
        assert len({loss.item() for loss in losses}) == 3


def test_micro_batches_count_in_the_order_of_backward(engine):
    """Two forward passes before the first backward: the keys are those of the step."""
    first, second, third = tiny.batches(3)
    losses = [engine(first), engine(second)]
    for loss in reversed(losses):
        loss.item()  # as if it came next
        engine.backward(loss)
        early = loss.item()
        engine.step()
    engine.backward(engine(third))
    engine.step()
    assert losses[0].item() == pytest.approx(early, rel=1e-6)


def test_the_same_batch_has_other_dropout_in_each_micro_batch(engine):
    losses = tiny.train(engine, tiny.batches(1) * 3)
    assert len(set(losses)) == 3


def test_a_loss_is_known_many_steps_later(engine):
    losses = tiny.loop(engine, tiny.batches(3))
    want = [loss.item() for loss in losses[:2]]
    tiny.train(engine, tiny.batches(9))
    assert [loss.item() for loss in losses[:2]] == want
    assert losses[2].item() > 0


def test_a_loss_that_was_of_no_step_is_told_when_it_is_too_late(engine):
    unread, read = engine(tiny.batches(1)[0]), engine(tiny.batches(1)[0])
    value = read.item()
    assert unread.item() == value  # still time: a forward pass without a backward
    unread = engine(tiny.batches(1)[0])
    tiny.train(engine, tiny.batches(3))
    assert read.item() == value
    with pytest.raises(zerojax.UserError, match="when the parameters had changed.*give it to backward"):
        float(unread)
    assert engine.backward(unread).item() > 0  # as a micro-batch of the next step


def test_the_batch_is_let_go(engine):
    """Arrays on the device, which are kept as they are until the step."""
    losses, watched = [], []
    for batch in tiny.batches(3):
        batch = jax.tree.map(jnp.asarray, batch)
        watched.append(weakref.ref(batch["x"]))
        losses.append(engine.backward(engine(batch)))
        engine.step()
    del batch
    jax.block_until_ready(engine.state)
    gc.collect()
    assert [x() for x in watched] == [None] * 3
    assert losses[0].item() > 0


def test_a_loader_may_fill_the_same_arrays_again(engines):
    data = tiny.batches(6)
    engine = engines(CONFIG)
    want = tiny.train(engine, data)

    def refilled():
        buffers = jax.tree.map(np.empty_like, data[0])
        for batch in data:
            for name, x in batch.items():
                buffers[name][...] = x
            yield buffers

    assert tiny.train(engines(CONFIG), refilled()) == want
    engine, iterator = engines(CONFIG), refilled()
    means = [float(engine.train_batch(iterator)) for _ in range(2)]
    np.testing.assert_allclose(means, np.reshape(want, (2, 3)).mean(1), rtol=1e-6)


def test_arrays_on_devices_are_joined_there(engines):
    data = tiny.batches(3)
    want = tiny.train(engines(CONFIG), data)
    for sharding in (None, jax.NamedSharding(zerojax.make_mesh(), jax.P("data"))):
        placed = [jax.device_put(batch, sharding) for batch in data]
        assert tiny.train(engines(CONFIG), placed) == want


def test_it_is_a_number(engine):
    loss = engine(tiny.batches(1)[0])
    assert repr(loss) == "<loss, computed with its step>"
    value = float(loss)
    assert (str(loss), repr(loss), f"{loss}", f"{loss:.3f}") == (str(value), str(value), str(value), f"{value:.3f}")
    assert (loss.item(), int(loss), round(loss, 2), bool(loss)) == (value, int(value), round(value, 2), True)
    assert math.isfinite(loss) and np.isfinite(loss) and jnp.isfinite(jnp.asarray(loss))
    assert [float(x) for x in (loss + 1, 1 + loss, loss - 1, 1 - loss, 2 * loss, loss / 2, 1 / loss, -loss)] == (
        pytest.approx([value + 1, 1 + value, value - 1, 1 - value, 2 * value, value / 2, 1 / value, -value])
    )
    assert loss > 0 and loss >= 0 and not loss < 0 and loss == value and loss != 0 and abs(-loss) == value
    assert float(sum([loss, loss])) == pytest.approx(2 * value)
    assert float(jnp.mean(jnp.stack([loss, loss]))) == float(np.mean([loss, loss])) == pytest.approx(value)
    assert np.asarray(loss).dtype == np.float32 and np.asarray(loss, np.float64).dtype == np.float64
    assert float(np.float32(2) * loss) == pytest.approx(2 * value)
    assert loss.value.dtype == jnp.float32 and loss.value.shape == ()
