"""Rematerialisation by name: what is computed again, what it saves, and that nothing else changes."""

import functools
import operator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from tests.adapters.models import KINDS
from zerojax import Remat, UserError, Zero
from zerojax import remat as remat_module
from zerojax.models.gpt import GPT, next_token_loss

DEPTH, WIDTH, HIDDEN, ROWS = 4, 16, 64, 32
BATCH = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
TOKENS = {"tokens": np.random.default_rng(1).integers(0, 32, (16, 9))}
LIMIT = 64  # every matrix is cut


# An NNX and a Linen network with what a layer may have: statistics, random masks, settings of Python's types.


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(HIDDEN, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, h, scale, *, activation):
        y = checkpoint_name(self.up(h), "up")
        return h + scale * self.dropout(self.down(getattr(jnp, activation)(self.norm(y))))


class NnxNet(nnx.Module):
    def __init__(self, scan, rngs):
        make = nnx.vmap(lambda rngs: NnxLayer(rngs))
        self.layers = make(rngs.split(DEPTH)) if scan else nnx.List([NnxLayer(rngs) for _ in range(DEPTH)])

    def __call__(self, h):
        run = lambda layer, h: layer(h, 2, activation="tanh")
        if isinstance(self.layers, nnx.List):
            for layer in self.layers:
                h = run(layer, h)
            return h
        return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, h)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, h, scale, activation="tanh"):
        y = nn.BatchNorm(use_running_average=False)(checkpoint_name(nn.Dense(HIDDEN)(h), "up"))
        y = nn.Dense(WIDTH)(getattr(jnp, activation)(y))
        return h + scale * nn.Dropout(0.2, deterministic=False)(y), None


class LinenNet(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, h):
        if self.scan:
            axes, rngs = {"params": 0, "batch_stats": 0}, {"params": True, "dropout": True}
            layers = nn.scan(LinenLayer, variable_axes=axes, split_rngs=rngs, length=DEPTH, in_axes=nn.broadcast)
            return layers(name="layers")(h, 2.0)[0]
        for _ in range(DEPTH):
            h, _ = LinenLayer()(h, 2, activation="tanh")
        return h


def error(y, x):
    return jnp.mean(jnp.square(y - jnp.roll(x, 1, axis=-1)))


def nnx_model(scan):
    return lambda key: NnxNet(scan, nnx.Rngs(key)), lambda model, x, rng: error(model(x), x), BATCH


def linen(scan):
    net = LinenNet(scan)

    def loss(variables, x, rng):
        y, changed = net.apply(variables, x, rngs={"dropout": rng}, mutable=["batch_stats"])
        return error(y, x), changed

    return lambda key: net.init({"params": key, "dropout": key}, BATCH), loss, BATCH


def equinox(scan):
    return *KINDS["equinox"](scan), BATCH


def gpt(scan, remat=False):
    sizes = dict(vocab_size=32, dim=16, layers=2, heads=2, max_length=8, dropout=0.1, remat=remat)
    return lambda key: GPT(**sizes, scan=scan, rngs=nnx.Rngs(key)), next_token_loss, TOKENS


MODELS = {"nnx": nnx_model, "linen": linen, "equinox": equinox, "gpt": gpt}


@functools.cache
def model(kind, scan):
    return MODELS[kind](scan)


def products(build, scan, remat, stage=0):
    """The number of matrix products in a training step, with a scan's counted once."""
    make, loss, batch = build(scan)
    zero = Zero(stage=stage, remat=remat, min_shard_size=LIMIT)
    state, step = zero.abstract_state(make, optax.sgd(0.1)), zero.train_step(loss)
    traced = step.jitted(state.layout).trace(state, step.place(state.layout, batch))
    return count(traced.jaxpr.jaxpr)


def count(jaxpr):
    inner = [x for eqn in jaxpr.eqns for x in jax.tree.leaves(list(eqn.params.values()))]
    programs = [x for x in (getattr(x, "jaxpr", x) for x in inner) if isinstance(x, core.Jaxpr)]
    return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns) + sum(map(count, programs))


# Of a layer's two products, the second one's result is needed by nobody's backward pass.
AGAIN = {
    "none": 0,
    "full": DEPTH,
    "dots": 0,
    "offload": 0,
    Remat("full", names=["up"]): 0,
    Remat("offload", names=["up"]): 0,
    Remat(jax.checkpoint_policies.dots_saveable): 0,
    Remat(jax.checkpoint_policies.nothing_saveable, every=2): DEPTH // 2,
    Remat(every=3): 2,
    Remat(blocks="*ayer*[12]"): 2,
    Remat(blocks=["*Layer"], every=2): DEPTH // 2,
}


@pytest.mark.parametrize("remat", AGAIN, ids=lambda remat: str(remat).partition(" at 0x")[0])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_products_that_are_computed_again(kind, remat):
    again = products(MODELS[kind], False, remat) - products(MODELS[kind], False, None)
    assert again == AGAIN[remat]


