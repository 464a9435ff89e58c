"""Optimizers that divide an entry by the root of the squares it has seen: Adam, AdamW, Adagrad."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.optim import checks
from zerojax.optim.chains import descent, weight_decayed
from zerojax.optim.moments import Coefficient, correction, moment


class AdamState(NamedTuple):
    """The number of updates, the moments, and for AMSGrad the largest second moment so far."""

    count: jax.Array  # type: ignore[assignment]  # optax's name, which is a method of tuples
    mu: Any
    nu: Any
    nu_max: Any


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    betas: Sequence[Coefficient] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    bias_correction: bool = True,
    amsgrad: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """AdamW: Adam whose weight decay does not pass through the moments (Loshchilov and Hutter 2019, arXiv:1711.05101).

    ``p <- p - lr (m' / (sqrt(v') + eps) + weight_decay p)`` with the bias-corrected moments m' and v'. Every floating
    leaf decays, as in DeepSpeed; which should not is said by `grouped`.

    Args:
        learning_rate: a number or a schedule.
        betas: decay of the first and the second moment; the first may be a schedule, as `one_cycle_momentum`.
        eps: added to the root of the second moment.
        weight_decay: the factor above; DeepSpeed's default is 0, torch's 0.01.
        bias_correction: whether the moments are divided by 1 - beta**t.
        amsgrad: whether the largest second moment so far takes v's place (Reddi et al. 2018, arXiv:1904.09237).

    Raises:
        UserError: a value out of its range.

    >>> optimizer = adamw(0.5, weight_decay=0.5)
    >>> params = jnp.array([1.0, -2.0])
    >>> updates, _ = optimizer.update(jnp.array([3.0, -0.25]), optimizer.init(params), params)
    >>> updates.round(4).tolist()
    [-0.75, 1.0]
    """
    moments = scale_by_adam(betas, eps, bias_correction, amsgrad)
    return descent(learning_rate, moments, weight_decayed(weight_decay))


def adam(
    learning_rate: optax.ScalarOrSchedule,
    betas: Sequence[Coefficient] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    amsgrad: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """DeepSpeed's "Adam" (Kingma and Ba 2015, arXiv:1412.6980), whose weight decay is AdamW's unless told otherwise.

    Args:
        adam_w_mode: False adds ``weight_decay p`` to the gradient, as torch's Adam does; True is `adamw`.

    The other arguments are those of `adamw`.

    Raises:
        UserError: a value out of its range.

    >>> optimizer = adam(0.5, weight_decay=0.5, adam_w_mode=False)
    >>> params = jnp.array([1.0, -2.0])
    >>> updates, _ = optimizer.update(jnp.array([3.0, -0.25]), optimizer.init(params), params)
    >>> updates.round(4).tolist()
    [-0.5, 0.5]
    """
    checks.flag("adam_w_mode", adam_w_mode)
    moments, decay = scale_by_adam(betas, eps, bias_correction, amsgrad), weight_decayed(weight_decay)
    return descent(learning_rate, *((moments, decay) if adam_w_mode else (decay, moments)))


def scale_by_adam(
    betas: Sequence[Coefficient], eps: float, bias_correction: bool, amsgrad: bool
) -> optax.GradientTransformation:
    """Gradients to ``m' / (sqrt(v') + eps)``.

    optax's has no way to leave the bias correction out and no b1 that changes, takes AMSGrad's largest moment after the
    correction where torch takes it before, and its 1 - b2**t is 1e-5 off at first, as it is a difference in float32.
    """
    b1, b2 = checks.betas(betas)
    checks.real("eps", eps)
    checks.flag("bias_correction", bias_correction)
    checks.flag("amsgrad", amsgrad)

    def init(params: Any) -> AdamState:
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros((), jnp.int32), zeros(), zeros(), zeros() if amsgrad else None)

    def update(updates: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        b1_now = b1(state.count) if callable(b1) else b1
        count = optax.safe_increment(state.count)
        mu = moment(b1_now, updates, state.mu)
        nu = moment(b2, jax.tree.map(jnp.square, updates), state.nu)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu) if amsgrad else None
        c1, c2 = (correction(b1_now, count), correction(b2, count)) if bias_correction else (1.0, 1.0)
        step = lambda m, v: m / c1 / (jnp.sqrt(v / c2) + eps)
        return jax.tree.map(step, mu, nu_max if amsgrad else nu), AdamState(count, mu, nu, nu_max)

    return optax.GradientTransformation(init, update)


class AdagradState(NamedTuple):
    """The number of updates and the sums of squares."""

    count: jax.Array  # type: ignore[assignment]  # optax's name, which is a method of tuples
    total: Any


def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    *,
    lr_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad (Duchi et al. 2011) with torch's epsilon, outside of the root, and torch's decay of the rate.

    With g' = g + weight_decay p and s the sum of all g'**2 so far, ``p <- p - lr / (1 + t lr_decay) g' / (sqrt(s) +
    eps)`` after t updates.

    Args:
        learning_rate: a number or a schedule.
        eps, weight_decay, lr_decay: see above.
        initial_accumulator_value: where s starts.

    Raises:
        UserError: a value out of its range.

    >>> optimizer = adagrad(0.5)
    >>> params = jnp.array([1.0, -2.0])
    >>> updates, _ = optimizer.update(jnp.array([3.0, 0.0]), optimizer.init(params), params)
    >>> updates.round(4).tolist()
    [-0.5, -0.0]
    """
    for name, value in (
        ("eps", eps),
        ("lr_decay", lr_decay),
        ("initial_accumulator_value", initial_accumulator_value),
    ):
        checks.real(name, value)

    def init(params: Any) -> AdagradState:
        start = lambda p: jnp.full_like(p, initial_accumulator_value)
        return AdagradState(jnp.zeros((), jnp.int32), jax.tree.map(start, params))

    def update(updates: Any, state: AdagradState, params: Any = None) -> tuple[Any, AdagradState]:
        total = jax.tree.map(lambda g, s: s + g * g, updates, state.total)
        slowed = 1 / (1 + lr_decay * state.count.astype(jnp.float32))
        step = lambda g, s: slowed * g / (jnp.sqrt(s) + eps)
        return jax.tree.map(step, updates, total), AdagradState(optax.safe_increment(state.count), total)

    return descent(learning_rate, weight_decayed(weight_decay), optax.GradientTransformation(init, update))
