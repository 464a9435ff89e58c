"""The command: exit codes, messages, and what it does before jax is imported."""

import os
import subprocess
import sys

import pytest

from zerojax import cli
from zerojax.errors import RunError, UserError


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zerojax.cli", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "the following arguments are required: COMMAND (see zerojax --help)"),
        (("train",), "the following arguments are required: CONFIG.gin (see zerojax train --help)"),
        (("train", "a.gin", "--emulate", "0"), "argument --emulate: '0': expected a positive integer (see zerojax"),
        (("train", "a.gin", "--set", "Zero.stage"), "argument --set: 'Zero.stage': expected NAME=VALUE, such as"),
        (("train", "a.gin", "--process-id", "x"), "argument --process-id: invalid int value: 'x' (see zerojax train"),
        (("train", "a.gin", "--what"), "unrecognized arguments: --what"),
        (("training",), "argument COMMAND: invalid choice: 'training'"),
        (("train", "nowhere.gin"), "nowhere.gin: cannot read the configuration: No such file or directory"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(capsys, arguments, expected):
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"zerojax: error: {expected}")
    assert output.err.count("\n") == 1


def test_a_deepspeed_configuration_is_converted(capsys, tmp_path):
    source, target = tmp_path / "ds_config.json", tmp_path / "out.gin"
    source.write_text('{"train_batch_size": 32, "zero_optimization": {"stage": 2}}')
    assert cli.main(["config", "convert", str(source), "--devices", "8", "-o", str(target)]) == 0
    assert cli.main(["config", "convert", str(source), "--devices", "8"]) == 0
    assert capsys.readouterr().out == target.read_text()
    assert "Zero.stage = 2" in target.read_text().splitlines()
    source.write_text('{"train_batch_size": 32, "zero_optimisation": {"stage": 2}}')
    assert cli.main(["config", "convert", str(source)]) == 2
    assert "zero_optimization" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (UserError("stage is 4; accepted: 0 to 3\n  In call to configurable 'Zero'"), 2, "zerojax: error: stage is 4;"),
        (RunError("no good checkpoint\n  In call to configurable 'train'"), 1, "zerojax: error: no good checkpoint\n"),
        (RuntimeError("out of memory"), 1, "Traceback (most recent call last)"),
        (KeyboardInterrupt(), 1, "zerojax: interrupted"),
    ],
)
def test_exit_code_of_a_run(capsys, monkeypatch, error, code, expected):
    def train(arguments):
        raise error

    monkeypatch.setattr(cli, "train", train)
    assert cli.main(["train", "a.gin"]) == code
    printed = capsys.readouterr().err
    assert printed.startswith(expected)
    assert "Traceback" in printed or printed.count("\n") == 1


def test_a_run_that_ends_well(monkeypatch):
    seen = {}
    monkeypatch.setattr(cli, "train", lambda arguments: seen.update(vars(arguments)))
    arguments = "train a.gin --set Zero.stage=1 --set STEPS=3 --run-dir d"
    processes = "--coordinator h:1 --num-processes 2 --process-id 1"
    assert cli.main([*arguments.split(), *processes.split()]) == 0
    del seen["run"]
    assert seen == {
        "config": "a.gin",
        "set": ["Zero.stage=1", "STEPS=3"],
        "emulate": None,
        "run_dir": "d",
        "coordinator": "h:1",
        "num_processes": 2,
        "process_id": 1,
    }


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, "--xla_force_host_platform_device_count=8"),
        ("--xla_dump_to=/tmp/x", "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=8"),
        (
            "--xla_force_host_platform_device_count=2 --xla_dump_to=/tmp/x",
            "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=8",
        ),
    ],
)
def test_emulate_keeps_the_user_s_other_flags(flags, expected):
    environ = {} if flags is None else {"XLA_FLAGS": flags}
    cli.emulate(8, environ)
    assert environ == {"XLA_FLAGS": expected, "JAX_PLATFORMS": "cpu"}


def test_info_on_emulated_devices():
    result = run("info", "--emulate", "6", XLA_FLAGS="")
    assert (result.returncode, result.stderr) == (0, "")
    rows = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert rows["devices"].strip() == "6 x cpu in 1 process"
    assert rows["default mesh"].strip() == "data 6"


def test_a_configuration_that_is_wrong(tmp_path):
    config = tmp_path / "a.gin"
    config.write_text("\nZeor.stage = 3\n")
    result = run("train", str(config), "--emulate", "2")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"zerojax: error: {config}:2: unknown name 'Zeor'; nearest accepted: Zero,")
    assert result.stderr.count("\n") == 1
