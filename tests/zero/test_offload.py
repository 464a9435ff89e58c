"""State in pinned host memory between steps: where it lies, and that nothing else changes."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.adapters.models import BATCHES as MODEL_BATCHES
from tests.adapters.models import KINDS
from zerojax import Zero, optim
from zerojax.models.gpt import GPT
from zerojax.weights import load_weights, save_weights
from zerojax.zero import offload as offload_module
from zerojax.zero.offload import offloaded_fields
from zerojax.zero.turns import in_turns

LAYERS, WIDTH, LIMIT = 3, 32, 64
BATCHES = [jax.random.normal(jax.random.key(i), (32, WIDTH)) for i in range(5)]
CHOICES = ["optimizer", "params", ("optimizer", "params")]


def make_model(key):
    normal = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) / 8
    layers = {"up": normal(0, LAYERS, WIDTH, 60), "bias": normal(1, LAYERS, 60), "down": normal(2, LAYERS, 60, WIDTH)}
    return {"layers": layers, "scale": jnp.ones(WIDTH), "out": normal(3, WIDTH, WIDTH)}


LARGE = {"up", "bias", "down", "out"}  # "scale" has fewer than LIMIT elements
LARGE_BYTES = 4 * (2 * LAYERS * WIDTH * 60 + LAYERS * 60 + WIDTH * WIDTH)
PADDING = 4 * LAYERS * 4  # 8 devices store the bias of 60 as 64


@jax.checkpoint
@zerojax.block
def layer(weights, h):
    return h + jnp.tanh(h @ weights["up"] + weights["bias"]) @ weights["down"]


def loss_fn(model, batch, rng):
    h, _ = jax.lax.scan(lambda h, weights: (layer(weights, h), None), batch, model["layers"])
    return jnp.mean(jnp.square(h * model["scale"] @ model["out"]))


def optimizer():
    return optax.adamw(optax.linear_schedule(1e-2, 0.0, 10))


def settings(**changes):
    return Zero(**(dict(micro_batches=2, clip_norm=0.05, min_shard_size=LIMIT) | changes))


def train(zero, state=None, batches=BATCHES, make=make_model, loss=loss_fn, tx=None):
    state = zero.init(make, tx or optimizer()) if state is None else state
    step, history = zero.train_step(loss), []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(jax.device_get(metrics))
    return state, history


@functools.cache
def on_the_device(stage, **changes):
    return jax.device_get(jax.tree.leaves(train(settings(stage=stage, **changes))))


def same(state, history, expected):
    """Bit for bit."""
    for a, b in zip(jax.device_get(jax.tree.leaves((state, history))), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("stage", "offload"), [(stage, CHOICES[2]) for stage in range(4)] + [(3, "optimizer"), (3, "params")], ids=str
)
def test_training_is_the_same_bit_for_bit(stage, offload):
    """Five steps of AdamW with a schedule, two micro-batches and clipping that acts."""
    same(*train(settings(stage=stage, offload=offload)), on_the_device(stage))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_so_it_is_in_16_bit(precision):
    same(*train(settings(stage=3, precision=precision, offload=CHOICES[2])), on_the_device(3, precision=precision))


def names(tree):
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in pairs}


def memory_kinds(state):
    """The leaves with shards in pinned host memory by name, and bytes by the kind of their shards' memory on each of
    the devices, which hold equally many."""
    hosted, held = set(), {}
    for field in ("params", "frozen", "opt_state", "variables", "step", "rng", "loss_scale"):
        for name, x in names(getattr(state, field)).items():
            kinds = {shard.data.sharding.memory_kind for shard in x.addressable_shards}
            assert kinds == {x.sharding.memory_kind}
            hosted |= {f"{field}/{name}"} if kinds == {"pinned_host"} else set()
            for shard in x.addressable_shards:
                kind = shard.data.sharding.memory_kind, shard.device
                held[kind] = held.get(kind, 0) + shard.data.nbytes
    each = {}
    for (kind, _), n in held.items():
        assert each.setdefault(kind, n) == n
    return hosted, each


def is_large(name):
    return name.rpartition("/")[2] in LARGE


def other_bytes():
    """Of step, random key and loss scale, and of the counts of AdamW and of its schedule."""
    return 4 + 8 + 5 * 4 + 2 * 4


@pytest.mark.parametrize(("stage", "offload"), [(0, CHOICES[2]), (3, "optimizer"), (3, "params")], ids=str)
def test_where_the_state_lies_after_init_a_step_and_a_restore(stage, offload, tmp_path):
    zero = settings(stage=stage, offload=offload)
    born = zero.init(make_model, optimizer())
    zerojax.save(tmp_path / "saved", born)
    restored = zerojax.restore(tmp_path / "saved", zero, make_model, optimizer())
    stepped, _ = train(zero, zero.init(make_model, optimizer()), BATCHES[:2])
    shards = 8 if stage else 1
    large = LARGE_BYTES + (PADDING if stage else 0)
    fields = {"optimizer": ["opt_state"], "params": ["params"]}
    offloaded = [field for name in fields if name in offload for field in fields[name]]
    in_host = large / shards * sum({"opt_state": 2, "params": 1}[field] for field in offloaded)
    for state in (born, restored, stepped):
        hosted, held = memory_kinds(state)
        assert hosted == {
            f"{field}/{name}" for field in offloaded for name in names(getattr(state, field)) if is_large(name)
        }
        assert held["pinned_host"] == in_host
        assert held["device"] == 3 * (large / shards + 4 * WIDTH) + other_bytes() - in_host
    planned = zero.abstract_state(make_model, optimizer())
    for plan, leaf in zip(jax.tree.leaves(planned), jax.tree.leaves(born), strict=True):
        assert leaf.sharding == plan.sharding


@pytest.mark.parametrize(
    ("before", "after"), [((), CHOICES[2]), (CHOICES[2], ()), ("optimizer", "params")], ids=lambda choice: str(choice)
)
def test_a_checkpoint_knows_nothing_of_it(before, after, tmp_path):
    state, history = train(settings(stage=3, offload=before), batches=BATCHES[:2])
    zerojax.save(tmp_path / "saved", state)
    zero = settings(stage=3, offload=after)
    state, rest = train(zero, zerojax.restore(tmp_path / "saved", zero, make_model, optimizer()), batches=BATCHES[2:])
    same(state, history + rest, on_the_device(3))


def test_the_report_says_what_lies_where():
    find = lambda **changes: _report(settings(stage=3, **changes))
    plain, offloaded = find(), find(offload=CHOICES[2])
    shard = (LARGE_BYTES + PADDING) / 8
    assert plain.host == {} and plain.passing.bytes == 0
    assert offloaded.host["parameters"].bytes == shard and offloaded.host["optimizer"].bytes == 2 * shard
    for name, figure in offloaded.host.items():
        on_device = getattr(offloaded, name)
        assert on_device.bytes == getattr(plain, name).bytes - figure.bytes
        assert on_device.bytes == on_device.expected  # what is left is whole
    assert offloaded.host["parameters"].expected == LARGE_BYTES / 8
    assert offloaded.host["optimizer"].expected == 2 * LARGE_BYTES / 8
    assert offloaded.state.bytes == plain.state.bytes - 3 * shard
    assert offloaded.as_dict()["host"]["optimizer"]["bytes"] == 2 * shard
    assert offloaded.sent == plain.sent
    up = 4 * LAYERS * WIDTH * 60 / 8
    assert offloaded.passing.bytes == 2 * 3 * up  # those of the two matrices of the layers
    said = str(offloaded)
    assert "master parameters, in host memory" in said and "to the device in 3 turns" in said
    assert "counts host memory among" in said


def _report(zero):
    state = zero.abstract_state(make_model, optimizer())
    return zero.report(state, zero.train_step(loss_fn), jax.ShapeDtypeStruct((32, WIDTH), jnp.float32))


# Models of every kind, and what else a program does with a state.


@pytest.mark.parametrize(("kind", "scan"), [(kind, scan) for kind in KINDS for scan in (False, True)])
def test_models_of_every_kind(kind, scan):
    make, loss = KINDS[kind](scan)
    run = lambda **changes: train(
        Zero(stage=3, min_shard_size=LIMIT, **changes), batches=MODEL_BATCHES[:2], make=make, loss=loss
    )
    same(*run(offload="params"), jax.device_get(jax.tree.leaves(run())))


@pytest.mark.parametrize("stage", [2, 3])
def test_on_one_device_a_layer_is_fetched_where_it_is_used(stage):
    """Nothing is cut there, and what is large still waits in host memory."""
    mesh = zerojax.make_mesh(devices=jax.devices()[:1])
    run = lambda **changes: train(settings(stage=stage, mesh=mesh, **changes), batches=BATCHES[:2])
    state, history = run(offload=CHOICES[2])
    same(state, history, jax.device_get(jax.tree.leaves(run())))
    assert state.params["layers"]["up"].sharding.memory_kind == "pinned_host"


def test_parameters_that_are_not_trained_go_along():
    changes = dict(stage=3, trainable=lambda path, x: "up" in path)
    state, history = train(settings(offload="params", **changes), batches=BATCHES[:2])
    same(state, history, jax.device_get(jax.tree.leaves(train(settings(**changes), batches=BATCHES[:2]))))
    assert memory_kinds(state)[0] == {"params/layers/up"} | {
        f"frozen/{name}" for name in ("layers/bias", "layers/down", "out")
    }


def test_a_step_that_overflows_leaves_what_is_in_host_memory_as_it_was():
    zero = settings(stage=3, precision="fp16", offload=CHOICES[2])
    before = zero.init(make_model, optimizer())
    expected = jax.device_get((before.params, before.opt_state))
    state, (metrics,) = train(zero, before, [jnp.full((32, WIDTH), jnp.inf)])
    assert metrics["skipped"] == 1
    same(state.params, state.opt_state, jax.tree.leaves(expected))


def test_evaluating_gathering_and_verifying():
    plain, offloaded = settings(stage=3), settings(stage=3, offload=CHOICES[2])
    states = [zero.init(make_model, optimizer()) for zero in (plain, offloaded)]
    look = lambda zero, state: (zero.eval_step(loss_fn)(state, BATCHES[0]), zero.gather(state))
    a, b = (jax.tree.leaves(look(zero, state)) for zero, state in zip((plain, offloaded), states, strict=True))
    for x, y in zip(a, b, strict=True):
        assert x.sharding.memory_kind == y.sharding.memory_kind == "device"
        np.testing.assert_array_equal(x, y)
    assert settings(stage=3, offload="params", micro_batches=1).verify(make_model, optimizer(), loss_fn, BATCHES[0]).ok


def test_loading_weights_puts_them_where_they_belong(tmp_path):
    make = lambda key: GPT(vocab_size=32, dim=16, layers=2, heads=2, max_length=8, rngs=nnx.Rngs(key))
    zero = Zero(stage=3, min_shard_size=16, offload=CHOICES[2])
    state = zero.init(make, optax.adamw(1e-2), seed=1)
    save_weights(tmp_path, state, "gpt2")
    kinds = memory_kinds(state)
    expected = jax.device_get(state.params)
    loaded = load_weights(tmp_path, zero.init(make, optax.adamw(1e-2), seed=2), "gpt2")
    assert memory_kinds(loaded) == kinds
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded.params), expected)


# The turns.


def traced(optimizer, n=6):
    """A program that updates matrices of different sizes, all in host memory with the optimizer's state, in turns."""
    params = {f"{i}": jnp.full((8, 8 * (4 + i % 3)), 0.1 * i) for i in range(n)}
    state = optimizer.init(params)
    place = lambda tree, space: jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim > 1 else x, tree)
    fetch = functools.partial(place, space=jax.memory.Space.Device)
    send = functools.partial(place, space=jax.memory.Space.Host)

    def update(gradients, params, state):
        params, state = fetch((params, state))
        updates, state = optimizer.update(gradients, state, params)
        return send((optax.apply_updates(params, updates), state))

    told = []
    operands = params, *send((params, state))
    turned = functools.partial(in_turns, update, after=jnp.ones(()), tell=told.append)
    program, results = jax.make_jaxpr(turned)(*operands), jax.jit(turned)(*operands)
    jax.tree.map(np.testing.assert_array_equal, results, jax.jit(update)(*operands))
    return program.jaxpr, told[0]


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (lambda: optax.sgd(0.1), 0),
        (lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(0.1, 0.0, 5))), 2),
        (lambda: optax.lamb(0.1), 2),
        (lambda: optax.contrib.muon(0.1), 1),
        (lambda: optim.adamw(0.1), 2),
        (lambda: optim.lamb(0.1), 2),
        (lambda: optim.muon(0.1), 1),
    ],
)
def test_a_parameter_and_its_moments_come_in_one_turn(make, moments):
    _, turns = traced(make())
    assert [turn.bytes for turn in turns] == [4 * 8 * 8 * (4 + i % 3) * (1 + moments) for i in range(6)]
    assert all(len(turn.operands) == len(turn.results) == 1 + moments for turn in turns)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.MultiSteps(optax.sgd(0.1), 2),
        lambda: optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0)),
    ],
)
def test_an_optimizer_whose_results_need_all_leaves_takes_one_turn(make):
    assert len(traced(make())[1]) == 1


