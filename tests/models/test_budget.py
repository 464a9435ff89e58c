"""What a GPT's step needs by the sizes of the model: against states that are planned, and against compiled programs."""

import functools
import json
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from benchmarks import memory
from zerojax import Zero
from zerojax.models.budget import Sizes, budget, cheapest

# On the CPU, whose compiler keeps a second copy of whole gradients at stages 0 and 1.
COMPILED = [
    (Sizes(vocab_size=512, dim=256, layers=8, heads=4, length=256), 4, 3, "none"),
    (Sizes(vocab_size=1024, dim=512, layers=6, heads=8, length=128), 1, 2, "full"),
    (Sizes(vocab_size=1024, dim=512, layers=6, heads=8, length=128), 1, 2, "dots"),
]
SMALL = Sizes(vocab_size=512, dim=256, layers=6, heads=4, length=128)
MEASURED = json.loads(memory.MEASURED.read_text(encoding="utf-8"))


def bytes_of(leaf):
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def test_the_parameters_are_the_model_s():
    model = jax.eval_shape(lambda rng: nnx.state(memory.model_of(SMALL, rng), nnx.Param), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == SMALL.parameters


@pytest.mark.parametrize("offload", ["", "optimizer", "optimizer+params"])
@pytest.mark.parametrize("stage", range(4))
def test_the_state_is_as_large_as_planned(stage, offload):
    zero = Zero(stage=stage, offload=memory.names(offload))
    state = zero.abstract_state(functools.partial(memory.model_of, SMALL), optax.adamw(1e-3))
    leaves = jax.tree.leaves((state.params, state.opt_state))
    in_host = [leaf.sharding.memory_kind == "pinned_host" for leaf in leaves]
    expected = budget(SMALL, 1, 8, stage, offload=memory.names(offload))
    on_device = sum(bytes_of(leaf) for leaf, there in zip(leaves, in_host, strict=True) if not there)
    # Leaves of fewer than 1024 elements stay whole and on the device.
    assert on_device == pytest.approx(expected.state, rel=0.01, abs=0.01 * 12 * SMALL.parameters / 8)
    host = sum(bytes_of(leaf) for leaf, there in zip(leaves, in_host, strict=True) if there)
    assert host == pytest.approx(expected.host, rel=0.01)


def test_every_setting_is_measured_at_every_stage():
    assert set(MEASURED) == {memory.key(row) for row in memory.TABLE}
    for stage in range(4):
        rows = [row for row in memory.TABLE if row[0] == stage]
        assert {row[1] for row in rows} == {"none", "dots", "full", "offload"}
        assert {row[2] for row in rows} == {"", "optimizer", "optimizer+params"}
        assert {row[3] for row in rows} >= {"fp32", "bf16"}


@pytest.mark.parametrize("row", memory.TABLE, ids=memory.key)
def test_a_step_compiled_for_gpus_is_within_5_percent_of_formula_and_bound(row):
    found, expected = MEASURED[memory.key(row)], memory.expected(memory.GPT_1B, memory.ROWS, *row)
    assert memory.in_all(found) == pytest.approx(expected.formula + expected.bound, rel=0.05)
    assert found["arguments"] == pytest.approx(expected.state, rel=0.01, abs=1e6)
    assert found["host_arguments"] == pytest.approx(expected.host, rel=0.01)
    assert found["host_temporaries"] == pytest.approx(expected.host_kept, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "rows", "stage", "remat"), COMPILED)
def test_a_small_step_compiled_for_the_cpu_is_too(sizes, rows, stage, remat):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    found = memory.measure(sizes, rows, mesh, stage, remat, "", "fp32", None)
    expected = memory.expected(sizes, rows, stage, remat, "", "fp32", None)
    assert memory.in_all(found) == pytest.approx(expected.total, rel=0.05)


def test_the_page_s_tables_are_the_script_s():
    page = memory.PAGE.read_text(encoding="utf-8")
    for name, rows in (("table", memory.table(MEASURED)), ("fits", memory.fits_table())):
        assert memory.replaced(page, name, rows) == page


@pytest.mark.parametrize(("sizes", "gigabytes"), [(memory.GPT_1B, 3), (memory.MODELS["13B"][0], 40)])
def test_the_cheapest_settings_fit(sizes, gigabytes):
    fit = cheapest(sizes, 1, 8, gigabytes * 1e9)
    assert fit is not None and fit.bytes <= 0.9 * gigabytes * 1e9
    assert cheapest(sizes, 1, 8, 1e9) is None
