"""Where PyTorch and transformers are installed: the golden files are theirs, and they read what we write."""

import shutil

import numpy as np
import pytest

from tests.weights import golden
from zerojax.weights import load_weights, save_weights

pytest.importorskip("torch", reason="needs the packages torch and transformers")
pytest.importorskip("transformers", reason="needs the packages torch and transformers")

from tests.weights import make_golden  # noqa: E402


def from_folder(name, folder):
    shutil.copy(golden.GOLDEN / f"weights_{name}.json", folder / "config.json")
    model, told = make_golden.CASES[name][0].from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("name", make_golden.CASES)
def test_golden_logits_are_theirs(name, tmp_path):
    shutil.copy(golden.weights(name), tmp_path / "model.safetensors")
    given = {key: x for key, x in golden.arrays(name).items() if key != "logits"}
    got = make_golden.logits(from_folder(name, tmp_path), given)
    np.testing.assert_allclose(got, golden.arrays(name)["logits"], atol=1e-5)


@pytest.mark.parametrize("name", golden.KINDS)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_they_read_what_we_write(name, shard_bytes, tmp_path):
    model = load_weights(golden.weights(name), golden.make(name), golden.KINDS[name])
    save_weights(tmp_path, model, golden.KINDS[name], shard_bytes=shard_bytes)
    given = {key: x for key, x in golden.arrays(name).items() if key != "logits"}
    got = make_golden.logits(from_folder(name, tmp_path), given)
    np.testing.assert_allclose(got, golden.arrays(name)["logits"], atol=1e-5)
