"""What a step returns, what its randomness depends on, and what runs on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import zerojax
from tests.zero import reference
from zerojax import Precision, Weighted, Zero

ROWS, IN, OUT = 16, 16, 32
LIMIT = 16
BATCHES = [np.random.default_rng(i).normal(size=(ROWS, IN)).astype(np.float32) for i in range(6)]


def make_model(key):
    phases = jax.random.uniform(key, (2,)) * 1e3
    irregular = lambda i: jnp.sin(phases[i] + jnp.arange(IN * OUT) ** 1.3)  # compiles faster than random numbers
    return {"up": irregular(0).reshape(IN, OUT) / 3, "down": irregular(1).reshape(OUT, IN) / 4}


def loss_fn(model, batch, rng=None):
    return jnp.mean(jnp.square(jnp.tanh(batch @ model["up"]) @ model["down"] - batch))


@functools.cache
def compiles():
    """Seconds of every compilation from now on."""
    found = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: found.append(seconds) if event.endswith("backend_compile_duration") else None
    )
    return found


def train(zero, optimizer, loss_fn=loss_fn, batches=BATCHES, make_model=make_model, seed=0):
    state = zero.init(make_model, optimizer, seed)
    step, history = zero.train_step(loss_fn), []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(metrics)
    return zero, state, jax.device_get(history)


def plain(optimizer, loss_fn=loss_fn, batches=BATCHES, make_model=make_model):
    """The parameters and the gradients' norms of a plain optax loop on one device."""
    params, norms = jax.jit(make_model)(jax.random.key(0)), []
    opt_state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        update = optax.with_extra_args_support(optimizer).update
        updates, opt_state = update(gradients, opt_state, params, value=loss)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
        return optax.apply_updates(params, updates), opt_state, norm

    for batch in batches:
        params, opt_state, norm = step(params, opt_state, batch)
        norms.append(norm)
    return jax.device_get(params), np.array(norms)


def test_metrics_are_named_device_scalars():
    zero = Zero(stage=3, min_shard_size=LIMIT)
    state = zero.init(make_model, optax.sgd(0.1))
    step = zero.train_step(lambda m, b, rng: (loss_fn(m, b), {"rows": len(b), "large": jnp.max(b) > 0}))
    state, metrics = step(state, BATCHES[0])
    assert set(metrics) == {"loss", "grad_norm", "loss_scale", "skipped", "step", "rows", "large"}
    assert all(isinstance(m, jax.Array) and m.shape == () and m.sharding.is_fully_replicated for m in metrics.values())
    assert (int(metrics["step"]), float(metrics["loss_scale"]), int(metrics["skipped"])) == (1, 1.0, 0)
    assert int(state.step) == 1
    np.testing.assert_allclose(metrics["loss"], loss_fn(jax.jit(make_model)(jax.random.key(0)), BATCHES[0]), rtol=1e-5)
    assert float(metrics["rows"]) == ROWS / 8  # of a device, averaged over devices


@pytest.mark.parametrize("stage", [0, 3])
def test_the_norm_is_that_before_clipping_and_the_update_that_after(stage):
    _, norms = plain(optax.sgd(0.0))
    limit = float(norms[0]) / 3
    want, _ = plain(optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0)))
    zero, state, history = train(Zero(stage=stage, clip_norm=limit, min_shard_size=LIMIT), optax.sgd(1.0))
    np.testing.assert_allclose(history[0]["grad_norm"], norms[0], rtol=1e-5)
    reference.assert_close(zero.gather(state), want, rtol=1e-5)


def test_a_norm_within_the_limit_changes_nothing():
    want, norms = plain(optax.sgd(0.1))
    zero, state, history = train(Zero(clip_norm=2 * float(norms.max()), min_shard_size=LIMIT), optax.sgd(0.1))
    np.testing.assert_allclose([m["grad_norm"] for m in history], norms, rtol=1e-5)
    reference.assert_close(zero.gather(state), want, rtol=1e-5)