@pytest.mark.parametrize("kind", MODELS)
def test_the_body_of_a_scan_is_a_block(kind):
    plain, full, dots = (products(MODELS[kind], True, remat, stage=3) for remat in (None, "full", "dots"))
    again = full - plain, dots - plain
    # The GPT's block has attention between its projections: scores and their mixture, in four blocks of queries.
    assert again[0] >= (3 if kind == "gpt" else 1)
    assert again[1] < again[0] if kind == "gpt" else again[1] == 0


@functools.cache
def start(kind, scan, stage):
    make, _, _ = model(kind, scan)
    return Zero(stage=stage, min_shard_size=LIMIT).init(make, optax.sgd(0.5))


@functools.cache
def trained(kind, scan, stage, remat, micro_batches=1):
    _, loss, batch = model(kind, scan)
    step = Zero(stage=stage, remat=remat, min_shard_size=LIMIT, micro_batches=micro_batches).train_step(loss)
    state, metrics = step(jax.tree.map(jnp.copy, start(kind, scan, stage)), batch)
    return jax.tree.map(np.asarray, (state.params, state.variables, metrics))


CASES = [
    *[(kind, scan, 3, remat) for kind in MODELS for scan in (False, True) for remat in ("full", "dots")],
    *[("nnx", False, 0, "full"), ("linen", True, 2, "full"), ("nnx", True, 1, "dots"), ("linen", False, 0, "offload")],
]


@pytest.mark.parametrize(("kind", "scan", "stage", "remat"), CASES)
def test_nothing_but_memory_changes(kind, scan, stage, remat):
    """Parameters after a step, so gradients, and statistics, losses and norms: to the rounding of other fusions, which
    the second forward pass is compiled into. Operation by operation they are the same bits: tests/adapters."""
    plain, found = trained(kind, scan, stage, "none"), trained(kind, scan, stage, remat)
    jax.tree.map(assert_rounded, plain, found)


def test_micro_batches():
    jax.tree.map(assert_rounded, *(trained("nnx", True, 3, remat, 2) for remat in ("none", "full")))


def assert_rounded(plain, found):
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-6 * max(1.0, np.abs(plain).max()))


# Memory, of the compiled step.

WIDE, DEEP = 128, 6
P = DEEP * 2 * WIDE * 4 * WIDE


class Layer(nnx.Module):
    def __init__(self, rngs):
        make = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.up, self.down = make(WIDE, 4 * WIDE), make(4 * WIDE, WIDE)

    def __call__(self, h):
        return h + self.down(jnp.tanh(self.up(h)))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: Layer(rngs))(rngs.split(DEEP))

    def __call__(self, h):
        return nnx.scan(lambda layer, h: layer(h), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, h)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        y = jnp.tanh(nn.Dense(4 * WIDE, use_bias=False)(h))
        return h + nn.Dense(WIDE, use_bias=False)(y), None


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, h):
        scan = nn.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEEP)
        return scan()(h, None)[0]


@functools.cache
def report(kind, remat, rows, stage=3):
    if kind == "nnx":
        make, run = lambda key: Stack(nnx.Rngs(key)), lambda model, x: model(x)
    else:
        make, run = lambda key: LinenStack().init(key, jnp.ones((1, WIDE))), LinenStack().apply
    zero = Zero(stage=stage, remat=remat)
    state = zero.abstract_state(make, optax.sgd(0.1))
    batch = jax.ShapeDtypeStruct((rows, WIDE), jnp.float32)
    return zero.report(state, zero.train_step(lambda model, x, rng: error(run(model, x), x)), batch)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("remat", [None, "full", "dots"])
def test_stage_3_has_one_layer_of_an_unedited_scan_at_a_time(kind, remat):
    """The stack of weights, gathered again for all layers at once, would be P by itself."""
    found = report(kind, remat, 8)
    assert found.n_parameters == P and found.temporaries < 0.5 * 4 * P
    assert not found.notes
    sent = {
        kind: sum(c.bytes_sent for c in found.collectives if c.kind == kind and not c.tiny)
        for kind in {c.kind for c in found.collectives if not c.tiny}
    }
    ring = 7 / 8 * 4 * P
    assert sent == {"all-gather": pytest.approx(2 * ring), "reduce-scatter": pytest.approx(ring)}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_less_is_kept_the_less_memory_is_needed(stage):
    """By at least half of what the names say: a layer's products, four and one times its input; and tanh's result."""
    rows = 2048
    none, dots, full = (report("nnx", remat, rows, stage).temporaries for remat in ("none", "dots", "full"))
    inputs = DEEP * rows // 8 * WIDE * 4
    assert none - dots > 0.5 * 4 * inputs and dots - full > 0.5 * 4 * inputs


# The whole loss.


