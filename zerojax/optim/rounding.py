"""Optimizers of parameters that are stored in 16 bit alone, whose small steps must not be lost, and 16-bit moments.

A bfloat16 has 8 significant bits: a step below 1/512 of a parameter is rounded away, and training stalls. With one of
the wrappers here a parameter needs no float32 master copy beside it (``Precision(master="bfloat16")``).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.errors import UserError, shown
from zerojax.optim import checks
from zerojax.optim.leaves import in_float32
from zerojax.paths import as_patterns, matches, path_name, require_matches
from zerojax.precision import NAMED

DROPPED_BITS = 16  # that a float32 has beyond a bfloat16
NARROW = ("bfloat16", "float16")


class RoundingState(NamedTuple):
    """State of `stochastic_rounding` and of `narrow_state`.

    Attributes:
        count: int32, the updates so far; the random bits of each are made from it.
        inner: the optimizer's.
    """

    count: jax.Array  # type: ignore[assignment]  # a method of tuples
    inner: Any


class KahanState(NamedTuple):
    """State of `kahan`.

    Attributes:
        lost: for each 16-bit parameter, in its dtype, what rounding has taken from it so far; None for others.
        inner: the optimizer's.
    """

    lost: Any
    inner: Any


class MasterState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        master: for each 16-bit parameter its float32 master copy; None for others.
        inner: the optimizer's.
    """

    master: Any
    inner: Any


