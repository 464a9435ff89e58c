"""What a run of a configuration uses: missing values, the resolved text, and where a complaint belongs."""

import gin
import pytest

from zerojax.config.gin import configured, load
from zerojax.errors import UserError

RUN = """
STEPS = 100
chain.transforms = [@clip_by_global_norm(), @optax.adamw()]
clip_by_global_norm.max_norm = 1.0
optax.adamw.learning_rate = @warm/linear_schedule()
warm/linear_schedule.transition_steps = %STEPS
linear_schedule.init_value = 0.0
linear_schedule.end_value = 3e-4
optax.sgd.learning_rate = 0.1
"""

FAST = "fast/optax.adamw.learning_rate = 1.0\n"


@pytest.fixture(autouse=True)
def forget_bindings():
    yield
    gin.clear_config()


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text: str):
        (tmp_path / "a.gin").write_text(text)
        return load("a.gin")

    return read


def test_resolved_has_what_the_run_reaches_with_defaults_and_without_macros(read):
    lines = read(RUN).resolved("optax.chain").splitlines()
    assert "optax.chain.transforms = [@optax.clip_by_global_norm(), @optax.adamw()]" in lines
    assert "optax.adamw.learning_rate = @warm/optax.linear_schedule()" in lines
    assert "optax.adamw.b2 = 0.999" in lines  # optax's default
    assert "warm/optax.linear_schedule.transition_steps = 100" in lines
    assert "warm/optax.linear_schedule.end_value = 0.0003" in lines  # inherited from outside of the scope
    assert not any("sgd" in line for line in lines)  # nothing of the run uses it


def test_resolved_read_again_is_itself(read):
    first = read(RUN).resolved("optax.chain")
    assert read(first).resolved("optax.chain") == first
    configured("optax.chain")()


def test_resolved_leaves_out_what_the_caller_gives(read):
    assert "max_norm" not in read(RUN).resolved("optax.clip_by_global_norm", given=("max_norm",))


def test_a_default_that_gin_cannot_write_is_a_comment(read):
    assert "# optax.adafactor.dtype_momentum keeps its default" in read("").resolved("optax.adafactor").splitlines()


def test_a_call_without_a_needed_value(read):
    config = read("chain.transforms = [\n  @optax.adamw(),\n]\n")
    with pytest.raises(UserError) as error:
        config.check_call("optax.chain")
    assert str(error.value) == "a.gin:1: @optax.adamw(): adamw.learning_rate has no value"
    with pytest.raises(UserError) as error:
        read("").check_call("optax.chain")
    assert str(error.value) == "a.gin: chain.transforms has no value"
    read("").check_call("optax.chain", given=("transforms",))


def test_values_of_an_outer_scope_count_and_references_without_a_call_may_lack_some(read):
    masked = "masked.inner = @optax.adamw()\nmasked.mask = True\n"
    read(FAST + masked + "chain.transforms = [@fast/masked()]\n").check_call("optax.chain")
    read("loader.dataset = @optax.adamw\nloader.batch_size = 8\n").check_call("zerojax.data.loader")


def test_an_error_of_a_constructor_gets_the_place_of_its_value(read):
    config = read("Zero.micro_batches = 2\nZero.stage = 4\n")
    with pytest.raises(UserError) as raised:
        configured("zerojax.Zero")()
    located = str(config.located(raised.value))
    assert located.startswith("a.gin:2: ") and "4" in located and "\n" not in located


def test_an_error_that_speaks_of_no_value_stays_as_it_is(read):
    config = read("Zero.stage = 1\n")
    assert str(config.located(UserError("7 does not divide\n  In call to ..."))) == "7 does not divide"


def test_a_function_where_its_result_is_wanted(read):
    with pytest.raises(UserError) as error:
        read("train.optimizer = @optax.adamw\n")
    assert str(error.value) == (
        "a.gin:1: train.optimizer = @optax.adamw: expected GradientTransformation; @optax.adamw() calls it"
    )
    read("train.model = @GPT\noptax.adamw.learning_rate = @linear_schedule\n")  # functions are wanted here


def test_a_complaint_about_a_macro_s_value_belongs_where_the_macro_is(read):
    config = read("TEXT = 'nowhere.txt'\ntext_dataset.source = %TEXT\n")
    with pytest.raises(UserError) as error:
        configured("text_dataset")()
    assert str(config.located(error.value)).startswith("a.gin:1: source='nowhere.txt' matches no file")
