"""Two processes of four devices each against one of eight."""

import numpy as np
import pytest

from tests import engine_pair, runs
from tests.engine import tiny

pytestmark = pytest.mark.slow


def test_two_processes_train_save_and_load_as_one_does(tmp_path):
    address, script = runs.free_address(), str(runs.ROOT / "tests/engine_pair.py")
    pair = [runs.start([script, address, str(i), str(tmp_path)], devices=4) for i in range(2)]
    engine = engine_pair.start()
    want = engine_pair.train(engine, engine_pair.STEPS, [])
    alone = engine.module_state_dict()
    outputs = runs.finish(pair)
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    first, second = (dict(np.load(tmp_path / f"results_{i}.npz")) for i in range(2))
    for name in "early", "late", "norms", "rates":
        np.testing.assert_allclose(first[name], want[name], rtol=1e-5, err_msg=name)
    for name in {*want, *alone, "evaluated", "on"}:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    np.testing.assert_allclose(first["early"], first["late"], rtol=1e-6)
    assert (first["client"], second["client"]) == (0, 0)

    other = engine_pair.start()  # loads what the two have saved, and goes on as they did
    path, _ = other.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step3")
    for name, x in other.module_state_dict().items():
        np.testing.assert_allclose(x, alone[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert other.training_dataloader.position == (1, 16)
    assert float(other.train_batch()) == pytest.approx(first["on"][0], rel=1e-5)
    for name, x in other.module_state_dict().items():
        np.testing.assert_allclose(x, first[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert (tmp_path / "model.safetensors").exists()

    for found in first, second:
        assert "tag is 'of_0' in process 0 and another one in process 1; accepted: one tag" in str(found["tag"])
        assert "has 3 rows in this process; accepted: 4 (1 x 8 devices / 2 processes)" in str(found["rows"])
        assert "no checkpoint of tag 'absent'; accepted: global_step3" in str(found["absent"])
    assert "process 0 asked for a loss before its step, and other processes did not for 1 seconds" in str(
        first["alone"]
    )
    assert "that of process 0 is taken" in str(second["warned"]) and (tmp_path / "of_0").is_dir()


def test_the_shares_make_the_global_micro_batch():
    loader = engine_pair.start().training_dataloader
    assert [len(batch["y"]) for batch in loader] == [8] * 4
    assert tiny.batches(1)[0]["y"].shape == (8,)
