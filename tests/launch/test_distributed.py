"""How a process finds the others: arguments, environment, SLURM and Open MPI."""

import os
import socket
import subprocess
import sys

import pytest

from zerojax.errors import UserError
from zerojax.launch.distributed import Processes, initialize, resolve

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
OPEN_MPI_5 = {name: value for name, value in OPEN_MPI_4.items() if name.startswith("OMPI_COMM")}


def test_one_process_needs_nothing():
    assert resolve(None, None, None, {}) is None
    assert resolve(None, 1, None, {}) is None
    assert resolve("localhost:1234", 1, 0, {}) is None
    assert resolve(None, None, None, {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert resolve(None, None, None, {**OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) is None


def test_arguments_come_before_variables_and_those_before_jax_s():
    environ = {
        "ZEROJAX_COORDINATOR": "a:1",
        "JAX_COORDINATOR_ADDRESS": "b:2",
        "ZEROJAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
    }
    assert resolve(None, None, None, environ) == Processes("a:1", 3, 2, "deactivate", None)
    assert resolve("c:3", 8, 0, environ) == Processes("c:3", 8, 0, "deactivate", None)


def test_schedulers_are_left_to_jax_and_fill_what_is_missing():
    assert resolve(None, None, None, SLURM) == Processes(None, 2, 1, "slurm", None)
    assert resolve(None, None, None, OPEN_MPI_4) == Processes(None, 4, 3, "ompi", None)
    # With an address of one's own, each process of the job still takes the accelerator of its place on the host.
    assert resolve("a:1", None, None, SLURM) == Processes("a:1", 2, 1, "deactivate", (0,))
    assert resolve("a:1", None, None, OPEN_MPI_5) == Processes("a:1", 4, 3, "deactivate", (1,))
    assert resolve("a:1", None, None, {**OPEN_MPI_5, "JAX_LOCAL_DEVICE_IDS": "0,1"}).local_device_ids is None


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (("a:1", None, None), {}, "--coordinator a:1: --num-processes and --process-id are missing"),
        (("a:1", 2, None), {}, "--coordinator a:1, --num-processes 2: --process-id is missing"),
        ((None, 2, 0), {}, "--num-processes 2, --process-id 0: --coordinator is missing"),
        (("a:1", 2, 2), {}, "--process-id 2: expected 0 to 1, as --num-processes 2 says"),
        (("a:1", 0, 0), {}, "--num-processes 0: expected 1 or more"),
        ((None, 1, 1), {}, "--process-id 1: expected 0 to 0, as --num-processes 1 says"),
        (("localhost", 2, 0), {}, "--coordinator localhost: expected HOST:PORT, such as 10.0.0.1:1234"),
        (("a:http", 2, 0), {}, "--coordinator a:http: expected HOST:PORT, such as 10.0.0.1:1234"),
        ((None, None, None), {"ZEROJAX_NUM_PROCESSES": "two"}, "ZEROJAX_NUM_PROCESSES=two: expected an integer"),
        (
            (None, None, None),
            {"JAX_COORDINATOR_ADDRESS": "a:1"},
            "JAX_COORDINATOR_ADDRESS=a:1: --num-processes and --process-id are missing",
        ),
        ((None, None, 5), SLURM, "--process-id 5: expected 0 to 1, as --num-processes 2 says"),
        (
            (None, None, None),
            OPEN_MPI_5,
            "Open MPI 5 runs 4 processes but does not say where process 0 is: set --coordinator HOST:PORT "
            "or ZEROJAX_COORDINATOR",
        ),
    ],
)
def test_incomplete_or_contradictory_values(arguments, environ, message):
    with pytest.raises(UserError) as error:
        resolve(*arguments, environ)
    assert str(error.value) == message


def test_initialize_leaves_a_single_process_alone(monkeypatch):
    for name in os.environ:
        if name.startswith(("ZEROJAX_", "JAX_COORDINATOR", "JAX_NUM", "JAX_PROCESS", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    assert initialize() is False


WORKER = """
import sys
from zerojax.launch.distributed import initialize
assert initialize(sys.argv[1], 2, int(sys.argv[2]))
import jax
print(jax.process_index(), jax.process_count(), jax.device_count(), jax.local_device_count())
"""


def test_two_processes_see_each_other_s_devices():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    commands = [[sys.executable, "-c", WORKER, address, str(i)] for i in range(2)]
    processes = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [output.split() for output in outputs] == [["0", "2", "8", "4"], ["1", "2", "8", "4"]]
