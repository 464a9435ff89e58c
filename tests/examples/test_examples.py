"""Each example, run as its first line says, for a few steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_trains_in_shards_and_is_short(example):
    source = (ROOT / "examples" / example).read_text(encoding="utf-8")
    assert f"`python examples/{example}" in source.splitlines()[0]
    assert len(source.splitlines()) < 60

    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, f"examples/{example}", "10"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "ZeRO stage 3 on 8 devices" in run.stdout
    state = re.search(r"^state between steps .* (\d\.\d+)$", run.stdout, re.MULTILINE)
    assert state and float(state[1]) < 1.05, run.stdout  # close to an eighth of the whole, as ZeRO's formula has it
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert losses and losses[-1] < 2.5, run.stdout
