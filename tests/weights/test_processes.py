"""Two processes of four devices each."""

import pytest
from safetensors.numpy import load_file

from tests import runs
from tests.weights import golden

pytestmark = pytest.mark.slow


def test_two_processes_read_and_write_what_one_does(tmp_path):
    address, script = runs.free_address(), str(runs.ROOT / "tests/weights/pair.py")
    outputs = runs.finish([runs.start([script, address, str(i), str(tmp_path)], devices=4) for i in range(2)])
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    got, want = load_file(tmp_path / "whole" / "model.safetensors"), golden.tensors("llama")
    assert {name: x.tobytes() for name, x in got.items()} == {name: x.tobytes() for name, x in want.items()}
    for _, output, _ in outputs:
        assert f"weights {tmp_path}/whole/model.safetensors: exists already" in output
    assert f"weights {tmp_path}/cut were not written: OSError: [Errno 27] File too large" in outputs[0][1]
    assert f"weights {tmp_path}/cut: process 0 failed on it, see its message" in outputs[1][1]
    assert not list((tmp_path / "cut").iterdir())
