"""A failed allocation, for real: in processes whose address space is limited."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from tests import runs
from zerojax import Zero
from zerojax.errors import OutOfMemoryError
from zerojax.zero import fit
from zerojax.zero.fit import Memory, settings_that_fit
from zerojax.zero.out_of_memory import explained, is_out_of_memory

GB = 10**9
ALLOWED = 6 * GB  # of address space: more than jax takes for itself, less than the step of any one device
LIMIT = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({ALLOWED}, {ALLOWED}));"
DEVICES, ROWS, WIDE = 8, 4096, 131072

STEP = f"""
import json, jax, jax.numpy as jnp, optax
from zerojax import Zero
from zerojax.errors import RunError

def loss(model, batch, rng):
    h = jnp.sin(batch @ model["w"])
    return jnp.mean(jnp.sin(h[:, ::-1] * model["w"]) ** 2)

zero = Zero(stage=0)
state = zero.init(lambda key: {{"w": jnp.ones((1, {WIDE}))}}, optax.adamw(1e-3))
{LIMIT}
try:
    zero.train_step(loss)(state, jnp.ones(({DEVICES * ROWS}, 1)))
except RunError as error:
    print(json.dumps([str(error), str(error.__cause__)]))
"""

INIT = f"""
{LIMIT}
import json, jax.numpy as jnp, optax
from zerojax import Zero
from zerojax.errors import RunError
try:
    Zero(stage=0).init(lambda key: {{"w": jnp.ones((8192, 8192))}}, optax.adamw(1e-3))
except RunError as error:
    print(json.dumps([str(error), str(error.__cause__)]))
"""


def message_of(program, directory):
    """The message and the cause's of a program's error; the program is a file, whose lines the message may name."""
    path = directory / "program.py"
    path.write_text(program)
    ((code, out, err),) = runs.finish([runs.start([str(path)], DEVICES)])
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def blocks_of(message):
    """The message's first line, and its tables, each as a dict of rows by their first cell."""
    head, *blocks = message.split("\n\n")
    cells = lambda line: re.split(r"\s{2,}", line)
    rows = [[line for line in block.splitlines()[1:] if not line.startswith("---")] for block in blocks]
    return head, [{cells(line)[0]: cells(line)[1:] for line in block} for block in rows]


def test_a_step_that_does_not_fit(tmp_path):
    message, cause = message_of(STEP, tmp_path)
    head, (memory, largest, fitting) = blocks_of(message)
    assert cause.startswith("RESOURCE_EXHAUSTED: Out of memory allocating")
    assert head == f"a training step does not fit into the memory of a device: {cause}"
    # Whole at stage 0: one weight and Adam's two moments. Kept: h reversed, the cosines and the outer sine.
    assert memory["master parameters"] == ["524 kB"]
    assert memory["optimizer state"] == ["1.05 MB"]
    assert memory["of them kept for the backward pass, as traced"] == ["8.59 GB"]
    assert memory["a device has"] == ["750 MB"]  # an eighth of what the process is allowed
    (reversed_h,) = [row for name, row in largest.items() if name == "rev"]
    assert reversed_h[:4] == ["2.15 GB", "1 x", f"f32[{ROWS},{WIDE}]", "forward"]
    assert Path(reversed_h[4]).name == "program.py:8"
    # Each setting that is listed really needs less than a device has: 8.59 GB / 16 = 537 MB, / 8 = 1.07 GB.
    assert len(fitting) == 3
    assert next(iter(fitting)) == "micro_batches=16"
    assert all(row[0].endswith(" MB") and float(row[0].split()[0]) < 750 for row in fitting.values())


def test_a_state_that_does_not_fit(tmp_path):
    message, cause = message_of(INIT, tmp_path)
    head, (memory, largest, fitting) = blocks_of(message)
    assert head == f"the state does not fit into the memory of a device: {cause}"
    assert (memory["master parameters"], memory["optimizer state"]) == (["268 MB"], ["537 MB"])
    assert memory["in all"] == ["805 MB"]
    assert {"params/w", "opt_state/0/mu/w", "opt_state/0/nu/w"} <= set(largest)
    assert largest["params/w"][:4] == ["268 MB", "1 x", "f32[8192,8192]", "state"]
    assert fitting["stage=1"] == ["101 MB"]  # 805 / 8