def weighing(model, batch, rng):
    """Rows whose first number is their weight."""
    losses = jnp.mean(jnp.square(jnp.tanh(batch @ model["up"]) @ model["down"] - batch), axis=1)
    weights = batch[:, 0]
    both = Weighted(jnp.sum(losses * weights), jnp.sum(weights))
    return both, {"plain": jnp.mean(losses), "weighted": both}


def test_weights_are_of_examples_and_means_of_parts():
    batch = BATCHES[0].copy()
    batch[:, 0] = np.arange(ROWS) % 5 * np.arange(ROWS)
    model = jax.device_get(jax.jit(make_model)(jax.random.key(0)))
    out = np.tanh(batch.astype(np.float64) @ model["up"]) @ model["down"] - batch
    losses, weights = np.mean(out**2, axis=1), batch[:, 0]
    zero = Zero(stage=3, micro_batches=2, min_shard_size=LIMIT)
    _, state, (metrics,) = train(zero, optax.sgd(0.0), weighing, [batch])
    np.testing.assert_allclose(metrics["loss"], np.sum(losses * weights) / np.sum(weights), rtol=1e-5)
    np.testing.assert_allclose(metrics["weighted"], metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["plain"], np.mean(losses), rtol=1e-5)
    evaluated = zero.eval_step(weighing)(state, batch)
    assert set(evaluated) == {"loss", "weight", "plain", "weighted"}
    np.testing.assert_allclose(evaluated["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(evaluated["weight"], np.sum(weights), rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_batch_of_no_weight_changes_nothing(stage):
    batch = BATCHES[0].copy()
    batch[:, 0] = 0
    zero = Zero(stage=stage, micro_batches=2, clip_norm=1.0, min_shard_size=LIMIT)
    before = jax.device_get(jax.jit(make_model)(jax.random.key(0)))
    _, state, (metrics,) = train(zero, optax.sgd(1.0), weighing, [batch])
    assert (metrics["loss"], metrics["grad_norm"]) == (0, 0)
    assert all(np.isfinite(value) for value in metrics.values())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(zero.gather(state)), before)


def test_the_state_given_is_donated():
    zero = Zero(stage=3, min_shard_size=LIMIT)
    state = zero.init(make_model, optax.adam(0.1))
    zero.train_step(loss_fn)(state, BATCHES[0])
    large = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert large and all(leaf.is_deleted() for leaf in large)


def test_one_compilation_for_a_run_and_nothing_on_the_host():
    """Also after a state has been put back from the host, as a checkpoint is."""
    zero = Zero(stage=3, min_shard_size=LIMIT, clip_norm=1.0)
    state = zero.init(make_model, optax.adamw(optax.cosine_decay_schedule(1e-2, 10)))
    step = zero.train_step(loss_fn)
    batches = [step.place(state.layout, batch) for batch in BATCHES]
    found = compiles()
    state, _ = step(state, batches[0])
    n = len(found)
    with jax.transfer_guard("disallow"):
        for batch in batches:
            state, metrics = step(state, batch)
    state = jax.tree.map(jax.device_put, jax.device_get(state), state.layout.shardings)
    state, metrics = step(state, batches[0])
    assert len(found) == n
    assert step.jitted(state.layout)._cache_size() == 1
    assert int(metrics["step"]) == len(BATCHES) + 2


def only_of_row(batch, value, rows):
    """Metrics that show `value` as each device and micro-batch has it, under the number its one row begins with."""
    here = lambda row: batch[0, 0] == row
    return {str(row): Weighted(jnp.where(here(row), value, 0.0), here(row)) for row in range(rows)}


@pytest.mark.parametrize(("stage", "micro_batches"), [(0, 2), (3, 1), (3, 2)])
def test_randomness_depends_on_seed_step_micro_batch_and_shard(stage, micro_batches):
    """As documented: the key of a seed, folded with a salt, the step, the micro-batch and the shard's number."""
    n = 8 * micro_batches
    batch = np.arange(n, dtype=np.float32)[:, None] * np.ones((1, IN), np.float32)

    def draws(model, batch, rng):
        return loss_fn(model, 0 * batch), only_of_row(batch, jax.random.uniform(rng), n)

    zero = Zero(stage=stage, micro_batches=micro_batches, min_shard_size=LIMIT)
    _, _, history = train(zero, optax.sgd(0.0), draws, [batch] * 3, seed=5)
    for step, metrics in enumerate(history):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 0x7A65726F), step)
        for row in range(n):
            shard, part = divmod(row, micro_batches)
            want = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, part), shard))
            np.testing.assert_allclose(metrics[str(row)], want, rtol=1e-6)
    drawn = [float(metrics[str(row)]) for metrics in history for row in range(n)]
    assert len(set(drawn)) == len(drawn)
    if micro_batches == 1:
        again = train(zero, optax.sgd(0.0), draws, [batch], seed=5)[2][0]
        other = train(zero, optax.sgd(0.0), draws, [batch], seed=6)[2][0]
        assert again == history[0] and other["0"] != again["0"]


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((IN, IN)))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.ones_like(x)) * (1 + 0 * jnp.sum(self.w))


