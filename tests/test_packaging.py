"""What importing costs, and that what is declared is there."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zerojax

ROOT = Path(__file__).parents[1]
HEAVY = ("gin", "grain", "matplotlib", "orbax.checkpoint", "rich", "tensorboard", "tensorstore", "tokenizers")


def in_a_fresh_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["info", "--help"]])
def test_help_does_not_import_jax(arguments):
    output = in_a_fresh_python(
        "import sys\nfrom zerojax.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print('imported:', sorted({'jax', 'numpy', 'gin'} & set(sys.modules)))"
    )
    assert output.startswith("usage: zerojax") and output.endswith("imported: []\n")


def test_importing_costs_little_over_jax():
    # The least of three, since the machine does other things as well.
    code = """
import json, time
start = time.perf_counter()
import jax
middle = time.perf_counter()
import zerojax
end = time.perf_counter()
print(json.dumps([middle - start, end - middle]))
"""
    runs = [json.loads(in_a_fresh_python(code)) for _ in range(3)]
    jax_seconds, zerojax_seconds = (min(run[i] for run in runs) for i in range(2))
    assert zerojax_seconds < 0.2 * jax_seconds


def test_the_public_names_import_nothing_heavy():
    output = in_a_fresh_python(
        "import sys, zerojax\n"
        "names = [name for name in dir(zerojax) if not name.startswith('_')]\n"
        "for name in names:\n    getattr(zerojax, name)\n"
        f"print(names, '|', sorted({set(HEAVY)!r} & set(sys.modules)))"
    )
    names, heavy = output.strip().split(" | ")
    assert "'Zero'" in names and "'make_mesh'" in names
    assert heavy == "[]"


def test_an_unknown_public_name():
    with pytest.raises(AttributeError, match="has no attribute 'Zeor'"):
        zerojax.Zeor  # noqa: B018


def test_kernels_import_jax_only():
    output = in_a_fresh_python(
        "import sys, pallas_kernels\nprint([name for name in sys.modules if name.startswith('zerojax')])"
    )
    assert output.strip() == "[]"


def test_declared_facts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert set(project["optional-dependencies"]) == {"cuda12", "cuda13", "data", "tracking", "planning", "dev"}
