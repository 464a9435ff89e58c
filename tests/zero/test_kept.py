"""Parameters that stay in float32 beside a 16-bit compute dtype, and what models compute in then."""

import collections
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from zerojax import Precision, UserError, Zero
from zerojax.models import BERT, GPT, RNN, ResNet, ViT, next_token_loss
from zerojax.models.bert import classification_loss
from zerojax.models.classification import image_classification_loss

LIMIT = 8
WIDTH, VOCAB, LENGTH, ROWS = 32, 24, 6, 16
TOKENS = np.random.default_rng(0).integers(0, VOCAB, size=(ROWS, LENGTH)).astype(np.int32)


def lowered(make, loss, batch, precision="bf16", stage=3):
    zero = Zero(stage=stage, precision=precision, min_shard_size=LIMIT)
    state = zero.abstract_state(make, optax.sgd(0.1))
    return zero.train_step(loss).lower(state, batch).as_text().splitlines()


def products(lines):
    """The dtypes of the operands of matrix products and convolutions, counted."""
    found = [line.split(" : ")[-1] for line in lines if re.search(r"stablehlo\.(dot_general|convolution)", line)]
    types = [re.findall(r"tensor<(?:\d+x)*(\w+)>", line.split("->")[0]) for line in found]
    return collections.Counter(map(tuple, types))


# --- models as their authors write them


class NnxBlock(nnx.Module):
    def __init__(self, norm, rngs):
        self.attention_norm, self.mlp_norm = norm(WIDTH, rngs=rngs), norm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h):
        h = h + self.attention(self.attention_norm(h))
        return h + self.down(nnx.gelu(self.up(self.mlp_norm(h))))


class NnxNet(nnx.Module):
    def __init__(self, rngs, norm=nnx.LayerNorm, layers=2):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(norm, rngs) for _ in range(layers)])
        self.norm, self.head = norm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class LinenBlock(nn.Module):
    norm: type = nn.LayerNorm
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, h, _=None):
        same = {"dtype": self.dtype}
        h = h + nn.MultiHeadDotProductAttention(4, **same)(self.norm(**same, name="attention_norm")(h))
        up = nn.gelu(nn.Dense(2 * WIDTH, **same)(self.norm(**same)(h)))
        return h + nn.Dense(WIDTH, **same)(up), None


class LinenNet(nn.Module):
    norm: type = nn.LayerNorm
    dtype: jnp.dtype | None = None
    scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(VOCAB, WIDTH, dtype=self.dtype)(tokens)
        if self.scan:
            blocks = nn.scan(nn.remat(LinenBlock), {"params": 0}, split_rngs={"params": True}, length=2)
            h, _ = blocks(self.norm, self.dtype, name="blocks")(h, None)
        else:
            for i in range(2):
                h, _ = LinenBlock(self.norm, self.dtype, name=f"block{i}")(h)
        return nn.Dense(VOCAB, dtype=self.dtype)(self.norm(dtype=self.dtype)(h))


def mean_error(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens).mean()


def linen(**settings):
    net = LinenNet(**settings)
    return lambda key: net.init(key, TOKENS), lambda variables, tokens, rng: mean_error(
        net.apply(variables, tokens), tokens
    )


def composed():
    """Variables of another structure than `init` makes, and functions that JAX traces once."""
    net = LinenNet()
    init, apply = jax.jit(net.init), jax.jit(net.apply)
    make = lambda key: {"params": {"net": init(key, TOKENS)["params"], "bias": jnp.zeros(VOCAB)}}

    def loss(variables, tokens, rng):
        params = variables["params"]
        return mean_error(apply({"params": params["net"]}, tokens) + jnp.asarray(params["bias"]), tokens)

    return make, loss


def of_nnx(make):
    return lambda key: make(nnx.Rngs(key)), lambda model, tokens, rng: mean_error(model(tokens), tokens)


TRANSFORMERS = {
    "nnx": of_nnx(NnxNet),
    "nnx, RMSNorm": of_nnx(lambda rngs: NnxNet(rngs, norm=nnx.RMSNorm)),
    "linen": linen(),
    "linen, RMSNorm": linen(norm=nn.RMSNorm),
    "linen, scanned": linen(scan=True),
    "linen, composed": composed(),
}
transformers = pytest.mark.parametrize(("make", "loss"), TRANSFORMERS.values(), ids=TRANSFORMERS)