def test_dropout_differs_between_devices_and_steps_and_rests_in_evaluation():
    batch = np.repeat(np.arange(8, dtype=np.float32)[:, None], IN, axis=1)

    def masks(model, batch, rng):
        code = jnp.sum((model(batch)[0] > 0) * 2.0 ** jnp.arange(IN))
        return jnp.sum(model(batch)) * 0, only_of_row(batch, code, 8)

    make = lambda key: Dropped(nnx.Rngs(key))
    zero, state, history = train(Zero(stage=3), optax.sgd(0.0), masks, [batch] * 3, make)
    codes = [float(metrics[str(row)]) for metrics in history for row in range(8)]
    assert len(set(codes)) == len(codes)  # 24 of 65,536: a clash has a chance of 0.4% with other seeds
    evaluated = zero.eval_step(masks)(state, batch)
    assert {float(evaluated[str(row)]) for row in range(8)} == {2.0**IN - 1}


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(IN, IN, rngs=rngs)
        self.norm = nnx.BatchNorm(IN, momentum=0.9, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.norm(x) + 0 * self.linear(x)


@pytest.mark.parametrize("statistics", ["global", "per_device"])
@pytest.mark.parametrize(("stage", "micro_batches"), [(0, 1), (3, 2)])
def test_statistics_of_a_module_are_carried(stage, micro_batches, statistics):
    """Of the global micro-batch, or the mean over devices of each one's own; evaluation uses them and leaves them."""
    loss = lambda model, batch, rng: jnp.mean(jnp.square(model(batch) - 1))
    zero = Zero(stage=stage, micro_batches=micro_batches, batch_statistics=statistics)
    rows = np.random.default_rng(0).normal(2, 3, size=(2, 64, IN)).astype(np.float32)
    zero, state, _ = train(zero, optax.sgd(0.0), loss, rows, lambda key: Normed(nnx.Rngs(key)))
    devices = 8 if statistics == "per_device" else 1
    mean, var = np.zeros((devices, IN)), np.ones((devices, IN))
    for batch in rows.astype(np.float64):
        for i in range(micro_batches):  # every M-th row, whatever the number of devices
            part = batch[i::micro_batches].reshape(devices, -1, IN)
            mean = 0.9 * mean + 0.1 * part.mean(1)
            var = 0.9 * var + 0.1 * part.var(1)
        mean, var = (np.broadcast_to(x.mean(0), (devices, IN)) for x in (mean, var))
    model = zero.gather(state)
    np.testing.assert_allclose(model.norm.mean[...], mean[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.norm.var[...], var[0], rtol=1e-4)
    assert int(model.calls[...]) == 2 * micro_batches and model.calls.dtype == jnp.int32
    before = jax.device_get(state.variables)
    evaluated = zero.eval_step(loss)(state, rows[0])
    want = np.mean(np.square((rows[0] - mean[0]) / np.sqrt(var[0] + 1e-5) - 1))
    np.testing.assert_allclose(evaluated["loss"], want, rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.variables), before)


def test_schedules_go_by_step():
    rates = [0.5, 0.25, 0.0, 0.0, 0.1, 0.0]
    schedule = lambda count: jnp.array(rates)[count]
    want, _ = plain(optax.sgd(schedule))
    zero, state, _ = train(Zero(stage=3, micro_batches=2, min_shard_size=LIMIT), optax.sgd(schedule))
    reference.assert_close(zero.gather(state), want, rtol=1e-5)


def wrapped_lookahead():
    """Lookahead takes gradients of its fast parameters alone."""
    lookahead = optax.lookahead(optax.sgd(0.1), 3, 0.5)
    return optax.GradientTransformation(lookahead.init, lambda updates, *rest: lookahead.update(updates.fast, *rest))


# Names, and what makes the transformation: of those that keep a state of an unusual kind.
OPTIMIZERS = {
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 3),
    "noise_and_ema_if_finite": lambda: optax.apply_if_finite(
        optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2), optax.ema(0.9)), 3
    ),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, rtol=0.5)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_transformation(name):
    want, _ = plain(OPTIMIZERS[name]())
    zero, state, _ = train(Zero(stage=3, min_shard_size=LIMIT), OPTIMIZERS[name]())
    reference.assert_close(zero.gather(state), want, rtol=1e-5)


