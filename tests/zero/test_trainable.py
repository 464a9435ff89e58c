"""Frozen parameters: no gradient, no optimizer state, no master copy; in shards and gathered like the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.adapters.models import BATCHES, HIDDEN, KINDS, WIDTH
from zerojax import UserError, Zero
from zerojax.checkpoint.manifest import leaf_names

LIMIT = 64
is_up = lambda path, x: "up" in path


def train(kind, stage, trainable, steps=3, **settings):
    make, loss = KINDS[kind](scan=False)
    zero = Zero(stage=stage, trainable=trainable, min_shard_size=LIMIT, **settings)
    state, step, losses = zero.init(make, optax.adamw(1e-2)), zero.train_step(loss), []
    for batch in BATCHES[:steps]:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return zero, state, step, losses


def leaves(tree):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_only_what_is_chosen_changes(kind, stage):
    zero, state, step, losses = train(kind, stage, is_up)
    before = leaves(KINDS[kind](scan=False)[0](jax.random.key(0)))
    after = leaves(zero.gather(state))
    assert before.keys() == after.keys()
    for name, x in after.items():
        assert np.array_equal(x, before[name]) is ("up" not in name), name
    # The same with an optimizer that changes nothing else, on one device.
    make, loss = KINDS[kind](scan=False)
    label = lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, x: "train" if "up" in jax.tree_util.keystr(path) else "freeze", tree
    )
    optimizer = optax.multi_transform({"train": optax.adamw(1e-2), "freeze": optax.set_to_zero()}, label)
    one = Zero(stage=0, mesh=zerojax.make_mesh(devices=jax.devices()[:1]))
    state, plain, want = one.init(make, optimizer), one.train_step(loss), []
    for batch in BATCHES[:3]:
        state, metrics = plain(state, batch)
        want.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, want, rtol=1e-5)


def test_frozen_leaves_lie_in_shards_without_optimizer_state_or_gradient():
    zero, state, step, _ = train("plain", 3, is_up)
    trained = 3 * (WIDTH * HIDDEN)
    assert sum(x.size for x in jax.tree.leaves(state.params)) == trained
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.size > 1) == 2 * trained
    frozen = jax.tree.leaves(state.frozen)
    assert sum(x.size for x in frozen) == 3 * (WIDTH * HIDDEN + HIDDEN)
    assert all(x.sharding.shard_shape(x.shape) != x.shape for x in frozen)
    reduced = [c for c in zero.report(state, step, BATCHES[0]).collectives if c.kind == "reduce-scatter"]
    assert sum(c.bytes_sent * c.count for c in reduced if not c.tiny) <= 7 / 8 * 4 * trained * 1.001


def test_frozen_leaves_keep_their_dtype_and_travel_in_the_narrower_one():
    make, loss = KINDS["plain"](scan=False)
    half = lambda key: jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(jnp.bfloat16) if "down" in jax.tree_util.keystr(path) else x, make(key)
    )
    zero = Zero(stage=3, trainable=is_up, min_shard_size=LIMIT)
    state = zero.abstract_state(half, optax.sgd(0.1))
    assert {x.dtype.name for x in jax.tree.leaves(state.frozen)} == {"bfloat16", "float32"}
    text = zero.train_step(loss).lower(state, BATCHES[0]).as_text()
    gathers = [line for line in text.splitlines() if '"stablehlo.all_gather"' in line]
    assert any("xbf16>" in line for line in gathers) and any("xf32>" in line for line in gathers)


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.lora = nnx.LoRA(WIDTH, 2, WIDTH, base_module=self.base, rngs=rngs)

    def __call__(self, x):
        return self.lora(x)


def test_an_nnx_filter_chooses():
    zero = Zero(stage=3, trainable=nnx.LoRAParam, min_shard_size=8)
    state = zero.init(lambda key: Adapted(nnx.Rngs(key)), optax.sgd(0.1))
    assert set(leaves(state.params)) == {"['lora']['lora_a']", "['lora']['lora_b']"}
    assert "lora" not in str(leaves(state.frozen))
    state, metrics = zero.train_step(lambda model, x, rng: jnp.mean(model(x) ** 2))(state, BATCHES[0])
    assert isinstance(zero.gather(state), Adapted)
    combined = Zero(stage=3, trainable=nnx.All(nnx.LoRAParam, nnx.PathContains("lora_a")))
    assert set(leaves(combined.abstract_state(lambda key: Adapted(nnx.Rngs(key)), optax.sgd(0.1)).params)) == {
        "['lora']['lora_a']"
    }


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 32, use_bias=False, rngs=rngs)
        self.table = self.embed.embedding  # one parameter under two names

    def __call__(self, tokens):
        return self.embed(tokens) @ self.table[...].T


def test_tied_weights_are_one_parameter(tmp_path):
    zero = Zero(stage=3, min_shard_size=8)
    make = lambda key: Tied(nnx.Rngs(key))
    state = zero.init(make, optax.sgd(0.1))
    assert "['table']" not in leaves(state.params)
    loss = lambda model, tokens, rng: jnp.mean(jnp.square(model(tokens)))
    state, _ = zero.train_step(loss)(state, np.arange(16))
    model = zero.gather(state)
    assert model.table is model.embed.embedding
    plain = make(jax.random.key(0))
    gradients = nnx.grad(lambda m: loss(m, jnp.arange(16), None))(plain)
    want = plain.embed.embedding[...] - 0.1 * gradients["embed"]["embedding"][...]
    np.testing.assert_allclose(model.table[...], want, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_without_the_frozen_parameters(tmp_path):
    zero, state, _, _ = train("nnx", 3, is_up)
    make = KINDS["nnx"](scan=False)[0]
    zerojax.save(tmp_path / "whole", state)
    zerojax.save(tmp_path / "adapter", state, frozen=False)
    frozen = lambda path: [name for name in leaf_names(tmp_path / path) if name.startswith("frozen")]
    assert frozen("whole") and not frozen("adapter")
    other = Zero(stage=1, trainable=is_up, min_shard_size=LIMIT)
    with pytest.raises(UserError, match="saved without its frozen parameters; accepted: restore"):
        zerojax.restore(tmp_path / "adapter", other, make, optax.adamw(1e-2))
    restored = zerojax.restore(tmp_path / "adapter", other, make, optax.adamw(1e-2), frozen=state.frozen)
    whole = zerojax.restore(tmp_path / "whole", other, make, optax.adamw(1e-2))
    for a, b, c in zip(*map(jax.tree.leaves, (restored, whole, state)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_what_chooses_nothing_or_is_no_choice_is_refused():
    make = KINDS["plain"](scan=False)[0]
    with pytest.raises(UserError, match="trainable is .*, which no parameter matches"):
        Zero(trainable=lambda path, x: False).init(make, optax.sgd(0.1))
    with pytest.raises(UserError, match="trainable is 'up'; accepted: a function of .*NNX filters are for NNX models"):
        Zero(trainable="up").init(make, optax.sgd(0.1))


def test_the_report_counts_frozen_parameters_apart():
    zero, state, step, _ = train("plain", 2, is_up)
    report = zero.report(state, step, BATCHES[0])
    whole = 4 * 3 * (WIDTH * HIDDEN + HIDDEN)
    assert report.frozen.bytes == report.frozen.expected == whole / 8
    assert report.gather.bytes == pytest.approx(report.gather.expected, rel=0.01)
    assert report.state.bytes == pytest.approx(report.state.expected, rel=0.02)
    assert "frozen parameters" in str(report) and "and F" in str(report)
