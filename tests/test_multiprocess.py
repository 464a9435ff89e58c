"""Two processes of four devices each against one of eight."""

import time

import jax
import numpy as np
import pytest

from tests import runs
from tests.zero import reference

pytestmark = pytest.mark.slow

STEPS = 20

# The command in a process that cannot write its logs when it has told of the step given; others cannot know.
FAILS_ALONE = """
import sys
from zerojax import cli
from zerojax.errors import RunError
from zerojax.monitor import RunLogs
write = RunLogs.write
def write_and_fail(self, table, step, values):
    write(self, table, step, values)
    if step == int(sys.argv[1]):
        raise RunError("cannot write")
RunLogs.write, cli.PATIENCE = write_and_fail, 1.0
sys.exit(cli.main(sys.argv[2:]))
"""


def run_pair(config, run_dir, *settings, program=("-m", "zerojax.cli")):
    """The command in two processes; exit code, output and errors of each."""
    command = [*program, *runs.arguments(config, run_dir, *settings), "--coordinator", runs.free_address()]
    return runs.finish(
        [runs.start([*command, "--num-processes", "2", "--process-id", str(i)], devices=4) for i in range(2)]
    )


def assert_close(got, want, rtol):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, err_msg=name)


def test_two_processes_log_what_one_does_and_one_goes_on_from_them(tmp_path):
    config = runs.write_config(tmp_path)
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert runs.run(config, alone) == 0
    (code, output, errors), (other_code, other_output, other_errors) = run_pair(config, together, "train.steps=12")
    assert (code, other_code) == (0, 0), errors + other_errors
    assert "35,480 parameters, stage 3 on data 8, 12 steps, from the beginning" in output
    assert "parameters" not in other_output and "loss" not in other_output
    assert runs.run(config, together) == 0
    for name in ("train.csv", "validation.csv"):
        assert_close(runs.table(together / name), runs.table(alone / name), rtol=1e-6)


def test_the_python_interface_equals_a_plain_loop(tmp_path):
    address = runs.free_address()
    script, results = str(runs.ROOT / "tests/api_pair.py"), str(tmp_path / "results")
    outputs = runs.finish([runs.start([script, address, str(i), str(STEPS), results], devices=4) for i in range(2)])
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    losses, params = reference.train(reference.adamw(3e-3), STEPS)
    for process in range(2):
        found = np.load(f"{results}_{process}.npz")
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
        leaves = [found[f"arr_{i}"] for i in range(len(found.files) - 1)]
        reference.assert_close(jax.tree.unflatten(jax.tree.structure(params), leaves), params, rtol=1e-5)


def test_every_process_tells_of_wrong_input(tmp_path):
    outputs = run_pair(runs.write_config(tmp_path), tmp_path / "run", "train.batch_size=12")
    for code, _, errors in outputs:
        assert code == 2
        assert "batch_size is 12; accepted: a multiple of 8" in errors
    assert not (tmp_path / "run").exists()


def test_a_process_that_fails_alone_does_not_wait_for_the_others(tmp_path):
    config = runs.write_config(tmp_path)
    began = time.monotonic()
    (code, _, errors), (other_code, _, _) = run_pair(config, tmp_path, program=("-c", FAILS_ALONE, "3"))
    assert code == 1
    assert "zerojax: error: cannot write\n" in errors
    assert other_code != 0
    assert time.monotonic() - began < runs.TIMEOUT / 2  # jax would wait for 5 minutes