def test_lookahead_over_its_pair_of_parameters():
    pair = lambda key: optax.LookaheadParams.init_synced(make_model(key))
    loss = lambda pair, batch, rng=None: loss_fn(pair.fast, batch)
    want, _ = plain(wrapped_lookahead(), loss, make_model=pair)
    zero, state, _ = train(Zero(stage=3, min_shard_size=LIMIT), wrapped_lookahead(), loss, make_model=pair)
    got = zero.gather(state)
    assert isinstance(got, optax.LookaheadParams)
    reference.assert_close(got, want, rtol=1e-5)


@pytest.mark.parametrize("constrained", [False, True])
def test_an_axis_of_model_parallelism_beside_the_data_axes(constrained):
    def loss(model, batch, rng=None):
        h = jnp.tanh(batch @ model["up"])
        if constrained and rng is not None:
            h = jax.lax.with_sharding_constraint(h, PartitionSpec(None, "model"))
        return jnp.mean(jnp.square(h @ model["down"] - batch))

    want, _ = plain(optax.adamw(1e-2), loss)
    mesh = zerojax.make_mesh(replica=2 if constrained else 1, model=2)
    zero, state, _ = train(Zero(stage=3, mesh=mesh, min_shard_size=LIMIT, micro_batches=2), optax.adamw(1e-2), loss)
    reference.assert_close(zero.gather(state), want, rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_keeps_fp32_masters_and_gathers_in_bf16(stage):
    seen = set()

    def loss(model, batch, rng):
        seen.update(leaf.dtype.name for leaf in jax.tree.leaves(model))
        return loss_fn(model, batch)

    want, _ = plain(optax.sgd(0.5))
    zero, state, history = train(Zero(stage=stage, precision="bf16", min_shard_size=LIMIT), optax.sgd(0.5), loss)
    assert seen == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(zero.gather(state))} == {"float32"}
    reference.assert_close(zero.gather(state), want, rtol=0.02)
    lines = zero.train_step(loss).lower(state, BATCHES[0]).as_text().splitlines()
    gathers = [line for line in lines if '"stablehlo.all_gather"' in line]
    assert len(gathers) >= 2 and all("xbf16>" in line for line in gathers)


