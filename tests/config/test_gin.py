"""Reading a configuration: what is bound, and one line for each thing that can be wrong with it."""

from pathlib import Path

import gin
import optax
import pytest

import zerojax
from zerojax.config import registry
from zerojax.config.gin import configured, load
from zerojax.errors import UserError


@pytest.fixture(autouse=True)
def forget_bindings():
    yield
    gin.clear_config()


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "a.gin") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return name

    return write


def message(*arguments) -> str:
    with pytest.raises(UserError) as error:
        load(*arguments)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_values_reach_the_constructor(write):
    load(write("Zero.stage = 1\nZero.micro_batches = 4\n"))
    zero = configured("zerojax.Zero")()
    assert (zero.stage, zero.micro_batches) == (1, 4)


def test_rematerialisation_by_name_and_in_parts(write):
    load(write("Zero.remat = 'dots'\n"))
    assert configured("zerojax.Zero")().remat == "dots"
    load(write("Zero.remat = @Remat()\nRemat.blocks = ['blocks/*']\nRemat.every = 2\n"))
    assert configured("zerojax.Zero")().remat == zerojax.Remat(blocks="blocks/*", every=2)


def test_overrides_come_last(write):
    load(write("Zero.stage = 1\n"), [("Zero.stage=2", "--set Zero.stage=2")])
    assert configured("zerojax.Zero")().stage == 2


def test_a_second_configuration_starts_afresh(write):
    load(write("Zero.stage = 1\n"))
    load(write("Zero.micro_batches = 2\n"))
    assert configured("zerojax.Zero")().stage == 3


def test_scopes_macros_and_blocks(write):
    load(
        write(
            "STEPS = 50\n"
            "join_schedules.schedules = [@up/linear_schedule(), @down/linear_schedule()]\n"
            "join_schedules.boundaries = [%STEPS]\n"
            "up/linear_schedule:\n  init_value = 0.0\n  end_value = 1.0\n  transition_steps = %STEPS\n"
            "down/linear_schedule:\n  init_value = 1.0\n  end_value = 0.5\n  transition_steps = 100\n"
        )
    )
    schedule = configured("optax.join_schedules")()
    assert [float(schedule(step)) for step in (0, 25, 50, 100, 150, 1000)] == [0.0, 0.5, 1.0, 0.75, 0.5, 0.5]


def test_chain_takes_its_transformations_as_a_list(write):
    load(write("chain.transforms = [@scale(), @optax.sgd()]\nscale.step_size = 2.0\noptax.sgd.learning_rate = 0.5\n"))
    optimizer = configured("optax.chain")()
    updates, _ = optimizer.update({"w": 3.0}, optimizer.init({"w": 0.0}))
    assert updates["w"] == -3.0  # 3 x 2 x -0.5


def test_includes_are_found_beside_the_file_and_in_the_working_directory(write):
    write("Zero.stage = 1\nZero.micro_batches = 1\n", "configs/base.gin")
    load(write("include 'base.gin'\ninclude 'configs/base.gin'\nZero.stage = 2\n", "configs/run.gin"))
    zero = configured("zerojax.Zero")()
    assert (zero.stage, zero.micro_batches) == (2, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\nZeor.stage = 3", "a.gin:2: unknown name 'Zeor'; nearest accepted: Zero,"),
        ("Zeor:\n  stage = 3\n", "a.gin:1: unknown name 'Zeor'; nearest accepted: Zero,"),
        ("zerojax.Zeor.stage = 3", "a.gin:1: unknown name 'zerojax.Zeor'; nearest accepted: zerojax.Zero,"),
        ("Zero.stge = 3", "a.gin:1: Zero has no parameter 'stge'; nearest accepted: stage,"),
        ("Zero:\n\n  stge = 3\n", "a.gin:3: Zero has no parameter 'stge'; nearest accepted: stage,"),
        ("Zero.mesh = @make_mash()", "a.gin:1: unknown name 'make_mash'; nearest accepted: make_mesh,"),
        (
            "chain.transforms = [\n  @clip(),\n  @adamm(),\n]",
            "a.gin:3: unknown name 'adamm'; nearest accepted: adam,",
        ),
        ("STEPS = 5\nclip.max_delta = %STEP", "a.gin:2: clip.max_delta = %STEP: no such macro; nearest accepted: STE"),
        ("clip.max_delta = %gin.REQUIRED", "a.gin:1: clip.max_delta has no value: give one in the file or with --set"),
        ("Zero.stage = '3'", "a.gin:1: Zero.stage = '3': expected int"),
        ("Zero.stage = True", "a.gin:1: Zero.stage = True: expected int"),
        ("N = 'x'\nZero.stage = %N", "a.gin:2: Zero.stage = 'x': expected int"),
        ("GPT.norm = 'batch'", "a.gin:1: GPT.norm = 'batch': expected 'layernorm' or 'rmsnorm'"),
        (
            "optax.adamw.learning_rate = 'fast'",
            "a.gin:1: adamw.learning_rate = 'fast': expected float or a function (@NAME)",
        ),
        ("Zero.stage = 3\nZero.precision = bf16", "a.gin:2: cannot read 'Zero.precision = bf16': Failed to parse"),
        ("Zero.stage 3", "a.gin:1: cannot read 'Zero.stage 3':"),
        ("Zero.stage = (1,\n2", "a.gin:"),
        ("include 'nowhere.gin'", "a.gin:1: include 'nowhere.gin': no such file: tried nowhere.gin"),
        ("include 'a.gin'", "a.gin:1: include 'a.gin': the file includes itself"),
        ("import no_such_module", "a.gin:1: import no_such_module: No module named 'no_such_module'"),
        ("from __gin__ import dynamic_registration", "a.gin:1: from __gin__ import dynamic_registration: not supp"),
    ],
)
def test_faults_name_the_place_the_value_and_what_is_accepted(write, text, expected):
    assert message(write(text)).startswith(expected)


def test_a_fault_in_an_included_file_names_that_file(write):
    write("Zero.stage = 'x'\n", "sub/base.gin")
    assert message(write("include 'sub/base.gin'\n")) == "sub/base.gin:1: Zero.stage = 'x': expected int"


def test_a_fault_in_an_override_names_the_argument(write):
    assert message(write(""), [("Zero.stge=2", "--set Zero.stge=2")]).startswith(
        "--set Zero.stge=2: Zero has no parameter 'stge'; nearest accepted: stage,"
    )


def test_files_that_cannot_be_read(write, tmp_path):
    assert message("nowhere.gin") == "nowhere.gin: cannot read the configuration: No such file or directory"
    assert message(tmp_path) == f"{tmp_path}: cannot read the configuration: Is a directory"
    (tmp_path / "binary.gin").write_bytes(b"Zero\xff")
    assert message("binary.gin") == "binary.gin: cannot read the configuration: byte 4 is not UTF-8 text"


def test_every_registered_name_is_there_and_says_what_it_takes(write):
    load(write(""))
    table = registry.constructors()
    assert set(table) == set(registry.register())
    for name, constructor in table.items():
        assert callable(constructor) and callable(configured(name)), name
    for name in ("adam", "adamw", "sgd", "lion", "lamb", "adafactor"):
        assert table[f"optax.{name}"] is getattr(optax, name)


def test_only_the_configuration_knows_gin():
    package = Path(registry.__file__).parents[1]
    users = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if "import gin" in path.read_text()}
    assert users == {"config/bindings.py", "config/gin.py", "config/registry.py", "cli.py"}  # cli: zerojax.config.gin