def test_a_turn_waits_for_the_results_of_the_turn_before_the_last():
    """Read off the program: behind each copy to the device lie the copies to the host of every second turn before."""
    jaxpr, turns = traced(optax.adamw(0.1))
    behind, fetches, sends = {}, [], []
    for eqn in jaxpr.eqns:
        before = set().union(*(behind.get(id(atom), set()) for atom in eqn.invars))
        if eqn.primitive.name == "device_put":
            to_host = eqn.outvars[0].aval.memory_space == jax.memory.Space.Host
            (sends if to_host else fetches).append(before)
            before = before | {len(sends)} if to_host else before
        behind |= {id(variable): before for variable in eqn.outvars}
    assert len(fetches) == len(sends) == 3 * len(turns)
    for i, before in enumerate(fetches):
        turn = i // 3
        assert before == {3 * earlier + j for earlier in range(turn % 2, turn - 1, 2) for j in (1, 2, 3)}


def test_the_program_for_a_gpu_copies_every_large_leaf_both_ways():
    """Lowered for CUDA without one: the CPU's host memory is its device memory, so its program has no copies."""
    zero = settings(stage=1, micro_batches=1, offload=CHOICES[2])
    state = zero.abstract_state(make_model, optax.adamw(1e-2))
    step = zero.train_step(loss_fn).jitted(state.layout)
    batch = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)
    text = step.trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()
    placements = re.findall(r'_xla_buffer_placement = "(\w+)"', text.partition("@main")[2])
    to_host = len(re.findall(r'mhlo.memory_kind = "pinned_host"', text)) // 2  # of arguments and results
    assert to_host == 3 * len(LARGE)
    assert placements.count("pinned_host") >= to_host
    # each comes for the update, and the parameters before that to be gathered
    assert placements.count("device") >= to_host + len(LARGE)


