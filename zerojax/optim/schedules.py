"""DeepSpeed's schedules of the learning rate and of the momentum, as optax schedules.

A schedule is a function of `count`, the number of updates applied so far, and gives the value for the next one; a step
that was skipped does not count. DeepSpeed ticks after an update, so its iteration k is `count - 1` here. Values are
float32 and good to its rounding: shares of a way are quotients of integers, and both shares of it, the part that is
done and the part that is left, are computed by themselves, as their difference from 1 would lose digits.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.errors import UserError, shown
from zerojax.optim import checks

CYCLE_B2 = 0.99  # Adam's second coefficient while OneCycle moves the first

Shares = tuple[jax.Array, jax.Array]  # of a way: done, left


def warmup_lr(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    *,
    optimizer_lr: float | None = None,
) -> optax.Schedule:
    """DeepSpeed's `WarmupLR`: from one rate to another in N updates, and constant from there.

    With k = max(0, count - 1), the share of the way is log(k + 1) / log(N) or k / N while k < N, then 1. The first two
    updates have ``warmup_min_lr``.

    Args:
        warmup_min_lr: where it starts.
        warmup_max_lr: where it ends; None for ``optimizer_lr``.
        warmup_num_steps: N, a positive integer; 1 counts as 2.
        warmup_type: "log" or "linear".
        optimizer_lr: the optimizer's own learning rate.

    Raises:
        UserError: a value out of its range, or no rate to end at.

    >>> schedule = warmup_lr(warmup_max_lr=0.1, warmup_num_steps=10)
    >>> [round(float(schedule(count)), 6) for count in (0, 1, 2, 3, 10, 1000)]
    [0.0, 0.0, 0.030103, 0.047712, 0.1, 0.1]
    """
    if warmup_max_lr is None:
        if optimizer_lr is None:
            raise UserError("warmup_max_lr is None and there is no optimizer_lr; accepted: a number for one of them")
        warmup_max_lr = _one("optimizer_lr", optimizer_lr)
    low, high = _one("warmup_min_lr", warmup_min_lr), _one("warmup_max_lr", warmup_max_lr)
    n, warmup = _warmup(warmup_num_steps, warmup_type)

    def schedule(count: Any) -> jax.Array:
        k = _iteration(count)
        return _between(low, high, _select(k < n, warmup(k), (1.0, 0.0)))

    return schedule


def warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> optax.Schedule:
    """DeepSpeed's `WarmupDecayLR`: `warmup_lr`, then back on a straight line that arrives at ``total_num_steps``.

    After the warm-up the share of the way is max(0, (T - k) / max(1, T - N)), k = count - 1. ``warmup_max_lr`` does not
    follow the optimizer's learning rate.

    Raises:
        UserError: a value out of its range.

    >>> schedule = warmup_decay_lr(total_num_steps=20, warmup_max_lr=0.1, warmup_num_steps=10)
    >>> [round(float(schedule(k + 1)), 6) for k in (10, 15, 19, 20, 30)]
    [0.1, 0.05, 0.01, 0.0, 0.0]
    """
    low, high = _one("warmup_min_lr", warmup_min_lr), _one("warmup_max_lr", warmup_max_lr)
    total = checks.steps("total_num_steps", total_num_steps)
    n, warmup = _warmup(warmup_num_steps, warmup_type)

    def schedule(count: Any) -> jax.Array:
        k = _iteration(count)
        return _between(low, high, _select(k < n, warmup(k), _part(total - k, max(1, total - n))))

    return schedule


def warmup_cosine_lr(
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
    *,
    optimizer_lr: float,
) -> optax.Schedule:
    """DeepSpeed's `WarmupCosineLR`: parts of the optimizer's learning rate, up by a warm-up, down by half a cosine.

    With k = count - 1, the ratio goes from ``warmup_min_ratio`` to 1 as in `warmup_lr` while k < N. Then it is
    c + (1 - c) (1 + cos(pi p)) / 2 with c = ``cos_min_ratio`` and p = min(1, (k - N + 1) / max(1, T - N)). The first
    update has the rate 0.

    Raises:
        UserError: a value out of its range.

    >>> schedule = warmup_cosine_lr(100, 0.2, 10, 0.1, optimizer_lr=0.0015)
    >>> [round(float(schedule(k + 1)), 8) for k in (-1, 0, 1, 9, 54, 99)]
    [0.0, 0.0003, 0.00066124, 0.0015, 0.000825, 0.00015]
    """
    high = _one("optimizer_lr", optimizer_lr)
    start, end = _one("warmup_min_ratio", warmup_min_ratio), _one("cos_min_ratio", cos_min_ratio)
    total = checks.steps("total_num_steps", total_num_steps)
    n, warmup = _warmup(warmup_num_steps, warmup_type)

    def schedule(count: Any) -> jax.Array:
        k = _iteration(count)
        # (1 + cos(pi p)) / 2 = sin(pi (1 - p) / 2)**2, which keeps its digits where it goes to zero.
        left, done = _part(k - n + 1, max(1, total - n))
        down = jnp.sin(jnp.pi / 2 * done) ** 2, jnp.sin(jnp.pi / 2 * left) ** 2
        ratio = jnp.where(k < n, _between(start, 1.0, warmup(k)), _between(end, 1.0, down))
        return jnp.where(jnp.asarray(count) == 0, 0.0, high * ratio)

    return schedule


def one_cycle(
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
) -> optax.Schedule:
    """The learning rate of DeepSpeed's `OneCycle` (Smith 2018, arXiv:1803.09820): up, down, and a decay after that.

    Args:
        cycle_min_lr: where the cycle starts and ends.
        cycle_max_lr: where it is after its first half.
        decay_lr_rate: r; d updates after the cycle the rate is ``cycle_min_lr / (1 + r d / decay_step_size)``.
        cycle_first_step_size: updates of the first half, a positive integer.
        cycle_second_step_size: updates of the second half, 0 for none; None for as many as the first.
        cycle_first_stair_count: steps of equal height in which the first half is taken, 0 for a straight line.
        cycle_second_stair_count: the same for the second half; None for as many as in the first.
        decay_step_size: see ``decay_lr_rate``; 0 for no decay.

    Raises:
        UserError: a value out of its range.

    >>> schedule = one_cycle(0.1, 0.5, cycle_first_step_size=4, decay_lr_rate=1.0, decay_step_size=2)
    >>> [round(float(schedule(count)), 3) for count in (0, 2, 4, 6, 8, 10)]
    [0.1, 0.3, 0.5, 0.3, 0.1, 0.05]
    """
    low, high = _one("cycle_min_lr", cycle_min_lr), _one("cycle_max_lr", cycle_max_lr)
    total, shares = _cycle(
        cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count
    )
    growth = _decay("decay_lr_rate", decay_lr_rate, decay_step_size)

    def schedule(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        return jnp.where(count <= total, _between(low, high, shares(count)), low / growth(count - total))

    return schedule


def one_cycle_momentum(
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
) -> optax.Schedule:
    """The momentum of DeepSpeed's `OneCycle`: high where `one_cycle`'s learning rate is low, and the other way round.

    d updates after the cycle it is ``cycle_max_mom * (1 + decay_mom_rate * d / decay_step_size)``. As in DeepSpeed, the
    very first update has ``cycle_min_mom``, and an optimizer with betas gets this as b1, with b2 = `CYCLE_B2`. The
    other arguments are those of `one_cycle`.

    Raises:
        UserError: a value out of its range.

    >>> schedule = one_cycle_momentum(cycle_first_step_size=4)
    >>> [round(float(schedule(count)), 3) for count in (0, 1, 2, 4, 6, 8, 10)]
    [0.8, 0.875, 0.85, 0.8, 0.85, 0.9, 0.9]
    """
    checks.real("cycle_min_mom", cycle_min_mom, below=1)
    checks.real("cycle_max_mom", cycle_max_mom, below=1)
    total, shares = _cycle(
        cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count
    )
    growth = _decay("decay_mom_rate", decay_mom_rate, decay_step_size)

    def schedule(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        cycle = _between(cycle_max_mom, cycle_min_mom, shares(count))
        after = cycle_max_mom * growth(count - total)
        return jnp.where(count == 0, cycle_min_mom, jnp.where(count <= total, cycle, after))

    return schedule


def lr_range_test(
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> optax.Schedule:
    """DeepSpeed's `LRRangeTest` (Smith 2018, arXiv:1803.09820): a rate that grows until training diverges.

    It is ``min_lr * (1 + step_rate * count / step_size)``, with the quotient rounded down if ``staircase``.

    Raises:
        UserError: a value out of its range.

    >>> schedule = lr_range_test(0.1, lr_range_test_step_size=2)
    >>> [round(float(schedule(count)), 3) for count in (0, 1, 2)]
    [0.1, 0.15, 0.2]
    """
    low = _one("lr_range_test_min_lr", lr_range_test_min_lr)
    size = checks.steps("lr_range_test_step_size", lr_range_test_step_size)
    checks.real("lr_range_test_step_rate", lr_range_test_step_rate)
    checks.flag("lr_range_test_staircase", lr_range_test_staircase)

    def schedule(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        interval = count // size if lr_range_test_staircase else count.astype(jnp.float32) / size
        return low * (1 + lr_range_test_step_rate * interval.astype(jnp.float32))

    return schedule


def _warmup(num_steps: int, warmup_type: str) -> tuple[int, Callable[[jax.Array], Shares]]:
    """The length of a warm-up, and the shares of its way at iteration k."""
    n = max(2, checks.steps("warmup_num_steps", num_steps))
    checks.choice("warmup_type", warmup_type, ("log", "linear"))

    def logarithmic(k: jax.Array) -> Shares:
        done = jnp.log1p(k.astype(jnp.float32)) / math.log(n)
        return done, 1 - done

    return n, logarithmic if warmup_type == "log" else lambda k: _part(k, n)


def _cycle(first: Any, second: Any, first_stairs: Any, second_stairs: Any) -> tuple[int, Callable[[jax.Array], Shares]]:
    """The length of a cycle, and the shares of the way up to its peak after `count` updates."""
    up = checks.steps("cycle_first_step_size", first)
    down = up if second is None else checks.steps("cycle_second_step_size", second, low=0)
    up_stairs = checks.steps("cycle_first_stair_count", first_stairs, low=0)
    down_stairs = up_stairs if second_stairs is None else checks.steps("cycle_second_stair_count", second_stairs, low=0)
    for half, size, stairs in ("first", up, up_stairs), ("second", down, down_stairs):
        if size * stairs > checks.MOST_STEPS:
            raise UserError(
                f"cycle_{half}_stair_count is {stairs}; accepted: at most {checks.MOST_STEPS // size} for {size} steps"
            )
    total = up + down

    def shares(count: jax.Array) -> Shares:
        place = count % total
        falling = _stairs(total - place, max(1, down), down_stairs)
        return _select(place <= up, _stairs(place, up, up_stairs), falling)

    return total, shares


def _stairs(step: jax.Array, size: int, stairs: int) -> Shares:
    return _part(step * stairs // size, stairs) if stairs else _part(step, size)


def _decay(name: str, rate: Any, step_size: Any) -> Callable[[jax.Array], jax.Array]:
    """1 + rate * d / step_size after d updates beyond the cycle; 1 without a step size."""
    checks.real(name, rate)
    size = checks.steps("decay_step_size", step_size, low=0)
    slope = rate / size if size else 0.0
    return lambda d: 1 + slope * jnp.maximum(d, 0).astype(jnp.float32)


def _iteration(count: Any) -> jax.Array:
    """DeepSpeed's iteration, with 0 before the first tick."""
    return jnp.maximum(jnp.asarray(count, jnp.int32) - 1, 0)


def _part(step: jax.Array, size: int) -> Shares:
    """The shares of a way of `size` steps after `step` of them."""
    step = jnp.clip(step, 0, size)
    return step.astype(jnp.float32) / size, (size - step).astype(jnp.float32) / size


def _select(condition: jax.Array, chosen: Any, other: Any) -> Shares:
    return jnp.where(condition, chosen[0], other[0]), jnp.where(condition, chosen[1], other[1])


def _between(low: float, high: float, shares: Shares) -> jax.Array:
    """From `low` to `high` by the share that is done."""
    return high * shares[0] + low * shares[1]


def _one(name: str, value: Any) -> float:
    """A number; or a list with one, which is how DeepSpeed writes it for one group of parameters."""
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise UserError(f"{name} is {shown(value)}; accepted: one number (give groups a schedule each)")
        value = value[0]
    checks.real(name, value)
    return value
