"""The engine's loop against a loop over `Zero`'s own step, bit for bit."""

import jax
import numpy as np
import pytest

import zerojax
from tests.engine import tiny
from zerojax import optim

SETTINGS = [(0, 1), (0, 3), (3, 1), (3, 3)]


def joined(group):
    """The batch whose every M-th row from row i on is micro-batch i."""
    count, rows = len(group), len(group[0]["y"])
    batch = {name: np.empty((count * rows, *x.shape[1:]), x.dtype) for name, x in group[0].items()}
    for i, micro_batch in enumerate(group):
        for name, x in micro_batch.items():
            batch[name][i::count] = x
    return batch


def groups(accumulation, steps=3):
    data = tiny.batches(steps * accumulation)
    return [data[i * accumulation :][:accumulation] for i in range(steps)]


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: f"stage{setting[0]}-accumulation{setting[1]}")
def case(request, engines):
    """An engine, and the zero, state and step that a user of `Zero` would have."""
    stage, accumulation = request.param
    zero = zerojax.Zero(stage=stage, micro_batches=accumulation, clip_norm=tiny.CLIP)
    engine = engines(tiny.config(stage, accumulation))
    optimizer = optim.adamw(optim.warmup_lr(optimizer_lr=0.01, **tiny.WARMUP), weight_decay=0.1)
    return engine, zero, zero.init(tiny.make_model, optimizer), zero.train_step(tiny.loss_fn)


def test_losses_parameters_and_the_program_are_zero_s(case):
    engine, zero, state, step = case
    data = groups(zero.micro_batches)
    assert (
        engine.train_step.lower(engine.state, joined(data[0])).as_text() == step.lower(state, joined(data[0])).as_text()
    )
    for group in data:
        state, metrics, losses = step.run(state, joined(group))
        assert tiny.train(engine, group) == [float(loss) for loss in losses]
        assert engine.get_global_grad_norm() == float(metrics["grad_norm"]) > tiny.CLIP
    tiny.assert_same(engine.state.params, state.params)
    tiny.assert_same(engine.state.opt_state, state.opt_state)
    assert tiny.compilations(engine) == 1  # compiled once


@pytest.mark.parametrize("setting", SETTINGS[1:3])
def test_train_batch_is_the_loop(setting, engines):
    configured, (_, accumulation) = tiny.config(*setting), setting
    losses, data = [], groups(accumulation)
    engine = engines(configured)
    for group in data:
        losses.append(np.mean(tiny.train(engine, group), dtype=np.float32))
    params = engine.module_state_dict()
    counts = engine.global_steps, engine.micro_steps, engine.global_samples
    engine = engines(configured)
    iterator = iter([batch for group in data for batch in group])
    np.testing.assert_allclose([float(engine.train_batch(iterator)) for _ in data], losses, rtol=1e-6)
    assert next(iterator, None) is None
    tiny.assert_same(engine.module_state_dict(), params)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == counts
    assert counts == (3, 3 * accumulation, 24 * accumulation)


def test_a_state_in_files(engines, tmp_path):
    """Trained, saved and loaded again."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "files")}
    plain, engine = (
        engines(tiny.config(3, 3, zero_optimization={"stage": 3, **offload}))
        for offload in ({}, {"offload_optimizer": nvme})
    )
    first, second, third = groups(3)
    for group in (first, second):
        assert tiny.train(engine, group) == pytest.approx(tiny.train(plain, group), rel=1e-5)
    engine.save_checkpoint(tmp_path / "saved")
    went_on = tiny.train(engine, third), engine.module_state_dict()
    engine.load_checkpoint(tmp_path / "saved")
    assert {type(x).__name__ for x in jax.tree.leaves(engine.state.opt_state)} >= {"DiskArray"}
    assert tiny.train(engine, third) == went_on[0]
    tiny.assert_same(engine.module_state_dict(), went_on[1])


def test_offloaded_states_train_the_same(engines):
    cpu = {"device": "cpu", "pin_memory": True}
    found = []
    for offload in ({}, {"offload_optimizer": cpu, "offload_param": cpu}):
        engine = engines(tiny.config(3, 3, zero_optimization={"stage": 3, **offload}))
        losses = [tiny.train(engine, group) for group in groups(3)]
        found.append((losses, engine.get_global_grad_norm(), engine.module_state_dict()))
        kinds = {x.sharding.memory_kind for x in (engine.state.params["up"], engine.state.opt_state[0].mu["up"])}
        assert kinds == {"pinned_host" if offload else "device"}
    assert found[0][:2] == found[1][:2]
    tiny.assert_same(found[0][2], found[1][2])
