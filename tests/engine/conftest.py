"""Engines that are compiled once."""

import json

import pytest

from tests.engine import tiny


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """A function of `tiny.start`'s arguments that gives one engine for the same ones, as it was at its start."""
    made = {}

    def engine(config, devices=8):
        key = json.dumps([config, devices])
        if key not in made:
            made[key] = tiny.start(config, devices), tmp_path_factory.mktemp("start")
            made[key][0].save_checkpoint(made[key][1], "start")
        engine, directory = made[key]
        engine.load_checkpoint(directory, "start")
        return engine.train()

    return engine
