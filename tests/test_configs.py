"""The configurations that come with the project: each is whole, and its model is the one that it names."""

import gin
import jax
import numpy as np
import pytest
from flax import nnx

from tests.runs import ROOT
from zerojax.cli import TRAIN
from zerojax.config.gin import load

INCLUDED = {"base", "llama"}  # by others
PARAMETERS = {"gpt2_124m": 124_439_808, "llama_1b": 1_235_814_400, "llama_8b": 8_030_261_248}  # as published

# What every installation has.
TEXT = [("text_dataset.source = 'pydoc'", "test"), ("text_dataset.tokenizer = 'bytes'", "test")]


@pytest.fixture(autouse=True)
def forget_bindings():
    yield
    gin.clear_config()


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.gin")), ids=lambda path: path.stem)
def test_every_configuration_resolves_and_trains(path):
    config = load(path, TEXT)
    if path.stem in INCLUDED:
        return
    config.check_call(TRAIN, given=("config_text",))
    assert f"{TRAIN}.run_dir = 'runs/{path.stem}'" in config.resolved(TRAIN).splitlines()
    settings = gin.get_bindings(TRAIN)
    zero, dataset = settings["zero"], settings["dataset"]
    state = zero.abstract_state(lambda key: settings["model"](rngs=nnx.Rngs(key)), settings["optimizer"])
    if path.stem in PARAMETERS:
        assert sum(leaf.size for leaf in state.layout.param_leaves) == PARAMETERS[path.stem]
    tokens = jax.ShapeDtypeStruct((settings["batch_size"], dataset.length + 1), np.int32)
    lowered = zero.train_step(settings["loss_fn"]).lower(state, {"tokens": tokens})  # traced in full size, not compiled
    assert lowered.out_info[1]["loss"].shape == ()
