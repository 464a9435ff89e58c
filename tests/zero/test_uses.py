"""However a loss uses its parameters, gradients are those of plain JAX, whether in shards or gathered on entry."""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax import UserError, Zero
from zerojax.zero.notes import leaf_notes

N = 16
X = np.random.default_rng(0).normal(size=(N, N)).astype(np.float32)
LIMIT = 16


@zerojax.block
def layer(w, h):
    return jnp.tanh(h @ w)


remat_layer = jax.checkpoint(layer)


def matrices(names, *shape):
    """A maker of a model of some matrices, irregular numbers that compile faster than random ones."""
    numbers = lambda i: jnp.sin((i + 1) * 1.7 * jnp.arange(1.0, 1 + math.prod(shape)) ** 1.1).reshape(shape) / 4
    return lambda key: {name: numbers(i) for i, name in enumerate(names)}


def square(x):
    return jnp.mean(jnp.square(x))


@jax.custom_vjp
def by_hand(w, h):
    return jnp.tanh(h @ w)


by_hand.defvjp(
    lambda w, h: (by_hand(w, h), (w, h)),
    lambda kept, g: (kept[1].T @ (g * (1 - by_hand(*kept) ** 2)), (g * (1 - by_hand(*kept) ** 2)) @ kept[0].T),
)


@jax.custom_vjp
def around_a_block(w, h):
    return layer(w, h)


around_a_block.defvjp(
    lambda w, h: (layer(w, h), (w, h)),
    lambda kept, g: (kept[1].T @ (g * (1 - jnp.tanh(kept[1] @ kept[0]) ** 2)), jnp.zeros_like(kept[1])),
)

CASES = {}  # name -> (its parameters, loss of them, whether they stay in shards until a layer uses them)


def case(make, in_shards):
    return lambda loss: CASES.setdefault(loss.__name__, (make, loss, in_shards)) and loss


one, two, stack = matrices("w", N, N), matrices("wv", N, N), matrices("w", 4, N, N)


@case(one, True)
def one_layer(m, x):
    return square(layer(m["w"], x))


@case(one, True)
def one_leaf_in_two_layers(m, x):
    return square(layer(m["w"], jnp.sin(layer(m["w"], x))))


@case(two, False)
def penalty_over_all_leaves(m, x):
    return square(layer(m["w"], layer(m["v"], x))) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(m))


@case(one, False)
def used_inside_and_outside(m, x):
    return square(layer(m["w"], x @ m["w"]))


@case(one, True)
def under_jit_checkpoint_and_scan(m, x):
    turn = lambda h, _: (remat_layer(m["w"], h), None)
    return square(jax.jit(lambda h: jax.lax.scan(turn, h, None, length=3)[0])(x))


@case(stack, True)
def scanned_stack(m, x):
    return square(jax.lax.scan(lambda h, w: (layer(w, h), None), x, m["w"])[0])


@case(matrices("w", 8, 13, 13), False)
def scanned_stack_cut_along_the_stack(m, x):
    return square(jax.lax.scan(lambda h, w: (h + layer(w, h), None), x[:, :13], m["w"])[0])


@case(stack, True)
def stacked_members(m, x):
    return square(jax.vmap(layer, (0, None))(m["w"], x))


@case(matrices("w", 8, 13, 13), False)
def stacked_members_cut_along_the_stack(m, x):
    return square(jax.vmap(layer, (0, None))(m["w"], x[:, :13]))


@case(matrices("w", N, 24, 5), False)
def members_along_the_cut_dimension(m, x):
    return square(jax.vmap(layer, (1, None))(m["w"], x))


@case(matrices("w", N, N, 5), False)
def members_along_a_dimension_that_looks_like_the_first(m, x):
    return square(jax.vmap(zerojax.block(lambda w: jnp.tanh(w).mean(0)), 1)(m["w"])) * square(x)


@case(stack, True)
def mapped_in_turn(m, x):
    return square(jax.lax.map(lambda w: layer(w, x), m["w"]))


@case(two, True)
def carried_unchanged(m, x):
    return square(jax.lax.scan(lambda c, _: ((layer(c[1]["w"], c[0]), c[1]), None), (x, m), None, length=3)[0][0])


@case(one, False)
def carried_and_replaced(m, x):
    return square(x @ jax.lax.scan(lambda w, _: (layer(w, jnp.eye(N)), None), m["w"], None, length=2)[0])


@case(stack, False)
def handed_on_by_a_scan(m, x):
    h, ws = jax.lax.scan(lambda h, w: (layer(w, h), w), x, m["w"])
    return square(h) + square(ws)


