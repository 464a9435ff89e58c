"""The command ``zerojax``: train from a configuration, and say what is installed.

jax is imported only once the arguments are read: help needs none, and ``--emulate`` speaks to it through variables that
it reads when it starts.
"""

import argparse
import os
import re
import sys
import threading
import traceback
from collections.abc import MutableMapping, Sequence
from typing import Any, NoReturn

from zerojax.errors import OutOfMemoryError, RunError, UserError

TRAIN = "zerojax.trainer.train"
DEVICE_COUNT = "--xla_force_host_platform_device_count"
PATIENCE = 10.0  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 (the run failed), 2 (the user's input is wrong)."""
    code = _run(argv)
    jax = sys.modules.get("jax")
    if code and jax is not None and jax.distributed.is_initialized():
        # At its end jax waits minutes for the other processes, and these may be waiting for this one.
        timer = threading.Timer(PATIENCE, os._exit, (code,))
        timer.daemon = True
        timer.start()
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
        if getattr(arguments, "emulate", None) is not None:
            emulate(arguments.emulate, os.environ)
        arguments.run(arguments)
    except (UserError, RunError) as error:
        print(f"zerojax: error: {str(error).splitlines()[0]}", file=sys.stderr)
        if isinstance(error, OutOfMemoryError):
            print(f"\n{error.details}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("zerojax: interrupted", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def emulate(devices: int, environ: MutableMapping[str, str]) -> None:
    """Makes a jax that is not imported yet run on the CPU as so many devices; other XLA flags stay as they are.

    >>> environ = {"XLA_FLAGS": "--xla_dump_to=/tmp/xla --xla_force_host_platform_device_count=2"}
    >>> emulate(8, environ)
    >>> environ["XLA_FLAGS"], environ["JAX_PLATFORMS"]
    ('--xla_dump_to=/tmp/xla --xla_force_host_platform_device_count=8', 'cpu')
    """
    others = [flag for flag in environ.get("XLA_FLAGS", "").split() if flag.partition("=")[0] != DEVICE_COUNT]
    environ["XLA_FLAGS"] = " ".join([*others, f"{DEVICE_COUNT}={devices}"])
    environ["JAX_PLATFORMS"] = "cpu"


def train(arguments: argparse.Namespace) -> None:
    """``zerojax train``: reads the configuration, joins the other processes, and runs it."""
    from zerojax.config import gin
    from zerojax.launch.distributed import initialize

    overrides = [(binding, f"--set {binding}") for binding in arguments.set]
    if arguments.run_dir is not None:
        overrides.append((f"{TRAIN}.run_dir = {arguments.run_dir!r}", f"--run-dir {arguments.run_dir}"))
    config = gin.load(arguments.config, overrides)
    given = ("config_text",)
    config.check_call(TRAIN, given)
    initialize(arguments.coordinator, arguments.num_processes, arguments.process_id)
    try:
        gin.configured(TRAIN)(config_text=config.resolved(TRAIN, given))
    except UserError as error:
        raise config.located(error) from error


def info(arguments: argparse.Namespace) -> None:
    """``zerojax info``: prints versions, devices, memory, the default mesh and the installed extras."""
    from zerojax import info

    print(info.describe())


def convert(arguments: argparse.Namespace) -> None:
    """``zerojax config convert``: prints or writes the gin configuration that a DeepSpeed configuration stands for."""
    from pathlib import Path

    from zerojax.config.deepspeed.to_gin import to_gin
    from zerojax.monitor.files import replace_text

    text = to_gin(Path(arguments.config), world_size=arguments.devices)
    if arguments.output is None:
        print(text, end="")
    else:
        replace_text(Path(arguments.output), text)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are the command's: one line, exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="zerojax", description="Trains JAX models whose states are partitioned the way ZeRO does it.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train_parser = commands.add_parser(
        "train",
        help="train as a configuration says",
        description="Trains as a gin configuration says. Started again with the same run directory, it goes on from "
        "the last checkpoint.",
        epilog="Several processes find each other through --coordinator, --num-processes and --process-id, through "
        "ZEROJAX_COORDINATOR, ZEROJAX_NUM_PROCESSES and ZEROJAX_PROCESS_ID, or through SLURM or Open MPI.",
    )
    train_parser.add_argument("config", metavar="CONFIG.gin", help="such as configs/shakespeare_tiny.gin")
    train_parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        type=_binding,
        action="append",
        default=[],
        help="bind a value over the configuration's, in gin's syntax, such as Zero.stage=2; may be repeated",
    )
    _add_emulate(train_parser)
    train_parser.add_argument("--run-dir", metavar="DIR", help="where logs and checkpoints go")
    train_parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    train_parser.add_argument("--num-processes", metavar="N", type=int, help="number of processes of the run")
    train_parser.add_argument("--process-id", metavar="I", type=int, help="this process's number, from 0")
    train_parser.set_defaults(run=train)

    info_parser = commands.add_parser(
        "info",
        help="print versions, devices, memory, mesh and extras",
        description="Prints versions, devices, memory, the default mesh and the installed extras.",
    )
    _add_emulate(info_parser)
    info_parser.set_defaults(run=info)

    config_parser = commands.add_parser("config", help="convert a configuration", description="Converts.")
    actions = config_parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    convert_parser = actions.add_parser(
        "convert",
        help="turn a DeepSpeed configuration into a gin file",
        description="Writes the gin configuration that a DeepSpeed configuration stands for. What needs nothing is a "
        "comment; what zerojax does not do is an error that says what to use instead.",
    )
    convert_parser.add_argument("config", metavar="CONFIG.json", help="DeepSpeed's configuration")
    convert_parser.add_argument("-o", "--output", metavar="FILE", help="where to write; to the terminal by default")
    convert_parser.add_argument(
        "--devices", metavar="N", type=_device_count, default=1, help="data-parallel devices that batches divide by; 1"
    )
    convert_parser.set_defaults(run=convert)
    return parser


def _add_emulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--emulate", metavar="N", type=_device_count, help="run on the CPU as N devices")


def _device_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


def _binding(text: str) -> str:
    if not re.match(r"\s*[\w./]+\s*=", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, such as Zero.stage=2")
    return text


if __name__ == "__main__":
    sys.exit(main())