# Input.


@pytest.mark.parametrize("offload", ["gradients", ("optimizer", "opt"), None, True, 3, {"params"}])
def test_other_names_are_refused(offload):
    with pytest.raises(zerojax.UserError, match="^offload is .*; accepted: 'optimizer', 'params', or a tuple of them$"):
        Zero(offload=offload)


def test_a_setting_is_a_name_or_several():
    assert Zero(offload="params").offload == ("params",)
    assert Zero(offload=["params", "optimizer"]).offload == ("optimizer", "params")
    assert Zero().offload == ()


def test_devices_without_pinned_host_memory_are_refused_by_name():
    memory = types.SimpleNamespace(kind="device")
    device = types.SimpleNamespace(platform="metal", addressable_memories=lambda: [memory])
    mesh = types.SimpleNamespace(local_devices=[device])
    with pytest.raises(zerojax.UserError) as error:
        offloaded_fields(("params",), mesh)
    assert str(error.value) == (
        "offload is ('params',), and devices of the backend 'metal' have memory of the kinds 'device'; "
        "accepted: () there, or a backend with 'pinned_host'"
    )
    assert offloaded_fields((), mesh) == ()


def test_where_it_saves_nothing_it_says_so_once_and_before_compiling(caplog):
    offload_module._warn_of_no_effect.cache_clear()
    mesh = Zero().mesh
    for _ in range(2):
        offloaded_fields(("params",), mesh)
    (record,) = caplog.records
    assert record.getMessage().startswith("offload is ('params',), and devices of the backend 'cpu' compute in host")