@case(two, False)
def layers_in_branches_that_devices_choose(m, x):
    return square(jax.lax.cond(jnp.sum(x) > 0, lambda h: layer(m["w"], h), lambda h: layer(m["v"], h), x))


@case(two, False)
def a_parameter_that_devices_choose(m, x):
    return square(layer(jax.lax.cond(jnp.sum(x) > 0, lambda: m["w"], lambda: m["v"]), x))


@case(two, False)
def turns_that_devices_choose(m, x):
    fixed = jax.lax.stop_gradient(m["v"])
    turn = lambda c: (c[0] + 1, c[1] * jnp.mean(layer(fixed, x) ** 2))
    _, factor = jax.lax.while_loop(lambda c: c[0] < 2 + jnp.where(jnp.sum(x @ fixed) > 0, 1, 0), turn, (0, 1.0))
    return square(layer(m["w"], x)) * factor + jnp.mean(layer(m["w"], x)) + 0 * jnp.sum(m["v"])


@case(one, True)
def fixed_number_of_turns(m, x):
    return square(jax.lax.fori_loop(0, 3, lambda i, h: layer(m["w"], h), x))


@case(one, True)
def custom_gradient_inside_a_layer(m, x):
    return square(zerojax.block(by_hand)(m["w"], x))


@case(one, False)
def custom_gradient_around_a_layer(m, x):
    return square(around_a_block(m["w"], x))


@case(one, True)
def gradient_with_respect_to_inputs(m, x):
    return square(jax.grad(lambda x: jnp.sum(layer(m["w"], x) ** 2))(x))


@case(two, False)
def an_inner_step_of_gradient_descent(m, x):
    inner = jax.grad(lambda m: square(layer(m["w"], x)))(m)
    m = jax.tree.map(lambda w, g: w - 0.1 * g, m, inner)
    return square(layer(m["v"], layer(m["w"], x)))


@case(one, True)
def shape_read_outside_of_a_layer(m, x):
    return square(layer(m["w"], x[:, : m["w"].shape[0]])) / m["w"].size


def make_all(key):
    return {name: make(key) for name, (make, _, _) in CASES.items()}


def loss_of_all(model, x):
    return sum(loss(model[name], x) for name, (_, loss, _) in CASES.items())


@functools.cache
def expected():
    model = make_all(jax.random.key(0))
    shards = X.reshape(8, -1, N)
    return jax.device_get(jax.jit(jax.grad(lambda m: sum(loss_of_all(m, x) for x in shards) / 8))(model))


@functools.cache
def gradients(stage):
    """Of one program with all cases: what a step of gradient descent takes off; and the notes on each leaf."""
    zero = Zero(stage=stage, min_shard_size=LIMIT)
    state = zero.init(make_all, optax.sgd(1.0))
    step = zero.train_step(lambda model, batch, rng: loss_of_all(model, batch))
    before = jax.device_get(zero.gather(state))
    state, _ = step(state, X)
    notes = leaf_notes(state.layout, zero.row, step.uses[state.layout], LIMIT)
    return jax.tree.map(np.subtract, before, jax.device_get(zero.gather(state))), notes


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_jax(name, stage):
    for leaf, want in expected()[name].items():
        got = gradients(stage)[0][name][leaf]
        np.testing.assert_allclose(got, want, atol=1e-6 + 1e-5 * np.abs(want).max())
    assert any(np.abs(want).max() > 1e-4 for want in expected()[name].values())


def entered():
    """The leaves that stage 3 says are gathered on entry, with its reasons."""
    return {note.path: note.note for note in gradients(3)[1] if "when the model is entered" in note.note}


@pytest.mark.parametrize("name", CASES)
def test_what_stays_in_shards_until_a_layer_uses_it(name):
    here = {path for path in entered() if path.startswith(f"params/{name}/")}
    assert bool(here) is not CASES[name][2]


@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        ("penalty_over_all_leaves/v", "'integer_pow' takes it outside of a layer"),
        ("scanned_stack_cut_along_the_stack/w", "a scan walks along its cut dimension"),
        ("layers_in_branches_that_devices_choose/w", "'cond' takes it"),
        ("custom_gradient_around_a_layer/w", "'custom_vjp_call' takes it"),
    ],
)
def test_the_report_says_why(leaf, why):
    assert why in entered()[f"params/{leaf}"]


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_shards_within_the_loss_are_refused(stage):
    """They would be sums over devices, in shards, where the loss expects its own whole ones."""
    zero = Zero(stage=stage, min_shard_size=LIMIT)
    state = zero.abstract_state(one, optax.sgd(1.0))
    norm = lambda m, x, rng: jnp.sum(jax.grad(lambda m: square(layer(m["w"], x)))(m)["w"] ** 2)
    with pytest.raises(UserError, match="parameters that are in shards; accepted: stage 0 or 1"):
        zero.train_step(norm).lower(state, X)
    Zero(stage=1, min_shard_size=LIMIT).train_step(norm).lower(Zero(stage=1).abstract_state(one, optax.sgd(1.0)), X)