@transformers
@pytest.mark.parametrize("stage", [1, 3])
def test_every_product_of_an_unedited_transformer_is_in_16_bit(make, loss, stage):
    """But for the softmax's side of attention's backward pass: its scores are float32 by JAX's own choice."""
    found = products(lowered(make, loss, TOKENS, stage=stage))
    assert found["bf16", "bf16"] > 20 and not found["f32", "f32"]
    assert found.total() - found["bf16", "bf16"] <= 2 * 2


@transformers
def test_norms_are_seen_in_float32_and_the_rest_in_16_bit(make, loss):
    seen = {}

    def looking(model, tokens, rng):
        params = model["params"] if isinstance(model, dict) else nnx.to_pure_dict(nnx.state(model, nnx.Param))
        seen.clear()  # what the search for norms has seen
        seen.update({jax.tree_util.keystr(path): x.dtype.name for path, x in jax.tree.leaves_with_path(params)})
        return loss(model, tokens, rng)

    lowered(make, looking, TOKENS, stage=1)
    assert len(seen) > 20
    in_norm = lambda path: "norm" in path.lower()
    assert seen == {path: "float32" if in_norm(path) else "bfloat16" for path in seen}
    assert any(map(in_norm, seen))


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (nnx.Conv(n, WIDTH, (3, 3), rngs=rngs) for n in (4, WIDTH))
        self.batch_norm, self.group_norm = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.GroupNorm(WIDTH, 4, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, images):
        h = nnx.relu(self.batch_norm(self.first(images.astype(jnp.bfloat16))))
        return self.head(self.group_norm(self.second(h)).mean((1, 2)))


IMAGES = np.random.default_rng(1).normal(1, 2, size=(ROWS, 6, 6, 4)).astype(np.float32)
images_loss = lambda model, images, rng: jnp.mean(jnp.square(model(images).astype(jnp.float32)))


@pytest.mark.parametrize("stage", [1, 3])
def test_statistics_in_float32_make_no_product_so(stage):
    """BatchNorm's running statistics would make its output float32, and with it all that follows."""
    found = products(lowered(lambda key: CNN(nnx.Rngs(key)), images_loss, IMAGES, stage=stage))
    assert set(found) == {("bf16", "bf16")} and found.total() == 8


def test_statistics_and_integers_keep_their_dtype_and_digits():
    class Counting(CNN):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.calls, self.wide = nnx.Variable(jnp.zeros((), jnp.int32)), nnx.Variable(jnp.full(3, 1 / 3))
            self.table = nnx.Param(jnp.arange(5), trained=False)

        def __call__(self, images):
            self.calls[...] += 1
            assert self.wide[...].dtype == jnp.float32 and self.table[...].dtype == jnp.int32
            return super().__call__(images)

    zero = Zero(stage=3, precision="bf16", min_shard_size=LIMIT)
    state = zero.init(lambda key: Counting(nnx.Rngs(key)), optax.sgd(0.0))
    state, _ = zero.train_step(images_loss)(state, IMAGES)
    dtypes = {path[-1].key: x.dtype.name for path, x in jax.tree.leaves_with_path(state.variables)}
    assert dtypes == {"calls": "int32", "wide": "float32", "table": "int32", "mean": "float32", "var": "float32"}
    model = zero.gather(state)
    np.testing.assert_array_equal(model.wide[...], np.float32(1 / 3))
    inputs = np.asarray(jnp.asarray(IMAGES, jnp.bfloat16), np.float32)
    want = np.asarray(model.first(inputs)).mean((0, 1, 2))  # of the layer in float32
    np.testing.assert_allclose(model.batch_norm.mean[...], 0.01 * want, atol=2e-4)


