"""Joining the processes of a run into one jax.distributed cluster."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zerojax.errors import UserError

# What jax's own cluster detection looks for. It is read here too, so that a job of one process needs no coordinator.
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
OPEN_MPI_ADDRESS = "OMPI_MCA_orte_hnp_uri"  # gone since Open MPI 5

# Each value of a run of several processes: its argument, then the variables that stand in for it, first found first.
COORDINATOR = ("--coordinator", "ZEROJAX_COORDINATOR", "JAX_COORDINATOR_ADDRESS")
NUM_PROCESSES = ("--num-processes", "ZEROJAX_NUM_PROCESSES", "JAX_NUM_PROCESSES")
PROCESS_ID = ("--process-id", "ZEROJAX_PROCESS_ID", "JAX_PROCESS_ID")


@dataclass(frozen=True)
class Cluster:
    """What a job scheduler says about this process."""

    kind: Literal["slurm", "ompi"]
    num_processes: int
    process_id: int
    local_id: int
    tells_address: bool


@dataclass(frozen=True)
class Processes:
    """How this process joins the others.

    Attributes:
        coordinator: "HOST:PORT" of process 0; None when jax reads it from the scheduler.
        num_processes: the number of processes of the run, at least 2.
        process_id: this process's number, from 0.
        detection: jax's ``cluster_detection_method``.
        local_device_ids: the accelerators this process sees; None for all (CPU devices are never hidden).
    """

    coordinator: str | None
    num_processes: int
    process_id: int
    detection: Literal["slurm", "ompi", "deactivate"]
    local_device_ids: tuple[int, ...] | None


def initialize(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> bool:
    """Joins the other processes of the run; does nothing when there is only this one.

    To be called before jax touches a device. The arguments come before ``ZEROJAX_COORDINATOR``,
    ``ZEROJAX_NUM_PROCESSES`` and ``ZEROJAX_PROCESS_ID``, these before the same names with ``JAX_`` (and
    ``JAX_COORDINATOR_ADDRESS``), and all of them before what SLURM or Open MPI say.

    Returns:
        Whether the run has more than one process.

    Raises:
        UserError: the values are incomplete or contradict each other.
    """
    processes = resolve(coordinator, num_processes, process_id, os.environ)
    if processes is None:
        return False
    import jax

    jax.distributed.initialize(
        coordinator_address=processes.coordinator,
        num_processes=processes.num_processes,
        process_id=processes.process_id,
        local_device_ids=processes.local_device_ids,
        cluster_detection_method=processes.detection,
    )
    return True


def resolve(
    coordinator: str | None, num_processes: int | None, process_id: int | None, environ: Mapping[str, str]
) -> Processes | None:
    """The processes of the run as the arguments and the environment name them; None for a single process.

    >>> resolve("10.0.0.1:1234", 2, 1, {}).process_id
    1
    >>> resolve(None, None, None, {}) is None
    True
    >>> resolve("10.0.0.1:1234", 2, None, {})
    Traceback (most recent call last):
    zerojax.errors.UserError: --coordinator 10.0.0.1:1234, --num-processes 2: --process-id is missing
    """
    found_address = _text(COORDINATOR, coordinator, environ)
    found_count = _integer(NUM_PROCESSES, num_processes, environ)
    found_id = _integer(PROCESS_ID, process_id, environ)
    given = {source: value for source, value in (found_address, found_count, found_id) if value is not None}
    address, count, index = found_address[1], found_count[1], found_id[1]

    cluster = _cluster(environ)
    if cluster is not None:
        count = cluster.num_processes if count is None else count
        index = cluster.process_id if index is None else index
    if count == 1 and address is None and index is None:
        index = 0
    _check(given, found_count[0], count, found_id[0], index)
    if count is None or count == 1:
        return None
    assert index is not None
    if address is not None:
        _check_address(found_address[0], address)
        return Processes(address, count, index, "deactivate", _local_device_ids(cluster, environ))
    if cluster is None:
        raise UserError(f"{_listing(given)}: {COORDINATOR[0]} is missing")
    if not cluster.tells_address:
        raise UserError(
            f"Open MPI 5 runs {count} processes but does not say where process 0 is: set {COORDINATOR[0]} HOST:PORT "
            f"or {COORDINATOR[1]}"
        )
    return Processes(None, count, index, cluster.kind, None)


def _cluster(environ: Mapping[str, str]) -> Cluster | None:
    if all(name in environ for name in SLURM):
        count, index, local = (_integer((name,), None, environ)[1] for name in SLURM[2:])
        kind: Literal["slurm", "ompi"] = "slurm"
    elif all(name in environ for name in OPEN_MPI):
        count, index, local = (_integer((name,), None, environ)[1] for name in OPEN_MPI)
        kind = "ompi"
    else:
        return None
    assert count is not None and index is not None and local is not None
    return Cluster(kind, count, index, local, kind == "slurm" or OPEN_MPI_ADDRESS in environ)


def _local_device_ids(cluster: Cluster | None, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """One accelerator for each process of a scheduler's job, as jax does it; jax itself reads JAX_LOCAL_DEVICE_IDS."""
    if cluster is None or "JAX_LOCAL_DEVICE_IDS" in environ:
        return None
    return (cluster.local_id,)


def _text(names: tuple[str, ...], argument: str | None, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """The value and the name it was found under: the argument itself, else the first variable that is set."""
    if argument is not None:
        return names[0], argument
    return next(((name, environ[name]) for name in names if environ.get(name)), (names[0], None))


def _integer(names: tuple[str, ...], argument: int | None, environ: Mapping[str, str]) -> tuple[str, int | None]:
    if argument is not None:
        return names[0], argument
    source, text = _text(names, None, environ)
    if text is None:
        return source, None
    try:
        return source, int(text)
    except ValueError:
        raise UserError(f"{source}={text}: expected an integer") from None


def _check(
    given: Mapping[str, str | int], count_source: str, count: int | None, id_source: str, index: int | None
) -> None:
    if not given and count is None:
        return
    missing = [source for source, value in ((count_source, count), (id_source, index)) if value is None]
    if missing:
        raise UserError(f"{_listing(given)}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    assert count is not None and index is not None
    if count < 1:
        raise UserError(f"{_item(count_source, count)}: expected 1 or more")
    if not 0 <= index < count:
        raise UserError(
            f"{_item(id_source, index)}: expected 0 to {count - 1}, as {_item(count_source, count)} says"
        )


def _check_address(source: str, address: str) -> None:
    host, separator, port = address.rpartition(":")
    if not (host and separator and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(f"{_item(source, address)}: expected HOST:PORT, such as 10.0.0.1:1234")


def _listing(given: Mapping[str, str | int]) -> str:
    return ", ".join(_item(source, value) for source, value in given.items())


def _item(source: str, value: str | int) -> str:
    return f"{source} {value}" if source.startswith("--") else f"{source}={value}"
