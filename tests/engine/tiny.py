"""A network of two layers with dropout, micro-batches for it, and engines that train it."""

import jax
import jax.numpy as jnp
import numpy as np

import zerojax

DIM, HIDDEN = 6, 204  # a matrix that is cut, into parts that 8 does not divide, and leaves that stay whole
CLIP = 0.5  # below the norms of the first steps
WARMUP = {"warmup_min_lr": 0.004, "warmup_num_steps": 4, "warmup_type": "linear"}
RATES = [0.004, 0.004, 0.0055, 0.007, 0.0085, 0.01, 0.01]  # of the first steps


def make_model(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (DIM, HIDDEN)) / 2,
        "bias": jnp.zeros(HIDDEN),
        "down": jax.random.normal(down, (HIDDEN, 1)) / 5,
    }


def loss_fn(model, batch, rng, dropout=0.1):
    """The mean square, with a tenth of the inputs dropped: it tells which key it was given."""
    x = batch["x"]
    if dropout:
        x = jnp.where(jax.random.bernoulli(rng, 1 - dropout, x.shape), x / (1 - dropout), 0)
    x = x.astype(model["up"].dtype)
    y = jnp.tanh(x @ model["up"] + model["bias"]) @ model["down"]
    return jnp.mean(jnp.square(y[:, 0].astype(jnp.float32) - batch["y"]))


def config(stage=0, accumulation=1, **more):
    """A row for each device in a micro-batch, AdamW, a warm-up, clipping; `more` in the place of these."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        **more,
    }


def initialize(config, devices=8, **settings):
    """What `zerojax.initialize` returns, on so many devices."""
    given = {"model": make_model, "loss_fn": loss_fn, "mesh": zerojax.make_mesh(devices=jax.devices()[:devices])}
    return zerojax.initialize(config=config, **{**given, **settings})


def start(config, devices=8, **settings):
    return initialize(config, devices, **settings)[0]


def batches(count, rows=8, seed=0):
    """Micro-batches."""
    rng = np.random.default_rng(seed)
    xs = rng.normal(size=(count, rows, DIM)).astype(np.float32)
    return [{"x": x, "y": np.sin(x.sum(1))} for x in xs]


def examples(count, seed=1):
    """A dataset of single rows."""
    return [{name: x[0] for name, x in batch.items()} for batch in batches(count, rows=1, seed=seed)]


def loop(engine, data):
    """The losses that DeepSpeed's loop leaves."""
    losses = []
    for batch in data:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss)
    return losses


def train(engine, data):
    """The losses of `loop`, asked for at its end."""
    return [loss.item() for loss in loop(engine, data)]


def assert_same(got, want):
    """Every leaf of two trees equal bit for bit."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def compilations(engine):
    """Of the step, for states however they came."""
    jitted = engine.train_step.jitted
    return jitted(engine.state.layout)._cache_size() + jitted.cache_info().currsize - 1
