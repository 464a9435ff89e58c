import logging
import os
import subprocess

import jax
import numpy as np
import pytest
from checkpoint_child import abstract, check, mesh_of, state
from checkpoint_parent import data_file, flip, run_child

from zerojax.checkpoint import CheckpointError, Checkpoints
from zerojax.errors import UserError


@pytest.fixture
def template():
    return abstract(state(mesh_of(8), 0))


def saved_run(directory, steps, keep=3):
    with Checkpoints(directory, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(state(mesh_of(8), step), {"row": step})


def test_an_empty_directory_has_nothing_to_restore(tmp_path, template):
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.steps() == []
    assert checkpoints.latest_step() is None
    assert checkpoints.restore_latest(template) is None


def test_the_last_n_are_kept(tmp_path, template):
    saved_run(tmp_path, [1, 2, 5, 10, 100], keep=2)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [10, 100]
    assert checkpoints.latest_step() == 100
    restored, extra = checkpoints.restore_latest(template)
    check(restored, 100)
    assert extra == {"row": 100}
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000010", "step_00000100"}


@pytest.mark.parametrize("keep", [1, 5])
def test_any_number_can_be_kept(tmp_path, keep):
    saved_run(tmp_path, [1, 2, 3, 4, 5, 6], keep=keep)
    assert Checkpoints(tmp_path).steps() == list(range(7 - keep, 7))


def test_the_state_may_be_donated_at_once(tmp_path, template):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 6):
            current = state(mesh_of(8), step, width=20_000)
            checkpoints.save(current)
            current = overwrite(current)
            np.testing.assert_array_equal(current.params["b"], -1)
            checkpoints.wait()
            big = abstract(state(mesh_of(8), 0, width=20_000))
            check(checkpoints.restore_latest(big)[0], step, width=20_000)


def test_the_same_step_may_be_saved_again(tmp_path, template):
    saved_run(tmp_path, [1, 2, 2, 2])
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1, 2]
    check(checkpoints.restore_latest(template)[0], 2)


def test_going_on_from_an_earlier_step_supersedes_the_later_ones(tmp_path, template):
    saved_run(tmp_path, [1, 2, 3])
    saved_run(tmp_path, [2])
    assert Checkpoints(tmp_path).steps() == [1, 2]


DAMAGE = {
    "flipped": (lambda run: flip(data_file(run, 3)), "checksum differs"),
    "truncated": (lambda run: os.truncate(data_file(run, 3), 100), "has 100 bytes instead of"),
    "emptied": (lambda run: os.truncate(data_file(run, 3), 0), "has 0 bytes instead of"),
    "missing": (lambda run: data_file(run, 3).unlink(), "is missing"),
    "index missing": (lambda run: (run / "step_00000003" / "manifest.ocdbt").unlink(), "is missing"),
    "metadata garbage": (lambda run: (run / "step_00000003" / "_METADATA").write_text("{"), "instead of"),
    "manifest garbage": (lambda run: (run / "step_00000003" / "manifest.json").write_text("{}"), "is damaged"),
    "manifest missing": (lambda run: (run / "step_00000003" / "manifest.json").unlink(), "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, template, caplog, kind):
    damage, fault = DAMAGE[kind]
    saved_run(tmp_path, [1, 2, 3])
    damage(tmp_path)
    with caplog.at_level(logging.WARNING):
        restored, extra = Checkpoints(tmp_path).restore_latest(template)
    check(restored, 2)
    assert extra == {"row": 2}
    (record,) = caplog.records
    assert str(tmp_path / "step_00000003") in record.getMessage()
    assert fault in record.getMessage()
    saved_run(tmp_path, [3])  # the run goes on, and saves that step again
    check(Checkpoints(tmp_path).restore_latest(template)[0], 3)


def test_all_damaged_is_an_error_and_no_new_start(tmp_path, template):
    saved_run(tmp_path, [1, 2])
    for step in (1, 2):
        flip(data_file(tmp_path, step))
    with pytest.raises(CheckpointError, match="no good checkpoint") as caught:
        Checkpoints(tmp_path).restore_latest(template)
    assert "step_00000001" in str(caught.value) and "step_00000002" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_model_is_no_damage(tmp_path):
    saved_run(tmp_path, [1, 2])
    with pytest.raises(UserError, match=r"params/b has shape \(24,\) in the checkpoint, \(25,\) here"):
        Checkpoints(tmp_path).restore_latest(abstract(state(mesh_of(8), 0, width=25)))


@pytest.mark.parametrize("scenario", ["killed_while_writing", "killed_before_commit"])
def test_killed_while_saving(tmp_path, template, caplog, scenario):
    assert run_child(scenario, tmp_path).returncode == -9
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "step_00000002.tmp"}
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1]
    with caplog.at_level(logging.WARNING):
        restored, extra = checkpoints.restore_latest(template)
    check(restored, 1)
    assert extra == {"row": 1}
    assert "step_00000002.tmp was not complete" in caplog.text
    saved_run(tmp_path, [2])
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "step_00000002"}


def test_a_file_that_may_not_grow(tmp_path, template):
    child = run_child("file_size_limit", tmp_path)
    assert child.returncode == 0, child.stderr
    (line,) = child.stdout.splitlines()
    assert f"checkpoint {tmp_path / 'step_00000002'} was not saved: the disk, a quota or a limit" in line
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    check(Checkpoints(tmp_path).restore_latest(template)[0], 1)


@pytest.fixture
def small_disk(tmp_path):
    point = tmp_path / "disk"
    point.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", point], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    yield point
    subprocess.run(["umount", point], check=True)


def test_a_full_disk(small_disk, template):
    checkpoints = Checkpoints(small_disk, keep=1)
    checkpoints.save(state(mesh_of(8), 1))
    with pytest.raises(CheckpointError, match=r"is full: \d\.\d MB free, 6\.8 MB needed; earlier .* are intact"):
        checkpoints.save(state(mesh_of(8), 2, width=100_000))
    assert checkpoints.steps() == [1]
    assert [path.name for path in small_disk.iterdir()] == ["step_00000001"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of orbax, whose loop closes early
def test_a_disk_that_fills_while_saving(small_disk, template, monkeypatch):
    checkpoints = Checkpoints(small_disk, keep=1)
    checkpoints.save(state(mesh_of(8), 1))
    monkeypatch.setattr("zerojax.checkpoint.saving.check_space", lambda path, needed: None)
    checkpoints.save(state(mesh_of(8), 2, width=100_000))
    with pytest.raises(CheckpointError, match="step_00000002 was not saved: the disk, .* is exhausted"):
        checkpoints.save(state(mesh_of(8), 3))
    assert checkpoints.steps() == [1]
    check(checkpoints.restore_latest(template)[0], 1)
    checkpoints.save(state(mesh_of(8), 3))
    checkpoints.close()
    assert [path.name for path in small_disk.iterdir()] == ["step_00000003"]


def test_a_program_that_ends_during_a_save_says_so(tmp_path):
    child = run_child("left_open", tmp_path)
    assert child.returncode == 0
    assert Checkpoints(tmp_path).steps() == [1] or "step_00000001 was not saved" in child.stderr


def test_wrong_arguments(tmp_path):
    with pytest.raises(UserError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="accepted: a directory"):
        Checkpoints(tmp_path / "file")
