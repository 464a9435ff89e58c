"""Two processes of four devices each, on one directory."""

import shutil
from pathlib import Path

import pytest
from checkpoint_child import abstract, check, mesh_of, state
from checkpoint_parent import data_file, flip, run_child, run_pair

from zerojax.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    run_pair("save_pair", directory)
    return directory


@pytest.fixture
def saved_by_two(run_of_two, tmp_path):
    return Path(shutil.copytree(run_of_two, tmp_path / "run"))


def test_saved_by_two_restored_by_one_and_by_two(saved_by_two):
    assert {path.name for path in saved_by_two.iterdir()} == {"step_00000001", "step_00000002"}
    for count in (8, 3, 1):
        restored, extra = Checkpoints(saved_by_two).restore_latest(abstract(state(mesh_of(count), 0)))
        check(restored, 2)
        assert extra == {"row": 2}
    run_pair("restore_pair", saved_by_two, "2")


def test_saved_by_one_restored_by_two(tmp_path):
    assert run_child("save_pair", tmp_path).returncode == 0
    run_pair("restore_pair", tmp_path, "2")


def test_two_processes_agree_on_the_last_good_one(saved_by_two):
    flip(data_file(saved_by_two, 2))
    outputs = run_pair("restore_pair", saved_by_two, "1")
    assert any("checksum differs" in errors for _, errors in outputs)
    assert all("going back" in errors for _, errors in outputs)


def test_one_process_that_cannot_write_fails_the_save_of_both(saved_by_two):
    outputs = run_pair("one_of_pair_full", saved_by_two)
    for output, _ in outputs:
        (line,) = [line for line in output.splitlines() if "[Gloo]" not in line]
        assert "step_00000003 was not saved: the disk, a quota or a limit" in line