# Flax NNX: every read of a parameter in a module is its use.


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (N, N)) / 4)
        self.b = nnx.Param(jnp.zeros(N))

    def __call__(self, h):
        return jnp.tanh(h @ self.w + self.b)


class Net(nnx.Module):
    """Layers in the ways that NNX offers, of which each has its own parameters."""

    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (N, N)) / 4)  # tied: first and last
        self.transposed, self.plain, self.checked, self.compiled = (Dense(rngs) for _ in range(4))
        self.penalised, self.left, self.right = (Dense(rngs) for _ in range(3))
        self.same = self.plain  # a module under two names
        self.scanned, self.members = (
            nnx.vmap(lambda key: Dense(nnx.Rngs(key)))(jax.random.split(rngs.params(), 3)) for _ in range(2)
        )

    def __call__(self, x):
        h = x @ self.table
        h = h + jnp.tanh(h @ self.transposed.w.T + self.transposed.b.sum())
        h = h + self.same(self.plain(h)) + self.penalised(h)
        h = h + nnx.remat(lambda layer, h: layer(h))(self.checked, h)
        h = h + nnx.jit(lambda layer, h: layer(h))(self.compiled, h)
        turn = nnx.remat(lambda h, layer: h + layer(h))
        h = nnx.scan(turn, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(h, self.scanned)
        h = h + nnx.vmap(lambda layer, h: layer(h), in_axes=(0, None))(self.members, h).mean(0)
        h = h + nnx.cond(jnp.sum(x) > 0, lambda a, b, h: a(h), lambda a, b, h: b(h), self.left, self.right, h)
        return h @ self.table.T


def net_loss(model, x, rng):
    return square(model(x)) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(model.penalised, nnx.Param)))


@functools.cache
def expected_of_net():
    graph, params = nnx.split(Net(nnx.Rngs(jax.random.key(0))))
    loss = lambda params: sum(net_loss(nnx.merge(graph, params), x, None) for x in X.reshape(8, -1, N)) / 8
    return jax.device_get(nnx.to_pure_dict(jax.jit(jax.grad(loss))(params)))


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_nnx_modules_are_those_of_plain_jax(stage):
    zero = Zero(stage=stage, min_shard_size=LIMIT)
    state = zero.init(lambda key: Net(nnx.Rngs(key)), optax.sgd(1.0))
    before = jax.device_get(state.params)
    after = jax.device_get(zero.train_step(net_loss)(state, X)[0].params)
    gradients = jax.tree.map(np.subtract, before, after)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected_of_net())
    for (path, want), got in zip(jax.tree.leaves_with_path(expected_of_net()), jax.tree.leaves(gradients), strict=True):
        assert np.abs(want).max() > 1e-4
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), err_msg=jax.tree_util.keystr(path))


def test_an_nnx_module_gathers_each_leaf_where_it_is_read():
    zero = Zero(stage=3, min_shard_size=LIMIT)
    step = zero.train_step(net_loss)
    report = zero.report(zero.abstract_state(lambda key: Net(nnx.Rngs(key)), optax.sgd(1.0)), step, X)
    entered = {note.path for note in report.notes if "when the model is entered" in note.note}
    assert entered == {f"params/{name}/{leaf}" for name in ("penalised", "left", "right") for leaf in "bw"}


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (24, N)))

    def __call__(self, tokens):
        return jnp.tanh(self.table[...][tokens]) @ self.table[...].T


def test_a_leaf_read_twice_in_one_place_is_gathered_and_reduced_once():
    zero = Zero(stage=3, min_shard_size=LIMIT)
    step = zero.train_step(lambda model, tokens, rng: square(model(tokens)))
    tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    report = zero.report(zero.abstract_state(lambda key: Tied(nnx.Rngs(key)), optax.sgd(1.0)), step, tokens)
    counts = Counter({c.kind: c.count for c in report.collectives if not c.tiny})
    assert counts["reduce-scatter"] == 1 and counts["all-gather"] <= 2