def stochastic_rounding(
    optimizer: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` for bfloat16 parameters, which are rounded up or down at random, so that they are right on average.

    A sum ``p + u`` between two neighbouring bfloat16 numbers goes to the upper one with the probability of its distance
    from the lower one (Gupta et al. 2015, arXiv:1502.02551, section 3). The bits depend on the seed, the number of the
    update and the place in the parameter, and not on how that lies in shards. The optimizer itself computes in float32,
    moments too (see `narrow_state`). Float32 parameters are left as they are.

    Args:
        optimizer: any optax transformation.
        seed: of the random bits.

    Raises:
        UserError: a seed out of its range; when the optimizer meets the parameters, a float16 one.

    >>> p = jnp.ones(10_000, jnp.bfloat16)
    >>> optimizer = stochastic_rounding(optax.sgd(1.0))
    >>> updates, _ = optimizer.update(jnp.full(10_000, -1e-3), optimizer.init(p), p)
    >>> round(float(optax.apply_updates(p, updates).astype(jnp.float32).mean()), 3)  # to nearest, it would stay 1
    1.001
    """
    checks.steps("seed", seed, low=0)
    checks.optimizer("stochastic_rounding", optimizer)
    inner = in_float32(optimizer)

    def init(params: Any) -> RoundingState:
        for path, p in jax.tree.leaves_with_path(params):
            if p.dtype == jnp.float16:
                raise UserError(
                    f"stochastic_rounding: parameter {path_name(path)!r} is float16; accepted: bfloat16 or float32"
                )
        return RoundingState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(gradients: Any, state: RoundingState, params: Any = None, **extra: Any) -> tuple[Any, RoundingState]:
        _check_given("stochastic_rounding", params)
        updates, inner_state = inner.update(gradients, state.inner, params, **extra)
        keys = _keys(seed, state.count, params)
        step = lambda p, u, key: u if p.dtype != jnp.bfloat16 else _step(p, _stochastically(_wide(p) + u, key))
        return jax.tree.map(step, params, updates, keys), RoundingState(state.count + 1, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def kahan(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` for 16-bit parameters, which keeps what rounding takes from them and adds it to the next step.

    Compensated summation (Kahan 1965, doi:10.1145/363707.363723): the lost part is a second 16-bit number beside each
    parameter, half of what a float32 master copy needs, and the two together follow the float32 sum. The optimizer
    itself computes in float32, moments too (see `narrow_state`). Float32 parameters are left as they are.

    Args:
        optimizer: any optax transformation.

    >>> p, optimizer = jnp.ones(2, jnp.bfloat16), kahan(optax.sgd(1.0))
    >>> state = optimizer.init(p)
    >>> for _ in range(8):  # each step by itself is rounded away
    ...     updates, state = optimizer.update(jnp.full(2, -1e-3), state, p)
    ...     p = optax.apply_updates(p, updates)
    >>> p.tolist()
    [1.0078125, 1.0078125]
    """
    checks.optimizer("kahan", optimizer)
    inner = in_float32(optimizer)

    def init(params: Any) -> KahanState:
        return KahanState(
            jax.tree.map(lambda p: jnp.zeros_like(p) if _is_narrow(p) else None, params), inner.init(params)
        )

    def update(gradients: Any, state: KahanState, params: Any = None, **extra: Any) -> tuple[Any, KahanState]:
        _check_given("kahan", params)
        updates, inner_state = inner.update(gradients, state.inner, params, **extra)
        wanted = jax.tree.map(
            lambda p, u, lost: u if lost is None else _wide(p) + (u + _wide(lost)), params, updates, state.lost
        )
        rounded = jax.tree.map(lambda p, x: x.astype(p.dtype), params, wanted)
        lost = jax.tree.map(
            lambda p, x, new: (x - _wide(new)).astype(p.dtype) if _is_narrow(p) else None, params, wanted, rounded
        )
        steps = jax.tree.map(lambda p, u, new: _step(p, new) if _is_narrow(p) else u, params, updates, rounded)
        return steps, KahanState(lost, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def master_weights(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` for 16-bit parameters, which updates float32 master copies in its own state and rounds those.

    It is training with float32 master parameters (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1), which lie
    with the moments, so that ``Zero(offload="optimizer")`` takes both off the device and leaves 16 bits of each
    parameter there. The masters begin as the 16-bit parameters. Float32 parameters are left as they are.

    Args:
        optimizer: any optax transformation.

    >>> p, optimizer = jnp.ones(2, jnp.bfloat16), master_weights(optax.sgd(1.0))
    >>> state = optimizer.init(p)
    >>> for _ in range(8):  # each step by itself is rounded away
    ...     updates, state = optimizer.update(jnp.full(2, -1e-3), state, p)
    ...     p = optax.apply_updates(p, updates)
    >>> p.tolist(), state.master.dtype.name
    ([1.0078125, 1.0078125], 'float32')
    """
    checks.optimizer("master_weights", optimizer)
    inner = in_float32(optimizer)

    def init(params: Any) -> MasterState:
        return MasterState(jax.tree.map(lambda p: _wide(p) if _is_narrow(p) else None, params), inner.init(params))

    def update(gradients: Any, state: MasterState, params: Any = None, **extra: Any) -> tuple[Any, MasterState]:
        _check_given("master_weights", params)
        before = jax.tree.map(lambda p, m: p if m is None else m, params, state.master)
        updates, inner_state = inner.update(gradients, state.inner, before, **extra)
        after = optax.apply_updates(before, updates)
        master = jax.tree.map(lambda p, x: x if _is_narrow(p) else None, params, after)
        steps = jax.tree.map(
            lambda p, u, x: _step(p, x.astype(p.dtype)) if _is_narrow(p) else u, params, updates, after
        )
        return steps, MasterState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def narrow_state(
    optimizer: optax.GradientTransformation, dtype: Any = "bfloat16", *, only: Any = "*", seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` whose moments are stored in 16 bit between updates, and widened again to compute with.

    To nearest, a bfloat16 second moment would stand still: with a decay of 0.999 it changes by a thousandth, and is
    stored to a 256th. So bfloat16 is rounded at random, as by `stochastic_rounding`. Scalars keep their dtype.

    Args:
        optimizer: any optax transformation.
        dtype: "bfloat16", or "float16", which is rounded to nearest.
        only: a pattern or a list of patterns of the paths, in the optimizer's state, of what is stored so, such as
            "*mu/*" for Adam's first moment alone.
        seed: of the random bits.

    Raises:
        UserError: another dtype, a seed out of its range; when the optimizer meets the parameters, a pattern that
            matches nothing of its state.

    >>> params = {"w": jnp.ones((4, 2))}
    >>> state = narrow_state(optax.adam(1e-3), only="*mu/*").init(params)
    >>> jax.tree.map(lambda x: x.dtype.name, state.inner[0])
    ScaleByAdamState(count='int32', mu={'w': 'bfloat16'}, nu={'w': 'float32'})
    """
    checks.steps("seed", seed, low=0)
    checks.optimizer("narrow_state", optimizer)
    patterns = as_patterns("only", only)
    dtype = NAMED.get(dtype, dtype) if isinstance(dtype, str) else dtype
    name = jnp.dtype(dtype).name if dtype in NARROW or dtype in map(jnp.dtype, NARROW) else None
    if name is None:
        raise UserError(f"narrow_state: dtype is {shown(dtype)}; accepted: {', '.join(map(repr, NARROW))}")
    inner = optax.with_extra_args_support(optimizer)

    def is_stored_so(path: Any, x: Any) -> bool:
        return x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating) and matches(path_name(path), patterns)

    def init(params: Any) -> RoundingState:
        state = inner.init(params)
        paths = [path_name(path) for path, _ in jax.tree.leaves_with_path(state)]
        require_matches("narrow_state: only", patterns, paths, kind="part of the optimizer's state")
        narrow = lambda path, x: x.astype(name) if is_stored_so(path, x) else x
        return RoundingState(jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(narrow, state))

    def update(gradients: Any, state: RoundingState, params: Any = None, **extra: Any) -> tuple[Any, RoundingState]:
        _check_given("narrow_state", params)
        like = jax.eval_shape(inner.init, params)
        wide = jax.tree.map(lambda x, like: x.astype(like.dtype), state.inner, like)
        updates, new = inner.update(gradients, wide, params, **extra)

        def narrow(x: jax.Array, before: jax.Array, key: jax.Array) -> jax.Array:
            loses_bits = before.dtype == jnp.bfloat16 and x.dtype != before.dtype
            return _stochastically(x, key) if loses_bits else x.astype(before.dtype)

        inner_state = jax.tree.map(narrow, new, state.inner, _keys(seed, state.count, new))
        return updates, RoundingState(state.count + 1, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """bfloat16 of float32, up or down at random with the mean of ``x``; infinities and NaN stay.

    >>> x = jnp.full(4096, 1 + 2**-9)  # a quarter of the way between two bfloat16 numbers
    >>> sorted(set(_stochastically(x, jax.random.key(0)).tolist()))
    [1.0, 1.0078125]
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    kept = ((bits + noise) >> DROPPED_BITS).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(kept, jnp.bfloat16), x.astype(jnp.bfloat16))


def _keys(seed: int, count: jax.Array, tree: Any) -> Any:
    """A key for each leaf of this update, in a tree of their structure."""
    key = jax.random.fold_in(jax.random.key(seed), count)
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [jax.random.fold_in(key, i) for i in range(len(leaves))])


def _step(p: jax.Array, rounded: jax.Array) -> jax.Array:
    """The update after which a parameter is ``rounded``, exactly: `optax.apply_updates` adds in float32."""
    return _wide(rounded) - _wide(p)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _is_narrow(p: Any) -> bool:
    return p.dtype.name in NARROW


def _check_given(wrapper: str, params: Any) -> None:
    if params is None:
        raise UserError(f"{wrapper}'s update was given no params; accepted: update(gradients, state, params)")
