"""Optimizers that follow an average of gradients: SGD with momentum, and its sign, Lion."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.errors import UserError, shown
from zerojax.optim import checks
from zerojax.optim.chains import descent, weight_decayed
from zerojax.optim.moments import Coefficient


class MomentumState(NamedTuple):
    """The number of updates and the buffers."""

    count: jax.Array  # type: ignore[assignment]  # optax's name, which is a method of tuples
    trace: Any


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """SGD in torch's form (Sutskever et al. 2013).

    With g' = g + weight_decay p, the buffer is b <- g' at first, then b <- momentum b + (1 - dampening) g'; the leaf
    moves by -lr b, or with ``nesterov`` by -lr (g' + momentum b).

    Args:
        learning_rate: a number or a schedule.
        momentum: below 1; with 0 there are no buffers.
        dampening: at most 1.
        weight_decay: see above.
        nesterov: see above; wants a momentum and no dampening.

    Raises:
        UserError: a value out of its range.

    >>> optimizer = sgd(0.5, momentum=0.5, dampening=0.5)
    >>> params = jnp.array([1.0])
    >>> state = optimizer.init(params)
    >>> for _ in range(2):
    ...     updates, state = optimizer.update(jnp.array([1.0]), state, params)
    >>> updates.round(4).tolist()  # 0.5 * 1 + 0.5 * 1
    [-0.5]
    """
    checks.real("momentum", momentum, below=1)
    checks.real("dampening", dampening)
    checks.flag("nesterov", nesterov)
    if nesterov and (momentum == 0 or dampening != 0):
        raise UserError(
            f"nesterov is True with momentum {shown(momentum)} and dampening {shown(dampening)}; "
            "accepted: a momentum above 0 and no dampening"
        )
    moving = scale_by_momentum(momentum, dampening, nesterov) if momentum else optax.identity()
    return descent(learning_rate, weight_decayed(weight_decay), moving)


def scale_by_momentum(momentum: float, dampening: float, nesterov: bool) -> optax.GradientTransformation:
    """Gradients to torch's buffers, the first of which is not dampened (optax's `trace` knows no dampening)."""

    def init(params: Any) -> MomentumState:
        return MomentumState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: MomentumState, params: Any = None) -> tuple[Any, MomentumState]:
        share = jnp.where(state.count == 0, 1.0, 1.0 - dampening)
        trace = jax.tree.map(lambda g, b: momentum * b + share.astype(g.dtype) * g, updates, state.trace)
        ahead = jax.tree.map(lambda g, b: g + momentum * b, updates, trace) if nesterov else trace
        return ahead, MomentumState(optax.safe_increment(state.count), trace)

    return optax.GradientTransformation(init, update)


def lion(
    learning_rate: optax.ScalarOrSchedule, betas: Sequence[Coefficient] = (0.9, 0.999), weight_decay: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """Lion (Chen et al. 2023, arXiv:2302.06675), with DeepSpeed's default betas.

    ``p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p)``, then ``m <- b2 m + (1 - b2) g``; sign(0) is 0.

    Args:
        learning_rate: a number or a schedule.
        betas: see above; b1 may be a schedule.
        weight_decay: see above.

    Raises:
        UserError: a value out of its range.

    >>> optimizer = lion(0.5, weight_decay=0.5)
    >>> params = jnp.array([1.0, -2.0])
    >>> updates, _ = optimizer.update(jnp.array([3.0, -0.25]), optimizer.init(params), params)
    >>> updates.round(4).tolist()
    [-0.75, 1.0]
    """
    b1, b2 = checks.betas(betas)
    make = optax.scale_by_lion
    if callable(b1):
        make = optax.inject_hyperparams(make, ("b2", "mu_dtype", "mode", "smooth_beta"), hyperparam_dtype=jnp.float32)
    return descent(learning_rate, make(b1=b1, b2=b2), weight_decayed(weight_decay))
