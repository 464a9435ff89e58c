"""Parameters and moments stored in 16 bit: what rounding does to sums, in shards, on resuming, and to training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import Precision, UserError, Zero, optim

BF16 = Precision(master="bfloat16", compute="bfloat16")
ONE_DEVICE = zerojax.make_mesh(devices=jax.devices()[:1])
WRAPPERS = {"stochastic": optim.stochastic_rounding, "kahan": optim.kahan}
both = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)


def added(optimizer, p, u):
    """p + u as the optimizer rounds it, in float64."""
    updates, _ = optimizer.update(-u, optimizer.init(p), p)
    return np.asarray(optax.apply_updates(p, updates), np.float64)


SUMS = 100_000
DRAWN = np.random.default_rng(0).normal(size=(2, SUMS)).astype(np.float32)
ADDENDS = {
    "of all sizes": (jnp.asarray(DRAWN[0], jnp.bfloat16), jnp.asarray(DRAWN[1] * np.exp(3 * DRAWN[0]), jnp.float32)),
    "too small": (jnp.ones(SUMS, jnp.bfloat16), jnp.full(SUMS, 1e-3)),
    "at a power of two": (jnp.ones(SUMS, jnp.bfloat16), jnp.full(SUMS, -1e-3)),
    "below zero": (jnp.full(SUMS, -3.0, jnp.bfloat16), jnp.full(SUMS, 1e-3)),
}


@pytest.mark.parametrize("addends", ADDENDS.values(), ids=ADDENDS)
def test_sums_are_right_on_average(addends):
    p, u = addends
    exact = np.asarray(p, np.float64) + np.asarray(u, np.float64)
    error = added(optim.stochastic_rounding(optax.sgd(1.0)), p, u) - exact
    assert abs(error.mean()) < 3 * error.std() / np.sqrt(SUMS)
    assert (np.abs(error) < np.abs(exact) * 2.0**-7).all() and error.std() > 0


def test_a_sum_that_is_a_bfloat16_number_is_kept():
    p, u = jnp.full(1000, 1.5, jnp.bfloat16), jnp.full(1000, 0.25)
    assert (added(optim.stochastic_rounding(optax.sgd(1.0)), p, u) == 1.75).all()


def test_infinities_and_nan_stay():
    p, u = jnp.ones(3, jnp.bfloat16), jnp.array([jnp.inf, -jnp.inf, jnp.nan])
    np.testing.assert_array_equal(added(optim.stochastic_rounding(optax.sgd(1.0)), p, u), u)


def test_kahan_s_sum_is_the_float32_one_over_many_steps():
    p, optimizer = jnp.linspace(-2, 2, 64).astype(jnp.bfloat16), optim.kahan(optax.sgd(1.0))
    steps = jnp.asarray(np.random.default_rng(1).normal(1e-4, 1e-4, size=(2000, 64)), jnp.float32)

    def step(carry, u):
        p, state = carry
        updates, state = optimizer.update(-u, state, p)
        return (optax.apply_updates(p, updates), state), None

    after, state = jax.jit(lambda: jax.lax.scan(step, (p, optimizer.init(p)), steps)[0])()
    exact = np.asarray(p, np.float64) + np.asarray(steps, np.float64).sum(0)
    got = np.asarray(after, np.float64) + np.asarray(state.lost, np.float64)
    # The steps add up to 0.2. What is lost, at most 2**-8 here, is itself rounded in every step, by 2**-17 at most.
    np.testing.assert_allclose(got, exact, rtol=0, atol=4 * 2**-17 / 3**0.5 * 2000**0.5)
    np.testing.assert_allclose(np.asarray(after, np.float64), exact, rtol=2**-8, atol=1e-3)


# --- in shards


def make_model(key):
    return {"w": jax.random.normal(key, (64, 30)), "b": jnp.ones(8)}


def linear(model, batch, rng):
    """Its gradients are means of small integers over 16 rows: exact, whatever the order of the sum. So are the moments
    and steps of the optimizers below: a compiler may join a product and a sum, and has nothing to round differently."""
    rows = jnp.mean(batch, axis=0).astype(jnp.float32)
    return jnp.sum(model["w"].astype(jnp.float32) * rows[:, None]) + jnp.sum(model["b"].astype(jnp.float32) * rows[:8])


BATCHES = [np.random.default_rng(i).integers(-8, 8, size=(16, 64)).astype(np.float32) for i in range(4)]
exact_sgd = lambda: optim.sgd(2**-10, momentum=0.5)
OPTIMIZERS = {
    "stochastic": lambda: optim.stochastic_rounding(exact_sgd()),
    "stochastic, moments too": lambda: optim.stochastic_rounding(optim.narrow_state(exact_sgd(), seed=1)),
    "kahan": lambda: optim.kahan(exact_sgd()),
}


def run(zero, optimizer, batches, state=None):
    state = zero.init(make_model, optimizer) if state is None else state
    step = zero.train_step(linear)
    for batch in batches:
        state, _ = step(state, batch)
    return state


def logical(state):
    """The leaves of parameters and optimizer state, without padding."""
    cut = lambda leaf, x: np.asarray(x)[tuple(map(slice, leaf.shape))]
    return [jax.tree.map(cut, state.layout.leaves[field], getattr(state, field)) for field in ("params", "opt_state")]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_bits_are_those_of_one_device_and_the_same_when_resumed(make, tmp_path):
    sharded = Zero(stage=3, precision=BF16, min_shard_size=8)
    state = run(sharded, make(), BATCHES)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    one = run(Zero(stage=0, precision=BF16, mesh=ONE_DEVICE), make(), BATCHES)
    jax.tree.map(np.testing.assert_array_equal, logical(state), logical(one))

    zerojax.save(tmp_path / "checkpoint", run(sharded, make(), BATCHES[:2]))
    resumed = zerojax.restore(tmp_path / "checkpoint", sharded, make_model, make())
    resumed = run(sharded, make(), BATCHES[2:], resumed)
    jax.tree.map(np.testing.assert_array_equal, logical(resumed), logical(state))


def squares(model, batch, rng):
    return jnp.mean((batch.astype(model["w"].dtype) @ model["w"]).astype(jnp.float32) ** 2) + jnp.sum(model["b"] ** 2)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("make", [exact_sgd, lambda: optim.adamw(1e-2)], ids=["sgd", "adamw"])
def test_master_weights_are_those_of_float32_master_parameters(make, compute):
    """Bit by bit, where both begin as numbers of 16 bit: the gradients are those of one compute copy."""
    narrow = lambda key: jax.tree.map(lambda x: x.astype(compute).astype(jnp.float32), make_model(key))
    trained = []
    for master, optimizer in (("float32", make()), (compute, optim.master_weights(make()))):
        zero = Zero(stage=3, precision=Precision(master=master, compute=compute), min_shard_size=8, clip_norm=1.0)
        state, step = zero.init(narrow, optimizer), zero.train_step(squares)
        for batch in BATCHES:
            state, metrics = step(state, batch)
        trained.append((state, jax.device_get(metrics)))
    (plain, expected), (state, metrics) = trained
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.master, plain.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.inner, plain.opt_state)
    jax.tree.map(lambda p, x: np.testing.assert_array_equal(p, x.astype(p.dtype)), state.params, plain.params)
    assert metrics == expected


def test_master_weights_leave_float32_parameters_alone():
    params = {"narrow": jnp.ones(4, jnp.bfloat16), "wide": jnp.ones(4)}
    optimizer = optim.master_weights(optax.sgd(0.1))
    state = optimizer.init(params)
    assert state.master["wide"] is None
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    np.testing.assert_array_equal(updates["wide"], np.float32(-0.1) * np.ones(4, np.float32))


def test_rounding_adds_no_collective():
    found = []
    for optimizer in (optim.adamw(1e-3), optim.stochastic_rounding(optim.narrow_state(optim.adamw(1e-3)))):
        zero = Zero(stage=3, precision=BF16, min_shard_size=8)
        state = zero.abstract_state(make_model, optimizer)
        found.append(zero.report(state, zero.train_step(linear), jax.ShapeDtypeStruct((16, 64), jnp.float32)))
    assert found[0].sent.bytes == found[1].sent.bytes
    assert found[1].optimizer.bytes < 0.52 * found[0].optimizer.bytes  # the moments
    assert found[0].parameters.bytes == (64 * 32 / 8 + 1) * 2


# --- training

WIDTH, ROWS, STEPS = 64, 256, 1000


def regression():
    """Signs, which bfloat16 holds, and noise, so that the best loss is not 0."""
    rng = np.random.default_rng(2)
    x = rng.choice([-1.0, 1.0], size=(ROWS, WIDTH)).astype(np.float32)
    best = rng.uniform(1.2, 1.5, size=WIDTH)
    return x, (x @ best + rng.normal(0, 1.5, size=ROWS)).astype(np.float32)


X, Y = regression()


def fitted(optimizer, precision, steps=STEPS):
    """The loss of the trained weights, computed in float64."""
    zero = Zero(stage=0, mesh=ONE_DEVICE, precision=precision)
    make = lambda key: {"w": jnp.ones(WIDTH)}
    error = lambda model, batch: (batch["x"].astype(model["w"].dtype) @ model["w"]).astype(jnp.float32) - batch["y"]
    state = zero.init(make, optimizer)
    step = zero.train_step(lambda model, batch, rng: jnp.mean(jnp.square(error(model, batch))))
    for _ in range(steps):
        state, _ = step(state, {"x": X, "y": Y})
    w = np.asarray(state.params["w"], np.float64)
    return np.mean((X @ w - Y) ** 2), w


def test_16_bit_parameters_train_as_float32_ones_do_where_rounding_to_nearest_stalls():
    optimizer = optim.sgd(2e-3)  # steps of 0.003 and less; half the distance from 1 to the next number is 0.004
    want, _ = fitted(optimizer, "fp32")
    stalled, w = fitted(optimizer, BF16)
    assert (w == 1).mean() > 0.9 and stalled > 4 * want
    for wrapper in WRAPPERS.values():
        got, _ = fitted(wrapper(optimizer), BF16)
        assert got == pytest.approx(want, rel=0.01)


def test_16_bit_moments_follow_where_rounding_to_nearest_stalls():
    """A second moment that has to fall by a factor of 8 in 2,000 steps of 0.999."""
    gradients = jnp.concatenate([jnp.ones((2000, 256)), jnp.zeros((2000, 256))])

    def second_moment(optimizer, read):
        def step(state, g):
            return optimizer.update(g, state, params)[1], None

        params = jnp.zeros(256)
        return np.asarray(read(jax.jit(lambda: jax.lax.scan(step, optimizer.init(params), gradients)[0])()), np.float64)

    want = (1 - 0.999**2000) * 0.999**2000
    adam = optim.adam(1e-3)
    narrow = second_moment(optim.narrow_state(adam), lambda state: state.inner[0].nu)
    assert narrow.mean() == pytest.approx(want, rel=0.02)

    to_nearest = optax.GradientTransformation(
        lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, adam.init(p)),
        lambda g, state, p: (g, jax.tree.map(lambda x, old: x.astype(old.dtype), adam.update(g, state, p)[1], state)),
    )
    assert second_moment(to_nearest, lambda state: state[0].nu).mean() > 1.5 * want


@both
def test_float32_parameters_and_others_are_left_as_they_are(wrapper):
    params = {"w": jnp.linspace(-1, 1, 64), "half": jnp.ones(8, jnp.bfloat16), "ids": jnp.arange(3)}
    gradients = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3), params)
    after = []
    for optimizer in (optim.adamw(1e-2), wrapper(optim.adamw(1e-2))):
        updates, state = optimizer.update(gradients, optimizer.init(params), params)
        after.append(optax.apply_updates(params, updates))
    np.testing.assert_array_equal(after[0]["w"], after[1]["w"])
    np.testing.assert_array_equal(after[1]["ids"], np.arange(3))
    assert after[1]["half"].dtype == jnp.bfloat16


def test_moments_of_16_bit_parameters_are_float32_unless_narrowed():
    params = {"w": jnp.ones((4, 2), jnp.bfloat16)}
    dtypes = lambda optimizer: {x.dtype.name for x in jax.tree.leaves(optimizer.init(params)) if x.ndim}
    assert dtypes(optim.stochastic_rounding(optax.adamw(1e-3))) == {"float32"}
    assert dtypes(optim.stochastic_rounding(optim.narrow_state(optax.adamw(1e-3)))) == {"bfloat16"}
    assert dtypes(optim.narrow_state(optim.adamw(1e-3), "float16", only="*mu/*")) == {"float16", "float32"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.stochastic_rounding(optax.sgd(1.0), seed=-1), "seed is -1; accepted: an integer of at least 0"),
        (lambda: optim.narrow_state(optax.sgd(1.0), "float32"), "dtype is 'float32'; accepted: 'bfloat16', 'float16'"),
        (lambda: optim.narrow_state(optax.sgd(1.0), only=3), "only is 3; accepted: a pattern"),
        (
            lambda: optim.narrow_state(optax.adam(1.0), only="*nv*").init({"w": jnp.ones(2)}),
            "narrow_state: only '[*]nv[*]' matches no part of the optimizer's state; there are '0/count', '0/mu/w', ",
        ),
        (
            lambda: optim.stochastic_rounding(optax.sgd(1.0)).init({"w": jnp.ones(2, jnp.float16)}),
            "stochastic_rounding: parameter 'w' is float16; accepted: bfloat16 or float32",
        ),
        (lambda: _update_without_params(optim.kahan(optax.sgd(1.0))), "kahan's update was given no params"),
        (
            lambda: _update_without_params(optim.master_weights(optax.sgd(1.0))),
            "master_weights's update was given no params",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def _update_without_params(optimizer):
    p = jnp.ones(2, jnp.bfloat16)
    optimizer.update(p, optimizer.init(p))


@pytest.mark.parametrize("name", ["stochastic_rounding", "kahan", "master_weights", "narrow_state"])
def test_what_is_no_optimizer(name):
    with pytest.raises(UserError, match=f"^{name}: optimizer is 3; accepted: an optax.GradientTransformation"):
        getattr(optim, name)(3)
