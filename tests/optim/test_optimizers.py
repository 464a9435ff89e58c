"""What all optimizers have in common, and the formulas that the golden trajectories leave out."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.optim import trees
from zerojax import optim
from zerojax.errors import UserError

RATE = optim.warmup_lr(0.01, 0.05, 4, "linear")
OPTIMIZERS = {
    "adam": functools.partial(optim.adam, weight_decay=0.1, adam_w_mode=False),
    "adamw": functools.partial(optim.adamw, weight_decay=0.1),
    "amsgrad": functools.partial(optim.adamw, amsgrad=True),
    "lamb": functools.partial(optim.lamb, weight_decay=0.1),
    "lion": functools.partial(optim.lion, weight_decay=0.1),
    "adagrad": functools.partial(optim.adagrad, weight_decay=0.1),
    "sgd": functools.partial(optim.sgd, momentum=0.9, nesterov=True, weight_decay=0.1),
    "muon": functools.partial(optim.muon, weight_decay=0.1, ns_dtype=jnp.float32),
    "grouped": lambda learning_rate: optim.grouped(
        optim.adamw, [{"params": "*bias", "weight_decay": 0.0}], {"learning_rate": learning_rate, "weight_decay": 0.1}
    ),
}
every = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
BY_ENTRY = {name: make for name, make in OPTIMIZERS.items() if name not in ("lamb", "grouped")}


@every
def test_jit_changes_nothing(make: Any) -> None:
    params = trees.params()
    steps = trees.gradients(params, 3)
    trees.assert_close(
        trees.trained(make(RATE), params, steps, jax.jit), trees.trained(make(RATE), params, steps), 2e-6
    )


@every
def test_holes_stay_and_integers_keep_their_values(make: Any) -> None:
    params = trees.params()
    state = make(RATE).init(params)
    after = trees.trained(make(RATE), params, trees.gradients(params, 2))
    assert after["out"]["bias"] is None
    assert after["table"].dtype == params["table"].dtype
    assert after["table"].tolist() == params["table"].tolist()
    assert not any(x.shape == params["table"].shape for x in jax.tree.leaves(state))


@every
def test_integers_may_have_jax_own_gradients(make: Any) -> None:
    params = trees.params()
    loss = lambda p: sum(jnp.sum(x * x) for x in jax.tree.leaves(p) if jnp.issubdtype(x.dtype, jnp.floating))
    gradients = jax.grad(loss, allow_int=True)(params)
    assert gradients["table"].dtype == jax.dtypes.float0
    assert trees.trained(make(RATE), params, [gradients])["table"].tolist() == params["table"].tolist()


@every
def test_abstract_values_have_the_same_structure(make: Any) -> None:
    params = trees.params()
    optimizer = make(RATE)
    state = optimizer.init(params)
    abstract = jax.eval_shape(optimizer.init, params)
    updates, after = jax.eval_shape(optimizer.update, params, abstract, params)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(abstract) == shapes(state) == shapes(after)
    assert shapes(updates) == shapes(params)


@every
def test_shards_give_what_whole_arrays_give(make: Any) -> None:
    params = trees.params()
    steps = trees.gradients(params, 2)
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def shard(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(*(None if n % 8 else "data" for n in x.shape[-1:]))
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 1), *spec)))

    cut = lambda tree: jax.tree.map(shard, tree)
    optimizer = make(RATE)
    update = jax.jit(optimizer.update)
    sharded, state = cut(params), cut(jax.jit(optimizer.init)(params))
    for gradient in steps:
        updates, state = update(cut(gradient), state, sharded)
        sharded = jax.jit(optax.apply_updates)(sharded, updates)
    assert not sharded["embedding"].sharding.is_fully_replicated
    trees.assert_close(sharded, trees.trained(optimizer, params, steps, jax.jit), 2e-6)


@every
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["fp16", "bf16"])
def test_16_bit_parameters_are_rounded_once(make: Any, dtype: Any) -> None:
    params = trees.params(dtype)
    gradients = jax.tree.map(lambda g: g * 0, params) | {"embedding": jnp.full((16, 8), 300.0, dtype)}
    optimizer = make(RATE)
    updates, state = optimizer.update(gradients, optimizer.init(params), params)
    floats = [x for x in jax.tree.leaves((updates, state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(x.dtype == jnp.float32 and bool(jnp.isfinite(x).all()) for x in floats)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, tree)
    trees.assert_close(updates, optimizer.update(wide(gradients), optimizer.init(wide(params)), wide(params))[0], 0)
    assert optax.apply_updates(params, updates)["embedding"].dtype == dtype


@pytest.mark.parametrize("make", BY_ENTRY.values(), ids=BY_ENTRY)
def test_a_stack_of_layers_is_trained_as_its_layers_are(make: Any) -> None:
    stacked = {"blocks": trees.params()["blocks"]}
    layers = {str(i): jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(3)}
    steps = trees.gradients(stacked, 3)
    apart = [{str(i): jax.tree.map(lambda x, i=i: x[i], gradient) for i in range(3)} for gradient in steps]
    after = trees.trained(make(0.05), layers, apart, jax.jit)
    together = jax.tree.map(lambda *x: jnp.stack(x), *after.values())
    trees.assert_close(trees.trained(make(0.05), stacked, steps, jax.jit), together, 2e-6)


@every
def test_a_schedule_is_asked_with_the_number_of_updates(make: Any) -> None:
    # The parameters stay what they are, so that the updates differ by the rate alone.
    params = trees.params()
    gradients = trees.gradients(params, 1)[0]
    rates = [0.01, 0.03]
    scheduled, constant = make(lambda count: jnp.array(rates)[count]), [make(rate) for rate in rates]
    state = scheduled.init(params)
    states = [optimizer.init(params) for optimizer in constant]
    for i in range(2):
        updates, state = scheduled.update(gradients, state, params)
        pairs = [o.update(gradients, s, params) for o, s in zip(constant, states, strict=True)]
        states = [s for _, s in pairs]
        trees.assert_close(updates, pairs[i][0], 1e-6)


def test_the_first_coefficient_may_be_a_schedule() -> None:
    b1s, b2, lr, eps = [0.8, 0.9, 0.85], 0.99, 0.1, 1e-8
    momentum = lambda count: jnp.array(b1s)[count]
    gradients = trees.gradients({"w": jnp.zeros(4)}, 3)
    p, m, v = np.ones(4), np.zeros(4), np.zeros(4)
    q, n = np.ones(4), np.zeros(4)
    for t, (b1, gradient) in enumerate(zip(b1s, gradients, strict=True), 1):
        g = np.asarray(gradient["w"], np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - lr * m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        q, n = q - lr * np.sign(b1 * n + (1 - b1) * g), b2 * n + (1 - b2) * g
    start = {"w": jnp.ones(4)}
    trees.assert_close(trees.trained(optim.adamw(lr, (momentum, b2)), start, gradients, jax.jit)["w"], p)
    trees.assert_close(trees.trained(optim.lion(lr, (momentum, b2)), start, gradients, jax.jit)["w"], q)


def test_lamb_takes_the_norm_of_the_whole_leaf() -> None:
    lr, b1, b2, eps, decay, low, high = 0.1, 0.9, 0.99, 1e-2, 0.1, 0.05, 5.0
    params = {"stack": trees.params()["blocks"]["up"]["kernel"], "zero": jnp.zeros(3)}
    steps = trees.gradients(params, 3)
    wanted = {name: np.asarray(p, np.float64) for name, p in params.items()}
    m, v = ({name: np.zeros_like(p) for name, p in wanted.items()} for _ in range(2))
    for t, gradient in enumerate(steps, 1):
        for name, p in wanted.items():
            g = np.asarray(gradient[name], np.float64)
            m[name], v[name] = b1 * m[name] + (1 - b1) * g, b2 * v[name] + (1 - b2) * g * g
            u = m[name] / np.sqrt(v[name] + eps) + decay * p
            sizes = np.linalg.norm(p.ravel()), np.linalg.norm(u.ravel())
            ratio = np.clip(sizes[0] / sizes[1], low, high) if min(sizes) > 0 else 1.0
            wanted[name] = p - lr * math.sqrt(1 - b2**t) / (1 - b1**t) * ratio * u
    optimizer = optim.lamb(lr, (b1, b2), eps, decay, eps_inside_sqrt=True, min_coeff=low, max_coeff=high)
    trees.assert_close(trees.trained(optimizer, params, steps), wanted)


def test_lamb_leaves_a_leaf_alone_whose_update_is_zero() -> None:
    params = {"w": jnp.ones(3)}
    after = trees.trained(optim.lamb(0.1), params, [{"w": jnp.zeros(3)}])
    assert after["w"].tolist() == [1.0, 1.0, 1.0]


def test_adagrad_slows_down() -> None:
    lr, slow, eps, start = 0.1, 0.5, 1e-3, 2.0
    gradients = trees.gradients({"w": jnp.zeros(4)}, 3)
    p, total = np.ones(4), np.full(4, start)
    for t, gradient in enumerate(gradients):
        g = np.asarray(gradient["w"], np.float64)
        total = total + g * g
        p = p - lr / (1 + t * slow) * g / (np.sqrt(total) + eps)
    optimizer = optim.adagrad(lr, eps, lr_decay=slow, initial_accumulator_value=start)
    trees.assert_close(trees.trained(optimizer, {"w": jnp.ones(4)}, gradients)["w"], p)


def test_without_momentum_there_is_no_buffer() -> None:
    assert not jax.tree.leaves(optim.sgd(0.1).init({"w": jnp.ones(4)}))


def test_the_rate_may_be_injected() -> None:
    params = {"w": jnp.ones(4)}
    optimizer = optax.inject_hyperparams(optim.adamw)(learning_rate=0.1, weight_decay=0.5)
    state = optimizer.init(params)
    state.hyperparams["learning_rate"] = jnp.float32(0.25)
    updates, _ = jax.jit(optimizer.update)(params, state, params)
    np.testing.assert_allclose(updates["w"], [-0.375] * 4, rtol=1e-6)


REFUSED = {
    "learning_rate is -0.1; accepted: a number of at least 0": lambda: optim.adamw(-0.1),
    "learning_rate is '1e-3'; accepted: a number of at least 0": lambda: optim.sgd("1e-3"),
    "learning_rate is nan; accepted: a number of at least 0": lambda: optim.lion(math.nan),
    r"betas is 0.9; accepted: a pair of numbers": lambda: optim.adam(0.1, 0.9),
    r"betas\[0\] is 1.0; accepted: a number of at least 0 and below 1": lambda: optim.adam(0.1, (1.0, 0.9)),
    r"betas\[1\] is -1; accepted: a number of at least 0 and below 1": lambda: optim.lamb(0.1, (0.9, -1)),
    "eps is None; accepted: a number of at least 0": lambda: optim.adagrad(0.1, None),
    "weight_decay is True; accepted: a number of at least 0": lambda: optim.lion(0.1, weight_decay=True),
    "amsgrad is 1; accepted: True or False": lambda: optim.adamw(0.1, amsgrad=1),
    "adam_w_mode is 'no'; accepted: True or False": lambda: optim.adam(0.1, adam_w_mode="no"),
    "min_coeff is 20.0; accepted: at most max_coeff, 10.0": lambda: optim.lamb(0.1, min_coeff=20.0),
    "momentum is 1; accepted: a number of at least 0 and below 1": lambda: optim.sgd(0.1, 1),
    "nesterov is True with momentum 0.0 and dampening 0.0": lambda: optim.sgd(0.1, nesterov=True),
    "nesterov is True with momentum 0.9 and dampening 0.1": lambda: optim.sgd(0.1, 0.9, 0.1, nesterov=True),
    "ns_dtype is 'int8'; accepted: a floating dtype such as 'float32'": lambda: optim.muon(0.1, ns_dtype="int8"),
    "ns_dtype is 'float33'; accepted: a floating dtype such as 'float32'": lambda: optim.muon(0.1, ns_dtype="float33"),
    "adam_params is None; accepted: a pattern such as ": lambda: optim.muon(0.1, adam_params=None),
    "ns_method is 'svd'; accepted: 'standard', 'gram'": lambda: optim.muon(0.1, ns_method="svd"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input(message: str) -> None:
    with pytest.raises(UserError, match=message):
        REFUSED[message]()