@pytest.mark.parametrize(("reduce", "found"), [(None, "bf16"), ("float32", "f32")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_reduced_in_the_dtype_asked_for(stage, reduce, found):
    zero = Zero(stage=stage, precision=Precision(compute="bf16", reduce=reduce), min_shard_size=LIMIT)
    state = zero.abstract_state(make_model, optax.sgd(0.1))
    lines = zero.train_step(loss_fn).lower(state, BATCHES[0]).as_text().splitlines()
    kind = "stablehlo.all_reduce" if stage == 0 else "stablehlo.reduce_scatter"
    closings = [i for i, line in enumerate(lines) if kind in line]
    types = [next(line for line in lines[i:] if line.strip().startswith("})")) for i in closings]
    large = [line for line in types if "x" in line.split("->")[1] and "tensor<1x" not in line]
    assert len(large) == 2 and all(f"x{found}>" in line.split("->")[1] for line in large)


def test_arrays_that_are_not_floating_stay_as_they_are():
    others = {"ids": jnp.arange(2000), "flags": jnp.array([True, False]), "name": "net"}
    make = lambda key: {**make_model(key), **others, "key": key}

    def loss(model, batch, rng):
        assert model["name"] == "net" and model["ids"].dtype == jnp.int32 and model["flags"].dtype == bool
        return loss_fn(model, batch) * model["ids"][1] + 0 * jax.random.uniform(model["key"])

    zero = Zero(stage=3, precision="bf16", min_shard_size=LIMIT)
    _, state, _ = train(zero, optax.adam(0.1), loss, make_model=make)
    model = zero.gather(state)
    np.testing.assert_array_equal(model["ids"], np.arange(2000))
    assert model["name"] == "net" and model["flags"].tolist() == [True, False]
    assert jax.random.key_data(model["key"]).tolist() == [0, 0]


def test_batches_of_bytes_and_of_several_kinds():
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, IN)).astype(np.uint8)
    loss = lambda model, batch, rng: loss_fn(model, batch["x"][0] / 255) + 0 * jnp.sum(batch["label"])
    batch = {"x": (pixels,), "label": jnp.zeros(ROWS, jnp.int32)}
    _, _, (metrics,) = train(Zero(stage=3, min_shard_size=LIMIT), optax.sgd(0.1), loss, [batch])
    want = loss_fn(jax.device_get(jax.jit(make_model)(jax.random.key(0))), pixels / np.float32(255))
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


def test_the_gathered_model_is_of_the_kind_and_dtypes_it_was_made_in():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.half = nnx.Linear(IN, IN, param_dtype=jnp.bfloat16, rngs=rngs)
            self.out = nnx.Linear(IN, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(self.half(x))

    make = lambda key: Mixed(nnx.Rngs(key))
    loss = lambda model, batch, rng: jnp.mean(jnp.square(model(batch)))
    zero, state, _ = train(Zero(stage=3, min_shard_size=LIMIT), optax.sgd(0.0), loss, BATCHES[:1], make)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    model, expected = zero.gather(state), make(jax.random.key(0))
    assert type(model) is Mixed and type(model.half.kernel) is nnx.Param
    assert model.half.kernel.dtype == jnp.bfloat16 and model.out.kernel.dtype == jnp.float32
    np.testing.assert_allclose(model(BATCHES[0]), expected(BATCHES[0]), rtol=1e-2, atol=1e-2)


def test_remat_of_the_whole_loss_changes_no_value():
    want, _ = plain(optax.sgd(0.5))
    remat = jax.checkpoint_policies.nothing_saveable
    zero, state, _ = train(Zero(stage=3, remat=remat, min_shard_size=LIMIT), optax.sgd(0.5))
    reference.assert_close(zero.gather(state), want, rtol=1e-5)
