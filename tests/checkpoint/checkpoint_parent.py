"""Running the scenarios of `checkpoint_child` in processes of their own, and damaging what they have saved."""

import os
import socket
import subprocess
import sys
from pathlib import Path

_CHILD = Path(__file__).with_name("checkpoint_child.py")


def run_child(scenario: str, directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """One process of eight devices."""
    environment = _environment(8)
    command = [sys.executable, _CHILD, scenario, directory, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def run_pair(scenario: str, directory: Path, *arguments: str) -> list[tuple[str, str]]:
    """Two processes of four devices each; their standard output and error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = _environment(4) | {"PAIR_ADDRESS": address}
    children = [
        subprocess.Popen(
            [sys.executable, _CHILD, scenario, directory, *arguments],
            env=environment | {"PAIR_PROCESS": str(process)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode == 0, errors
    return outputs


def _environment(devices: int) -> dict[str, str]:
    return os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def data_file(directory: Path, step: int) -> Path:
    """The file with the arrays of a step: the longest of the checkpoint."""
    files = [path for path in (directory / f"step_{step:08d}").rglob("d/*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