def test_a_name_is_around_the_whole_loss_of_a_model_without_blocks():
    def loss(model, x, rng):
        return error(functools.reduce(lambda h, w: jnp.tanh(h @ w), model, x), x)

    make = lambda key: [jax.random.normal(key, (WIDTH, WIDTH)) for _ in range(3)]
    again = []
    for remat in (None, "full", jax.checkpoint_policies.nothing_saveable, "dots"):
        zero = Zero(stage=1, remat=remat)
        state, step = zero.abstract_state(make, optax.sgd(0.1)), zero.train_step(loss)
        again.append(count(step.jitted(state.layout).trace(state, step.place(state.layout, BATCH)).jaxpr.jaxpr))
    assert list(map(operator.sub, again, [again[0]] * 4)) == [0, 3, 3, 0]


def test_a_policy_of_jax_is_around_the_whole_loss():
    """What it is for: a scan's turns are then computed again together."""
    policy = jax.checkpoint_policies.nothing_saveable
    assert products(nnx_model, False, policy) > products(nnx_model, False, "full")


def test_around_a_model_that_rematerialises_itself_a_name_takes_precedence():
    """ "full" adds nothing, as a block inside of the model's own computes nothing once more."""
    of = lambda remat: products(functools.partial(gpt, remat=True), True, remat)
    assert of("dots") == products(gpt, True, "dots") < products(gpt, True, "full")
    assert of("full") == of(None) == of(Remat(blocks="PreNormBlock")) == products(gpt, True, "full")


# Wrong input.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Zero(remat="most"), "remat is 'most'; accepted: 'none', 'full', 'dots', 'offload', a zerojax.Remat"),
        (lambda: Zero(remat=3), "remat is 3"),
        (lambda: Zero(remat=Remat), "remat is .*; accepted: 'none', 'full'"),
        (lambda: Remat("none"), "Remat.policy is 'none'; accepted: 'full', 'dots', 'offload', or a policy"),
        (lambda: Remat(every=0), "Remat.every is 0; accepted: a positive integer"),
        (lambda: Remat(every=True), "Remat.every is True"),
        (lambda: Remat(every=1.5), "Remat.every is 1.5"),
        (lambda: Remat(blocks=[]), "Remat.blocks is empty"),
        (lambda: Remat(blocks=[3]), r"Remat.blocks is \[3\]"),
        (lambda: Remat(names=3), "Remat.names is 3"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "scan", "remat", "message"),
    [
        (
            "nnx",
            False,
            Remat(blocks="block*"),
            r"'block\*', which matches no module; accepted: .*'layers/0' \(NnxLayer\)",
        ),
        ("linen", False, Remat(blocks="block*"), r"no module; accepted: .*'LinenLayer_0' \(LinenLayer\)"),
        ("nnx", True, Remat(every=2), "Remat.every is 2.*'layers' are one stack"),
        ("linen", True, Remat(blocks="layers", every=2), "Remat.every is 2.*'layers' are one stack"),
    ],
)
def test_blocks_that_the_model_has_not(kind, scan, remat, message):
    with pytest.raises(UserError, match=message):
        products(MODELS[kind], scan, remat)


def test_blocks_that_the_loss_does_not_call():
    make, loss = (
        lambda key: NnxNet(False, nnx.Rngs(key)),
        lambda model, x, rng: error(model.layers[0].up(x)[:, :WIDTH], x),
    )
    with pytest.raises(UserError, match=r"'layers/3'.*layers/3, which the loss does not call"):
        products(lambda scan: (make, loss, BATCH), False, Remat(blocks="layers/3"))
    assert products(lambda scan: (make, loss, BATCH), False, "full") > 0


def test_a_device_without_the_host_s_memory():
    class Memory:
        kind = "device"

    class Device:
        platform = "gpu"
        addressable_memories = lambda self: [Memory()]

    class CompiledFor(Device):  # does not know
        addressable_memories = lambda self: []

    with pytest.raises(
        UserError, match="remat is 'offload', and gpu devices have the memories device without pinned_host"
    ):
        Remat("offload").check_devices([Device()])
    Remat("dots").check_devices([Device()])
    Remat("offload").check_devices([CompiledFor()])


def test_what_was_offloaded_is_of_the_host_s_memory():
    make, loss, batch = nnx_model(False)
    zero = Zero(stage=1, remat="offload", min_shard_size=LIMIT)
    state, step = zero.abstract_state(make, optax.sgd(0.1)), zero.train_step(loss)
    traced = str(step.jitted(state.layout).trace(state, step.place(state.layout, batch)).jaxpr)
    assert traced.count(f"f32<host>[{ROWS // 8},{HIDDEN}] = device_put") == DEPTH


def test_where_offload_saves_nothing_it_says_so_once(caplog):
    remat_module._warn_of_no_effect.cache_clear()
    for _ in range(2):
        Zero(remat="offload")
    (record,) = caplog.records
    assert record.getMessage().startswith("remat is 'offload', and devices of the backend 'cpu' compute in host memory")
