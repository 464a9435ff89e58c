"""DeepSpeed's schedules against its own numbers and its formulas."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax import optim
from zerojax.errors import UserError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "lr_schedules.json").read_text())
FAR = 1_000_000


def named(case: dict[str, Any]) -> Any:
    return optim.schedule_by_name(case["schedule"], case["params"], case.get("optimizer_lr", 5e-4))


def label(case: dict[str, Any]) -> str:
    return "-".join(map(str, (case["schedule"], *case["params"].values())))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=label)
def test_equals_deepspeed(case: dict[str, Any]) -> None:
    schedule = named(case)
    np.testing.assert_allclose([schedule(count) for count in range(len(case["lr"]))], case["lr"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=label)
def test_traced_is_the_same(case: dict[str, Any]) -> None:
    schedule = named(case)
    counts = jnp.arange(len(case["lr"]))
    values = jax.jit(jax.vmap(schedule))(counts)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, case["lr"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", GOLDEN["resume"], ids=label)
def test_a_resumed_run_goes_on(case: dict[str, Any]) -> None:
    schedule = named(case)  # no state but the count, which is 7 after 7 updates
    assert case["state_after_7"] == {"last_batch_iteration": 6}
    np.testing.assert_allclose([schedule(count) for count in range(7, 12)], case["lr_updates_8_to_12"], rtol=1e-6)


@pytest.mark.parametrize("case", GOLDEN["errors"], ids=label)
def test_what_deepspeed_refuses(case: dict[str, Any]) -> None:
    assert case["error"] is not None
    with pytest.raises(UserError):
        named(case)


def test_float32_holds_in_a_long_run() -> None:
    n, total, low, high = 10_000, FAR, 1e-5, 3e-4
    linear = optim.warmup_decay_lr(total, low, high, n, "linear")
    log = optim.warmup_lr(low, high, n)
    cosine = optim.warmup_cosine_lr(total, 0.1, n, 1e-4, "linear", optimizer_lr=high)
    for k in (1, 2, 5_000, n - 1, n, n + 1, 123_457, total - 12_345, total - 2, total - 1, total, 2 * total):
        gamma = k / n if k < n else max(0, (total - k) / (total - n))
        np.testing.assert_allclose(linear(k + 1), low + (high - low) * gamma, rtol=1e-6)
        gamma = min(1, math.log(k + 1) / math.log(n)) if k < n else 1
        np.testing.assert_allclose(log(k + 1), low + (high - low) * gamma, rtol=1e-6)
        p = min(1, (k - n + 1) / (total - n))
        ratio = 0.1 + 0.9 * k / n if k < n else 1e-4 + (1 - 1e-4) * math.cos(math.pi * p / 2) ** 2
        np.testing.assert_allclose(cosine(k + 1), high * ratio, rtol=1e-6)


def test_cosine_stays_at_its_end_when_there_is_no_room_for_it() -> None:
    schedule = optim.warmup_cosine_lr(10, warmup_num_steps=10, cos_min_ratio=0.1, optimizer_lr=0.01)
    np.testing.assert_allclose([schedule(count) for count in range(11, 20)], 0.001, rtol=1e-6)


def test_warmup_without_a_maximum_goes_to_the_optimizers_rate() -> None:
    assert float(optim.warmup_lr(warmup_num_steps=5, optimizer_lr=0.25)(FAR)) == 0.25
    with pytest.raises(UserError, match="warmup_max_lr is None and there is no optimizer_lr"):
        optim.warmup_lr(warmup_num_steps=5)


def one_cycle_formula(count: int, low: float, high: float, first: int, second: int) -> float:
    place = count % (first + second)
    return low + (high - low) * (place / first if place <= first else (first + second - place) / second)


def test_one_cycle_of_unequal_halves() -> None:
    schedule = optim.one_cycle(1e-4, 1e-1, 0.5, 1000, 777, decay_step_size=10)
    for count in (0, 1, 500, 999, 1000, 1001, 1776, 1777):
        np.testing.assert_allclose(schedule(count), one_cycle_formula(count, 1e-4, 1e-1, 1000, 777), rtol=1e-6)
    np.testing.assert_allclose(schedule(1797), 1e-4 / (1 + 0.5 * 20 / 10), rtol=1e-6)


def test_one_cycle_keeps_small_rates_beside_large_ones() -> None:
    schedule = optim.one_cycle(0.1, 1e-6, cycle_first_step_size=1000)  # a dip
    for count in (998, 999, 1000, 1001):
        np.testing.assert_allclose(schedule(count), one_cycle_formula(count, 0.1, 1e-6, 1000, 1000), rtol=1e-6)


def test_one_cycle_with_as_many_stairs_as_steps_is_straight() -> None:
    straight = optim.one_cycle(1e-3, 1e-2, cycle_first_step_size=10, cycle_second_step_size=21)
    stairs = optim.one_cycle(
        1e-3,
        1e-2,
        cycle_first_step_size=10,
        cycle_second_step_size=21,
        cycle_first_stair_count=10,
        cycle_second_stair_count=21,
    )
    counts = range(40)
    np.testing.assert_allclose([stairs(c) for c in counts], [straight(c) for c in counts], rtol=1e-6)


def test_one_cycle_may_have_no_second_half() -> None:
    schedule = optim.one_cycle(0.001, 0.1, cycle_first_step_size=100, cycle_second_step_size=0)
    np.testing.assert_allclose([schedule(0), schedule(50)], [0.001, 0.0505], rtol=1e-6)
    assert not math.isnan(schedule(100)) and not math.isnan(schedule(500))


def test_momentum_mirrors_the_rate() -> None:
    sizes = dict(cycle_first_step_size=10, cycle_second_step_size=5)
    rate = optim.one_cycle(0.0, 1.0, **sizes)
    momentum = optim.one_cycle_momentum(0.85, 0.95, 0.1, decay_step_size=4, **sizes)
    assert float(momentum(0)) == pytest.approx(0.85)  # DeepSpeed's constructor writes the minimum
    for count in range(1, 16):
        assert float(momentum(count)) == pytest.approx(0.95 - 0.1 * float(rate(count)))
    assert float(momentum(17)) == pytest.approx(0.95 * (1 + 0.1 * 2 / 4))
    assert float(optim.one_cycle_momentum(0.85, 0.95, decay_step_size=4, **sizes)(17)) == pytest.approx(0.95)


def test_range_test_grows_for_ever() -> None:
    schedule = optim.lr_range_test(1e-4, 10, 0.5)
    np.testing.assert_allclose([schedule(c) for c in (0, 7, FAR)], [1e-4, 1e-4 * 1.35, 1e-4 * (1 + 5e4)], rtol=1e-6)


def test_a_whole_float_is_a_number_of_steps() -> None:
    assert float(optim.warmup_lr(warmup_max_lr=[0.5], warmup_num_steps=1e1)(11)) == 0.5


warmup = functools.partial(optim.warmup_lr, warmup_max_lr=0.1)
cycle = functools.partial(optim.one_cycle, 1e-3, 1e-2)
REFUSED = {
    "warmup_num_steps is None; accepted: a positive integer": lambda: warmup(warmup_num_steps=None),
    "warmup_num_steps is -5; accepted: a positive integer": lambda: warmup(warmup_num_steps=-5),
    "warmup_num_steps is 2.5; accepted: a positive integer": lambda: warmup(warmup_num_steps=2.5),
    "warmup_num_steps is True; accepted: a positive integer": lambda: warmup(warmup_num_steps=True),
    "warmup_type is 'cosine'; accepted: 'log', 'linear'": lambda: warmup(warmup_type="cosine"),
    "warmup_min_lr is 'auto'; accepted: a number of at least 0": lambda: warmup("auto"),
    r"warmup_min_lr is \[0.1, 0.2\]; accepted: one number": lambda: warmup([0.1, 0.2]),
    "warmup_max_lr is -1; accepted: a number of at least 0": lambda: optim.warmup_lr(0, -1),
    "warmup_max_lr is nan; accepted: a number of at least 0": lambda: optim.warmup_lr(0, math.nan),
    "total_num_steps is 0; accepted: a positive integer": lambda: optim.warmup_decay_lr(0),
    "total_num_steps is 3000000000": lambda: optim.warmup_cosine_lr(3_000_000_000, optimizer_lr=1.0),
    "cycle_first_step_size is 0; accepted: a positive integer": lambda: cycle(cycle_first_step_size=0),
    "cycle_second_step_size is -1; accepted: an integer of at least 0": lambda: cycle(cycle_second_step_size=-1),
    "cycle_first_stair_count is 5000000; accepted: at most 1073741": lambda: cycle(cycle_first_stair_count=5_000_000),
    "cycle_max_mom is 1; accepted: a number of at least 0 and below 1": lambda: optim.one_cycle_momentum(0.8, 1),
    "lr_range_test_staircase is 'yes'; accepted: True or False": lambda: optim.lr_range_test(1e-3, 10, 1.0, "yes"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input(message: str) -> None:
    with pytest.raises(UserError, match=message):
        REFUSED[message]()
