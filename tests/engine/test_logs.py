"""What the engine writes and prints."""

import re
import shutil

import numpy as np
import pytest

import zerojax
from tests import runs
from tests.engine import tiny


def logged(directory):
    monitors = {
        name: {"enabled": True, "output_path": str(directory), "job_name": name}
        for name in ("csv_monitor", "tensorboard")
    }
    return tiny.config(**monitors)


def test_csv_and_tensorboard_tell_every_step(tmp_path, capsys):
    engine = tiny.start(logged(tmp_path), devices=2)
    assert list(tmp_path.iterdir()) == []
    norms, losses, data = [], [], tiny.batches(6, rows=2)
    for batch in data[:4]:
        losses += tiny.train(engine, [batch])
        norms.append(engine.get_global_grad_norm())
    engine.save_checkpoint(tmp_path / "checkpoints")  # with which all is told
    want = {
        "step": [1, 2, 3, 4],
        "loss": losses,
        "grad_norm": norms,
        "loss_scale": [1] * 4,
        "skipped": [0] * 4,
        "lr": tiny.RATES[:4],
        "samples": [2, 4, 6, 8],
    }
    table = runs.table(tmp_path / "csv_monitor" / "train.csv")
    assert table.keys() == want.keys()
    events = runs.events(tmp_path / "tensorboard")
    for name, values in want.items():
        np.testing.assert_allclose(table[name], values, rtol=1e-6, err_msg=name)
        if name != "step":
            assert [step for step, _ in events[f"train/{name}"]] == want["step"]
            np.testing.assert_allclose([x for _, x in events[f"train/{name}"]], values, rtol=1e-6, err_msg=name)
    tiny.train(engine, data[4:5])
    assert runs.table(tmp_path / "csv_monitor" / "train.csv")["step"] == [1, 2, 3, 4]  # a step behind
    # Goes on from step 4: what was told of later ones is told anew.
    engine.load_checkpoint(tmp_path / "checkpoints")
    tiny.train(engine, data[4:])
    engine.destroy()
    table = runs.table(tmp_path / "csv_monitor" / "train.csv")
    assert table["step"] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(table["loss"][:4], losses, rtol=1e-6)
    assert [step for step, _ in runs.events(tmp_path / "tensorboard")["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr() == ("", "")
    engine.load_checkpoint(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "csv_monitor")
    (tmp_path / "csv_monitor").write_text("")
    tiny.train(engine, data[:1])
    with pytest.raises(zerojax.errors.RunError, match="cannot write .*csv_monitor"):
        engine.destroy()


def test_lines_come_as_often_as_asked_for(capsys):
    """Those of times when a step ends, those of figures with them."""
    engine = tiny.start(tiny.config(steps_per_print=2, wall_clock_breakdown=True), devices=2)
    for i, batch in enumerate(tiny.batches(4, rows=2)):
        loss = tiny.train(engine, [batch])[0]
        *figures, times = capsys.readouterr().out.splitlines()
        assert re.fullmatch(rf"step {i + 1}  \d+\.\d ms", times)
        told = f"step {i + 1}  loss {loss:.5g}  learning rate {tiny.RATES[i]:.3g}  skipped 0"
        assert figures == ([told] if i % 2 else [])
    engine.destroy()
    assert capsys.readouterr() == ("", "")


def test_nothing_is_told_by_itself(engines, capsys, tmp_path, monkeypatch):
    engine = engines(tiny.config())
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    tiny.train(engine, tiny.batches(2))
    engine.destroy()
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_that_is_not_installed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(zerojax.UserError, match="tensorboard.enabled is True, and tensorboard is not installed"):
        tiny.start(logged(tmp_path), devices=2)
