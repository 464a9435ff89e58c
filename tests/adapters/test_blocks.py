"""Modules rematerialised by themselves: which ones, and that their calls give and change what they did."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zerojax import UserError
from zerojax.adapters import Block, Module, take_apart
from zerojax.adapters.blocks import named_blocks, repeated_blocks, scanned_blocks
from zerojax.adapters.linen_blocks import linen_blocks, linen_modules_met

WIDTH = 4
FULL = jax.checkpoint_policies.nothing_saveable
KEEP = jax.checkpoint_policies.everything_saveable


def modules(**kinds):
    return {path.replace("_", "/"): Module(kind) for path, kind in kinds.items()}


def repeated(modules, every=1, scanned=(), own=(), rest=None):
    return repeated_blocks(modules, every, scanned, own, FULL, rest)


def named(modules, *patterns, every=1, scanned=(), rest=None):
    return named_blocks(modules, patterns, every, scanned, FULL, rest)


LAYERS = {f"layers/{i}": Module("Layer") for i in range(12)}
HEADS = {f"layers/{i}/head{j}": Module("Head") for i in range(12) for j in range(2)}


def test_numbered_siblings_of_one_type_are_blocks():
    others = {"": Module("Net"), "norm1": Module("Norm"), "out": Module("Linear"), "out2": Module("Linear")}
    assert repeated(others | LAYERS) == dict.fromkeys(LAYERS, Block(FULL, sliced=False))


def test_of_siblings_inside_of_siblings_the_more_are_blocks():
    towers = {f"towers/{i}": Module("Tower") for i in range(2)}
    inside = {f"towers/{i}/layers/{j}": Module("Layer") for i in range(2) for j in range(3)}
    assert set(repeated(towers | inside)) == set(inside)
    assert set(repeated(LAYERS | HEADS)) == set(LAYERS)


def test_what_a_scan_calls_is_a_block_on_slices_alone():
    net = {"": Module("Net"), "stack": Module("Layer"), "stack/mlp": Module("MLP"), "out": Module("Linear")}
    found = repeated(net, scanned=["stack/mlp/kernel"])
    assert found == dict.fromkeys(["", "stack", "stack/mlp"], Block(FULL, sliced=True))
    met = net | {"": Module("Net", sliced=False)}
    assert set(scanned_blocks(met, ["stack/mlp/kernel"], [], FULL)) == {"stack", "stack/mlp"}


def test_layers_of_a_listed_stack_are_blocks_and_not_the_stack():
    towers = {"towers/0": Module("Tower"), "towers/1": Module("Tower"), "towers/0/stack": Module("Layer")}
    assert repeated(towers, scanned=["towers/0/stack/kernel", "towers/1/stack/kernel"]) == dict.fromkeys(
        towers, Block(FULL, sliced=True)
    )


def test_what_the_model_rematerialises_itself_is_left_alone():
    own = [f"layers/{i}/kernel" for i in range(11)]
    assert repeated(LAYERS, own=own) == {}  # a single one is no repetition
    assert repeated(LAYERS, own=[*own, "layers/11/kernel"]) == {}
    assert scanned_blocks(modules(stack="Layer"), ["stack/kernel"], ["stack/kernel"], FULL) == {}


def test_every_nth_counts_in_the_order_of_numbers():
    assert set(repeated(LAYERS, every=5)) == {"layers/0", "layers/5", "layers/10"}
    assert repeated(LAYERS, every=5, rest=KEEP)["layers/9"] == Block(KEEP, False)


@pytest.mark.parametrize("pattern", ["layers/*", "Layer", "La*", "layers/[0-9]*"])
def test_patterns_are_of_paths_or_of_types(pattern):
    assert set(named(LAYERS | HEADS | modules(out="Linear"), pattern)) == set(LAYERS)


def test_the_outermost_of_what_patterns_match():
    assert set(named(LAYERS | HEADS, "Head", "layers/3")) == {"layers/3", *HEADS} - {"layers/3/head0", "layers/3/head1"}


def test_a_pattern_that_matches_nothing():
    with pytest.raises(UserError, match=r"'block/\*', which matches no module; accepted: .*'layers/0' \(Layer\)"):
        named(LAYERS, "Layer", "block/*")
    with pytest.raises(UserError, match="lack of modules"):
        named({}, "*")


@pytest.mark.parametrize("choose", [repeated, lambda *a, **k: named(*a, "stack", **k)])
def test_every_nth_layer_of_a_stack_is_no_choice(choose):
    with pytest.raises(UserError, match="every is 2.*one stack"):
        choose(modules(stack="Layer"), every=2, scanned=["stack/kernel"])


# Calls.


def remats(function, *args):
    """The number of rematerialised parts in a traced function."""
    return str(jax.make_jaxpr(function)(*args)).count("prevent_cse")


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, h, times, rngs, *, activation=None):
        self.calls[...] += 1
        self.last = nnx.Intermediate(h)
        mask = jax.random.bernoulli(rngs.dropout(), 0.5, h.shape)
        return times * activation(self.norm(self.linear(h))) * mask, "a text"


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(2)])
        self.rngs = nnx.Rngs(dropout=1)

    def __call__(self, h):
        for layer in self.layers:
            h, text = layer(h, 2, self.rngs, activation=jnp.tanh)
            assert text == "a text"
        return h


def test_an_nnx_module_takes_and_returns_and_changes_what_it_did():
    model, h = NnxNet(nnx.Rngs(0)), jnp.linspace(-1, 1, 6 * WIDTH).reshape(6, WIDTH)
    adapter, parts = take_apart(model)
    assert {path: x.kind for path, x in adapter.modules().items() if "/" in path and path.count("/") == 1} == {
        "layers/0": "NnxLayer",
        "layers/1": "NnxLayer",
    }

    def run(params, blocks):
        joined = adapter.join(params, parts.variables, jax.random.key(3), training=True, blocks=blocks)
        out = joined(h)
        assert isinstance(joined.layers[0], NnxLayer) and len(joined.layers[0].last[...]) == 6
        return jnp.sum(out**2), (out, adapter.carried(joined, {})[0], joined.rngs.dropout.count[...])

    plain, blocks = {}, {"layers/0": Block(FULL, False), "layers/1": Block(KEEP, False)}
    assert [remats(lambda p, b=b: run(p, b), parts.params) for b in (plain, blocks)] == [0, 2]
    one, other = (jax.value_and_grad(run, has_aux=True)(parts.params, b) for b in (plain, blocks))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert int(other[0][1][1]["layers"][1]["calls"]) == 1 and int(other[0][1][2]) == 2


class LinenLayer(nn.Module):
    flag: bool = True

    @nn.compact
    def __call__(self, h, times, activation="tanh"):
        self.sow("seen", "inputs", h)
        h = nn.BatchNorm(use_running_average=not self.flag)(nn.Dense(WIDTH)(h))
        return times * nn.Dropout(0.5, deterministic=False)(getattr(jnp, activation)(h)), "a text"


class LinenNet(nn.Module):
    def setup(self):
        self.first, self.rest = LinenLayer(), [LinenLayer(name=f"rest{i}") for i in range(2)]

    def __call__(self, h):
        for layer in (self.first, *self.rest):
            h, text = layer(h, 2, activation="tanh")
            assert text == "a text"
        return h


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, h):
        body = lambda layer, h: (layer(h, 2.0)[0], None)
        scan = nn.scan(body, variable_axes={True: 0}, split_rngs={True: True}, length=3)
        return scan(LinenLayer(), h)[0]


@pytest.mark.parametrize(
    ("net", "path", "sliced"), [(LinenNet, "rest1", False), (LinenNet, "", False), (LinenScanned, "LinenLayer_0", True)]
)
def test_a_linen_module_takes_and_returns_and_changes_what_it_did(net, path, sliced):
    net, h = net(), jnp.linspace(-1, 1, 6 * WIDTH).reshape(6, WIDTH)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = {k: v for k, v in net.init(keys, h).items() if k != "seen"}
    with linen_modules_met() as met:
        net.apply(variables, h, rngs=keys, mutable=["batch_stats", "seen"])
    assert met[path] == Module("LinenLayer" if path else "LinenNet", sliced)

    def run(variables, blocks):
        with linen_blocks(blocks):
            out, changed = net.apply(variables, h, rngs=keys, mutable=["batch_stats", "seen"])
        return jnp.sum(out**2), (out, changed)

    plain, blocks = {}, {path: Block(FULL, sliced)}
    assert [remats(lambda v, b=b: run(v, b), variables) for b in (plain, blocks)] == [0, 1]
    one, other = (jax.value_and_grad(run, has_aux=True)(variables, b) for b in (plain, blocks))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert other[0][1][1]["seen"]


def test_a_scan_of_linen_is_known_by_the_layer_that_it_calls():
    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, h):
            dense = nn.scan(Carrying, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return dense(name="layers")(h, None)[0]

    class Carrying(nn.Module):
        @nn.compact
        def __call__(self, h, _):
            return nn.Dense(WIDTH)(h), None

    h = jnp.ones((2, WIDTH))
    variables = Stacked().init(jax.random.key(0), h)
    with linen_modules_met() as met:
        Stacked().apply(variables, h)
    assert met["layers"] == Module("Carrying", sliced=True) and met[""] == Module("Stacked", sliced=False)


class EquinoxLayer(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, h, times, *, activation):
        return times * activation(self.linear(h)), "a text"


class EquinoxNet(eqx.Module):
    layers: list

    def __call__(self, h):
        for layer in self.layers:
            h, text = layer(h, 2, activation=jnp.tanh)
            assert text == "a text"
        return h


def test_an_equinox_module_takes_and_returns_what_it_did():
    keys, h = jax.random.split(jax.random.key(0), 2), jnp.ones((3, WIDTH))
    adapter, parts = take_apart(EquinoxNet([EquinoxLayer(eqx.nn.Linear(WIDTH, WIDTH, key=key)) for key in keys]))
    assert {path: x.kind for path, x in adapter.modules().items()} == {"": "EquinoxNet"} | {
        f"layers/{i}{inner}": kind
        for i in range(2)
        for inner, kind in {"": "EquinoxLayer", "/linear": "Linear"}.items()
    }

    def run(params, blocks):
        model = adapter.join(params, parts.variables, jax.random.key(3), training=True, blocks=blocks)
        return jnp.sum(jax.vmap(model)(h) ** 2)

    plain, blocks = {}, {"layers/0": Block(FULL, False), "layers/1": Block(FULL, False)}
    assert [remats(lambda p, b=b: run(p, b), parts.params) for b in (plain, blocks)] == [0, 2]
    jax.tree.map(np.testing.assert_array_equal, *(jax.value_and_grad(run)(parts.params, b) for b in (plain, blocks)))