def test_16_bit_is_flax_s_own_mixed_precision():
    """Linen computes with float32 parameters and a 16-bit `dtype` of every module as zerojax does with no `dtype`."""
    make, unedited = linen(scan=True)
    _, edited = linen(scan=True, dtype=jnp.bfloat16)

    def uneven(key):
        """Scales that bfloat16 does not hold."""
        irregular = lambda path, x: x + 1e-3 * (path[-1].key == "scale") * jnp.arange(x.shape[-1])
        return jax.tree_util.tree_map_with_path(irregular, make(key))

    losses = []
    rounded = Precision(compute="bf16", keep_norms=False)
    for loss, precision in ((edited, "fp32"), (unedited, "bf16"), (unedited, rounded)):
        zero = Zero(stage=1, precision=precision)
        losses.append(float(zero.eval_step(loss)(zero.init(uneven, optax.sgd(0.5)), TOKENS)["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-7)  # the same program on the same numbers
    assert abs(losses[2] - losses[0]) > 1e-5


def norm_alone(model, x, rng):
    """The relative error of a norm against the formula in float32, in units of bfloat16's 2**-8."""
    y = model(x)
    assert y.dtype == jnp.bfloat16
    x = x.astype(jnp.float32)
    normal = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    exact = normal * (1 + jnp.arange(WIDTH) / 1000) + 0.3
    error = jnp.abs(y.astype(jnp.float32) - exact) / jnp.maximum(jnp.abs(exact), 1e-2)
    return 0.0 * model.scale[...].astype(jnp.float32).sum() + jnp.max(error) * 2**8


@pytest.mark.parametrize("keep", [True, False])
def test_a_kept_norm_rounds_its_result_alone(keep):
    def make(key):
        norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(key))
        norm.scale[...], norm.bias[...] = 1 + jnp.arange(WIDTH) / 1000, jnp.full(WIDTH, 0.3)
        return norm

    zero = Zero(stage=1, precision=Precision(compute="bfloat16", keep_norms=keep), min_shard_size=LIMIT)
    state = zero.init(make, optax.sgd(0.1))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(ROWS, WIDTH)), jnp.bfloat16)
    _, metrics = zero.train_step(norm_alone)(state, x)
    assert float(metrics["loss"]) < 1.01 if keep else float(metrics["loss"]) > 2  # 1 is a rounding to nearest at worst


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_what_an_author_has_asked_for_stays(kind):
    x = jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    if kind == "nnx":
        make = lambda key: nnx.LayerNorm(WIDTH, dtype=jnp.float32, rngs=nnx.Rngs(key))
        apply = lambda model, x: model(x)
    else:
        norm = nn.LayerNorm(dtype=jnp.float32)
        make, apply = lambda key: norm.init(key, x), norm.apply

    def loss(model, x, rng):
        assert apply(model, x).dtype == jnp.float32
        return apply(model, x).mean()

    lowered(make, loss, x)


def test_equinox_s_norms_return_the_dtype_of_their_input():
    class Net(eqx.Module):
        norm: eqx.nn.LayerNorm
        linear: eqx.nn.Linear

        def __init__(self, key):
            self.norm, self.linear = eqx.nn.LayerNorm(WIDTH), eqx.nn.Linear(WIDTH, WIDTH, key=key)

        def __call__(self, x):
            assert (self.norm.weight.dtype, self.linear.weight.dtype) == (jnp.float32, jnp.bfloat16)
            return self.linear(self.norm(x))

    loss = lambda model, x, rng: jnp.mean(jnp.square(jax.vmap(model)(x)).astype(jnp.float32))
    for stage in (1, 3):
        found = products(lowered(Net, loss, jnp.ones((ROWS, WIDTH), jnp.bfloat16), stage=stage))
        assert set(found) == {("bf16", "bf16")}


# --- the reference models

TEXT = {
    "tokens": np.zeros((ROWS, LENGTH), np.int32),
    "mask": np.ones((ROWS, LENGTH), np.int32),
    "labels": np.zeros(ROWS, int),
}
PICTURES = {"images": np.zeros((ROWS, 8, 8, 3), np.float32), "labels": np.zeros(ROWS, np.int32)}
SIZES = dict(dim=WIDTH, layers=2, heads=2)
MODELS = {
    "gpt": (lambda r: GPT(vocab_size=VOCAB, max_length=LENGTH, **SIZES, rngs=r), next_token_loss, {"tokens": TOKENS}),
    "bert": (
        lambda r: BERT(vocab_size=VOCAB, max_length=LENGTH, classes=2, **SIZES, rngs=r),
        classification_loss,
        TEXT,
    ),
    "vit": (lambda r: ViT(classes=4, image_size=8, patch_size=4, **SIZES, rngs=r), image_classification_loss, PICTURES),
    "resnet": (lambda r: ResNet(classes=4, widths=(8, 16), depths=(1, 1), rngs=r), image_classification_loss, PICTURES),
    "rnn": (lambda r: RNN(vocab_size=VOCAB, dim=WIDTH, layers=1, rngs=r), next_token_loss, {"tokens": TOKENS}),
}


@pytest.mark.parametrize(("make", "loss", "batch"), MODELS.values(), ids=MODELS)
def test_every_product_of_a_reference_model_is_in_16_bit(make, loss, batch):
    found = products(lowered(lambda key: make(nnx.Rngs(key)), loss, batch))
    assert found["bf16", "bf16"] > 5 and not found["f32", "f32"]


def test_the_reference_models_norms_are_kept():
    zero = Zero(stage=3, precision="bf16")
    state = zero.abstract_state(lambda key: MODELS["gpt"][0](nnx.Rngs(key)), optax.sgd(0.1))
    kept = {leaf.path for leaf in state.layout.param_leaves if leaf.in_norm}
    norms = [f"blocks/{name}_norm" for name in ("attention", "mlp")] + ["final_norm"]
    assert kept == {f"{norm}/{part}" for norm in norms for part in ("scale", "bias")}