def test_the_command_prints_it_without_a_traceback_and_exits_1(tmp_path):
    config = runs.write_config(tmp_path)
    sizes = ("train.batch_size=8192", "GPT.vocab_size=65536", "GPT.layers=1", "GPT.dropout=0.0")
    one = "from zerojax.zero import fit; fit.WANTED = 1"  # three take three times as long
    command = f"{LIMIT} import sys; from zerojax.cli import main; {one}; sys.exit(main(sys.argv[1:]))"
    ((code, out, err),) = runs.finish(
        [runs.start(["-c", command, *runs.arguments(config, tmp_path / "run", *sizes)], 2)]
    )
    assert code == 1, err
    assert "Traceback" not in err
    assert "zerojax: error: a training step does not fit into the memory of a device: RESOURCE_EXHAUSTED" in err
    assert "In call to configurable" not in err
    assert "zerojax/models/" in err
    assert "micro_batches=" in err.rpartition("would have fitted")[2]


def test_what_was_compiled_is_what_the_settings_really_take():
    """`step_memory` of changed settings, against a step made with these from the beginning."""
    make_model = lambda key: {"w": jnp.ones((256, 512)), "v": jnp.ones((512, 3))}
    loss_fn = lambda model, batch, rng: jnp.mean((jnp.sin(batch @ model["w"]) @ model["v"]) ** 2)
    batch = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    zero = Zero(stage=0)
    layout = zero.abstract_state(make_model, optax.adamw(1e-3)).layout
    for changes in ({}, {"stage": 3}, {"stage": 2, "micro_batches": 4}, {"precision": "bf16"}):
        other = dataclasses.replace(zero, **changes)
        state = other.abstract_state(make_model, optax.adamw(1e-3))
        compiled = other.train_step(loss_fn).lower(state, batch).compile()
        found = fit.step_memory(zero, zero.train_step(loss_fn), layout, batch, changes)
        assert found == Memory.of(compiled)


def search(bytes_of, limit, zero=None, rows=16):
    """What is found where a device needs `bytes_of(changes)`, and which changes were asked for."""
    asked = []

    def memory_under(changes):
        asked.append(dict(changes))
        return Memory(0, bytes_of(changes), 0)

    found = settings_that_fit(zero or Zero(stage=0), memory_under, Memory(0, bytes_of({}), 0), limit, rows)
    return [dict(f.changes) for f in found.fitting], found, asked


def divided(changes):
    """A device that holds 1,600 bytes, divided by the micro-batches and by stage 3."""
    return 1600 // changes.get("micro_batches", 1) // (4 if changes.get("stage") == 3 else 1)


def test_the_cheapest_settings_come_first():
    fitting, _, asked = search(lambda changes: 10 if changes else 100, 50)
    assert fitting == asked == [{"stage": 1}, {"precision": "bf16"}, {"stage": 2}]


def test_the_fewest_micro_batches_that_fit_are_found_without_trying_too_few():
    fitting, _, asked = search(divided, 110)
    assert fitting[0] == {"micro_batches": 16}
    assert {"micro_batches": 8} not in asked  # an eighth of the temporaries is too much already
    assert {"stage": 3, "micro_batches": 4} in fitting
    assert all(divided(changes) < 110 for changes in fitting)


def test_settings_that_are_there_already_are_not_tried():
    zero = Zero(stage=3, precision="bf16", micro_batches=4, remat="full")
    _, _, asked = search(lambda changes: 100, 50, zero)
    assert [changes for changes in asked if changes != {"micro_batches": changes.get("micro_batches")}] == []
    assert {changes["micro_batches"] for changes in asked} <= {8, 16}


def test_where_none_fits_the_smallest_is_named():
    fitting, found, _ = search(divided, 1)
    assert not fitting
    assert found.smallest.changes["stage"] == 3
    assert found.compiled > 3


def test_settings_that_cannot_be_compiled_are_left_out():
    def bytes_of(changes):
        if changes.get("stage") == 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: the compiler does not like it")
        return 10 if changes else 100

    assert {"stage": 1} not in search(bytes_of, 50)[0]


def test_the_number_that_is_compiled_and_the_time_are_bounded(monkeypatch):
    monkeypatch.setattr(fit, "MOST_COMPILED", 2)
    assert len(search(lambda changes: 100, 50)[2]) == 2
    monkeypatch.setattr(fit, "LONGEST", -1.0)
    assert search(lambda changes: 100, 50)[2] == []


def test_other_errors_pass_and_the_first_one_is_never_hidden():
    def fails():
        raise KeyError("no table")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained("a step", fails):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(OutOfMemoryError, match="a step does not fit") as raised, explained("a step", fails):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")
    assert "allocating 8 bytes" in str(raised.value) and "no table" in str(raised.value)
    assert is_out_of_memory(raised.value.__cause__)
