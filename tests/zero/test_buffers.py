"""The largest buffers at a step's peak, by name, size, part of the step and line of source."""

import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.zero import gpt
from zerojax import Zero
from zerojax.zero import buffers
from zerojax.zero.buffers import largest_buffers
from zerojax.zero.hlo import parse_hlo
from zerojax.zero.liveness import live_at_peak

DEVICES, ROWS, DIM, WIDE = 8, 128, 32, 4096
HERE = "tests/zero/test_buffers.py"


def make_model(key):
    return {"up": jax.random.normal(key, (DIM, WIDE)), "down": jax.random.normal(key, (WIDE, DIM))}


def loss_fn(model, batch, rng):
    h = jnp.sin(batch @ model["up"])  # the largest: one array of rows x WIDE is kept for the backward pass
    return jnp.mean((h @ model["down"]) ** 2)


def line(function, text):
    """The number of the line of `function` that holds `text`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, source in enumerate(lines) if text in source)


def compiled_step(stage, make_model=make_model, loss_fn=loss_fn, **settings):
    zero = Zero(stage=stage, **settings)
    state = zero.abstract_state(make_model, optax.adam(1e-3))
    batch = jax.ShapeDtypeStruct((DEVICES * ROWS, DIM), jnp.float32)
    return zero.train_step(loss_fn).lower(state, batch).compile()


@pytest.fixture(scope="module")
def found():
    return largest_buffers(compiled_step(1).as_text(), most=100)


def test_an_activation_is_named_by_the_line_that_made_it(found):
    largest = found[0]
    assert largest.bytes == ROWS * WIDE * 4 * largest.count
    assert (largest.dtype, largest.shape) == ("f32", (ROWS, WIDE))
    assert {b.source for b in found if b.shape == (ROWS, WIDE)} == {f"{HERE}:{line(loss_fn, 'jnp.sin')}"}
    assert {b.phase for b in found if b.shape == (ROWS, WIDE)} <= {"forward", "backward"}


def test_arguments_are_named_by_their_leaves(found):
    state = {b.name: b for b in found if b.phase == "state"}
    for name in ("params/up", "opt_state/0/mu/up", "opt_state/0/nu/up"):
        assert state[name].bytes == DIM * WIDE * 4 / DEVICES
        assert state[name].source == ""
    (batch,) = [b for b in found if b.phase == "batch"]
    assert (batch.name, batch.shape, batch.bytes) == ("batch", (ROWS, DIM), ROWS * DIM * 4)


def test_gathered_copies_are_named_by_their_leaves(found):
    """The one that the backward pass reads: no gradient of the batch is asked for, so "up" is gone."""
    whole = {b.name: b.bytes for b in found if b.name.startswith("all_gather of ")}
    assert whole == {"all_gather of params/down": DIM * WIDE * 4}


def test_a_scan_is_named_by_what_it_keeps():
    """Of a stack that a scan fills, not the scan but the line in its body; of a carry, the line that made it."""

    def layer(h, weights):
        return jnp.tanh(h @ weights), None

    def loss_of_scan(model, batch, rng):
        wide = jnp.tile(batch, WIDE // DIM)
        h, _ = jax.lax.scan(layer, wide, model["layers"])
        return jnp.mean(h)

    depth = 6
    layers = lambda key: {"layers": jnp.zeros((depth, WIDE, WIDE))}
    stacks = [
        b
        for b in largest_buffers(compiled_step(3, layers, loss_of_scan).as_text(), most=100)
        if b.shape in ((depth, ROWS, WIDE), (depth, 1, ROWS, WIDE))
    ]
    assert stacks
    assert {b.source for b in stacks} == {f"{HERE}:{line(layer, 'jnp.tanh')}"}


@pytest.mark.parametrize(("stage", "remat"), [(0, True), (2, False), (3, True)])
def test_all_that_is_live_is_what_the_compiler_allocates(stage, remat):
    """XLA's own figure of the temporaries, to a tenth: its packing wastes some, and finds some more to share."""
    zero = Zero(stage=stage, mesh=zerojax.make_mesh(), min_shard_size=gpt.LIMIT)
    state = zero.abstract_state(functools.partial(gpt.make_gpt, remat=remat), optax.adamw(1e-3))
    compiled = zero.train_step(gpt.next_token_loss).lower(state, gpt.BATCH_SHAPE).compile()
    live = live_at_peak(parse_hlo(compiled.as_text()))
    memory = compiled.memory_analysis()
    assert sum(b.bytes for b in live if b.is_argument) == memory.argument_size_in_bytes
    temporaries = sum(b.bytes for b in live if not b.is_argument)
    assert temporaries == pytest.approx(memory.temp_size_in_bytes, rel=0.1)


def test_frames_of_the_caller_and_of_libraries_say_nothing():
    step = Path(buffers.__file__).with_name("step.py")
    gather = Path(buffers.__file__).with_name("gather.py")
    library = Path(jnp.__file__).parents[2] / "flax" / "nnx" / "module.py"
    frames = [f"{library}:3", f"{gather}:80", "/home/me/net.py:7", f"{library}:9", f"{step}:190", "/home/me/main.py:1"]
    assert buffers.source_of(frames) == "/home/me/net.py:7"
    assert buffers.source_of([f"{gather}:80", f"{step}:190", "/home/me/main.py:1"]) == f"{gather}:80"
    assert buffers.source_of([f"{library}:3", f"{step}:190", "/home/me/main.py:1"]) == f"{library}:3"
    assert buffers.source_of([]) == ""


def test_paths_are_from_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert buffers.shown_source(f"{tmp_path}/models/net.py:7") == "models/net.py:7"
    assert buffers.shown_source("/elsewhere/net.py:7") == "/elsewhere/net.py:7"