# --- parameters chosen by their paths


def make_tree(key):
    draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape)
    return {"layers": {"router": draw(0, 16, 8), "up": draw(1, 16, 32)}, "ids": jnp.arange(4)}


KEEPING = Precision(compute="bf16", keep="*router*")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_kept_is_gathered_seen_and_reduced_in_float32(stage):
    seen = {}

    def loss(model, x, rng):
        seen.update({name: x.dtype.name for name, x in model["layers"].items()}, ids=model["ids"].dtype.name)
        x = x.astype(jnp.bfloat16)
        gates = jax.nn.softmax(x @ model["layers"]["router"])
        assert gates.dtype == jnp.float32
        return jnp.mean((x @ model["layers"]["up"]).astype(jnp.float32) ** 2) + jnp.mean(gates**2)

    lines = lowered(make_tree, loss, jnp.ones((ROWS, 16)), KEEPING, stage)
    assert seen == {"router": "float32", "up": "bfloat16", "ids": "int32"}
    gathers = [line.split("->")[1] for line in lines if "stablehlo.all_gather" in line]
    wanted = {"16x8": "f32", "16x32": "bf16"}
    found = {shape: dtype for line in gathers for shape, dtype in re.findall(r"tensor<(\d+x\d+)x(\w+)>", line)}
    assert found == ({} if stage == 0 else wanted)
    kind = "stablehlo.all_reduce" if stage == 0 else "stablehlo.reduce_scatter"
    starts = [i for i, line in enumerate(lines) if kind in line]
    types = [next(line for line in lines[i:] if line.strip().startswith("})")).split("->")[1] for i in starts]
    assert sorted(re.findall(r"\d+x\d+x(\w+)>", " ".join(types))) == ["bf16", "f32"]


def test_frozen_parameters_may_be_kept_too():
    seen = {}

    def loss(model, x, rng):
        seen.update({name: leaf.dtype.name for name, leaf in model["layers"].items()})
        return jnp.mean(x @ model["layers"]["up"]) + jnp.mean(x @ model["layers"]["router"])

    zero = Zero(stage=3, precision=KEEPING, min_shard_size=LIMIT, trainable=lambda path, x: "up" in path)
    state = zero.abstract_state(make_tree, optax.sgd(0.1))
    zero.train_step(loss).lower(state, jnp.ones((ROWS, 16), jnp.bfloat16))
    assert seen == {"router": "float32", "up": "bfloat16"}


def test_training_with_kept_parameters_is_near_training_in_float32():
    loss = lambda model, x, rng: (
        jnp.mean(
            jnp.square(jax.nn.softmax(x.astype(model["layers"]["up"].dtype) @ model["layers"]["router"])[:, :1] - 0.5)
        )
        + 1e-3 * jnp.mean((x @ model["layers"]["up"]).astype(jnp.float32) ** 2)
    )
    finals = []
    for precision in ("fp32", KEEPING):
        zero = Zero(stage=3, precision=precision, micro_batches=2, min_shard_size=LIMIT)
        state = zero.init(make_tree, optax.sgd(0.5))
        step = zero.train_step(loss)
        for _ in range(5):
            state, metrics = step(state, np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32))
        finals.append(float(metrics["loss"]))
    assert finals[1] == pytest.approx(finals[0], rel=1e-2)


def test_a_pattern_that_matches_nothing_is_named():
    zero = Zero(precision=Precision(compute="bf16", keep=["*router*", "*routre*"]))
    with pytest.raises(
        UserError, match="Precision.keep '[*]routre[*]' matches no parameter; there are 'layers/router'"
    ):
        zero.init(make_tree, optax.sgd(0.1))


def test_the_report_s_formula_counts_what_is_kept():
    zero = Zero(stage=3, precision=KEEPING, min_shard_size=LIMIT)
    state = zero.abstract_state(make_tree, optax.sgd(0.1))
    loss = lambda model, x, rng: jnp.mean(x @ model["layers"]["up"]) + jnp.mean(x @ model["layers"]["router"])
    report = zero.report(state, zero.train_step(loss), jax.ShapeDtypeStruct((ROWS, 16), jnp.bfloat16))
    assert report.gather.expected == 2 * 7 / 8 * (4 * 16 * 8 + 2 * 16 * 32)
    assert report.reduce.expected == 7 / 8 * (4 * 16 * 8 + 2 * 16 * 32)
