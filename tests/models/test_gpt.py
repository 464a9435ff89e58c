"""The reference model: shapes, causality, the published sizes, and gathering parameters under shard_map."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from zerojax.errors import UserError
from zerojax.models import GPT, next_token_loss

TINY = dict(vocab_size=64, dim=32, layers=2, heads=4, max_length=16)
LLAMA = dict(kv_heads=2, mlp_dim=48, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
SHAPES = {"gpt2": TINY, "llama": TINY | LLAMA}
both_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def make(seed=0, **arguments):
    return GPT(**arguments, rngs=nnx.Rngs(seed))


def tokens(batch=2, length=16, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 64)


def count(**arguments):
    abstract = nnx.eval_shape(lambda: make(**arguments))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(abstract, nnx.Param)))


def is_variable(x):
    return isinstance(x, nnx.Variable)


def mean_loss(graph, params, batch, rng=None):
    loss = next_token_loss(nnx.merge(graph, params), {"tokens": batch}, rng)
    return loss.total / loss.weight


@both_shapes
def test_logits_have_the_shape_and_dtype_of_the_parameters(shape):
    graph, params = nnx.split(make(**shape))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = nnx.merge(graph, optax.tree.cast(params, dtype))(tokens(2, 5))
        assert (logits.shape, logits.dtype) == ((2, 5, 64), dtype)


@both_shapes
def test_a_later_token_leaves_earlier_logits_bit_equal(shape):
    model, before = jax.jit(make(**shape).__call__), tokens()
    after = before.at[:, 10].add(1) % 64
    a, b = model(before), model(after)
    np.testing.assert_array_equal(a[:, :10], b[:, :10])
    assert (a[:, 10:] != b[:, 10:]).any(-1).all()


@both_shapes
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_equals_unscanned(shape, remat):
    batch = tokens(2, 17)
    stacked, listed = (nnx.split(make(**shape, scan=scan, remat=remat)) for scan in (True, False))
    grad = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)
    (loss, gradient), (listed_loss, listed_gradient) = (grad(*model, batch) for model in (stacked, listed))
    np.testing.assert_allclose(loss, listed_loss, rtol=1e-6)
    rows = [nnx.to_pure_dict(listed_gradient["blocks"])[i] for i in range(2)]
    want = nnx.to_pure_dict(listed_gradient) | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *rows)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), nnx.to_pure_dict(gradient), want)


def test_the_published_sizes():
    gpt2 = dict(vocab_size=50257, dim=768, layers=12, heads=12, max_length=1024)
    llama_3_8b = LLAMA | dict(
        vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, mlp_dim=14336, max_length=8192
    )
    assert count(**gpt2) == 124_439_808  # Hugging Face's openai-community/gpt2
    assert count(**gpt2, scan=False) == 124_439_808
    assert count(**llama_3_8b) == 8_030_261_248  # meta-llama/Meta-Llama-3-8B


@both_shapes
def test_the_first_loss_is_that_of_a_uniform_guess(shape):
    graph, params = nnx.split(make(**shape))
    assert float(mean_loss(graph, params, tokens(16, 17))) == pytest.approx(math.log(64), abs=0.05)


def test_initial_spread():
    model = make(vocab_size=512, dim=128, layers=8, heads=4, max_length=16)

    def spread(param):
        return float(param[...].std())

    assert spread(model.embedding) == pytest.approx(0.02, rel=0.02)
    assert spread(model.blocks.mlp.up.kernel) == pytest.approx(0.02, rel=0.02)
    assert spread(model.blocks.mlp.down.kernel) == pytest.approx(0.02 / 4, rel=0.02)
    assert spread(model.blocks.attention.out.kernel) == pytest.approx(0.02 / 4, rel=0.02)
    assert (model.blocks.mlp.up.kernel[0] != model.blocks.mlp.up.kernel[1]).all()


@pytest.mark.parametrize("scan", [True, False])
def test_dropout_follows_its_key(scan):
    model = make(**TINY, dropout=0.5, scan=scan)
    a, b = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(model(tokens(), a), model(tokens(), a))
    assert (model(tokens(), a) != model(tokens(), b)).any()
    np.testing.assert_array_equal(model(tokens()), make(**TINY, scan=scan)(tokens()))


def test_weights_choose_the_tokens():
    model, batch = make(**TINY), tokens(2, 17)
    weights = jnp.zeros((2, 16)).at[:, 3].set(2.0)
    loss = next_token_loss(model, {"tokens": batch.astype(jnp.uint8), "weights": weights})
    log_probabilities = np.asarray(jax.nn.log_softmax(model(batch[:, :-1])))
    want = -2 * sum(log_probabilities[i, 3, batch[i, 4]] for i in range(2))
    np.testing.assert_allclose(loss.total, want, rtol=1e-5)
    assert float(loss.weight) == 4.0


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(heads=5), "heads=5: must be a positive divisor of dim=32"),
        (dict(kv_heads=3), "kv_heads=3: must be a positive divisor of heads=4"),
        (dict(norm="batchnorm"), "norm='batchnorm': must be one of 'layernorm', 'rmsnorm'"),
        (dict(dim=36, heads=12, positions="rope"), "dim=36 over heads=12: rope turns pairs, so a head's width"),
        (dict(dropout=1.0), r"dropout=1.0: must lie in \[0, 1\)"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(UserError, match=message):
        make(**TINY | wrong)


def test_a_sequence_that_is_too_long_is_named():
    with pytest.raises(UserError, match="a sequence of 17 tokens: the model's max_length is 16"):
        make(**TINY)(tokens(1, 17))


# --- parameters that gather their shards when they are read


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(shard, dim):
    return jax.lax.all_gather(shard, "data", axis=dim % shard.ndim, tiled=True)


gather.defvjp(
    lambda shard, dim: (gather(shard, dim), None),
    lambda dim, _, ct: (jax.lax.psum_scatter(ct, "data", scatter_dimension=dim % ct.ndim, tiled=True),),
)


class GatheringParam(nnx.Param):
    """Counts its reads, by the path it was given."""

    reads: list[str] = []

    def get_value(self, **kwargs):
        GatheringParam.reads.append(self.get_metadata()["path"])
        return gather(super().get_value(**kwargs), -1)


@pytest.mark.parametrize(
    "shape, scan, remat",
    [("gpt2", True, True), ("gpt2", False, False), ("llama", True, False), ("llama", False, True)],
)
def test_gathering_parameters_change_nothing(shape, scan, remat):
    """Every leaf's last dim is cut over eight devices and gathered where the model reads it."""
    graph, params = nnx.split(make(**SHAPES[shape], scan=scan, remat=remat))
    leaves, tree = jax.tree.flatten(params)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable)]
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    specs = [PartitionSpec(*[None] * (x.ndim - 1), "data") for x in leaves]
    batch = tokens(16, 17)

    def local(shards, batch):
        def loss(shards):
            box = iter(zip(shards, paths, strict=True))
            gathering = jax.tree.map(
                lambda _: (lambda x, path: GatheringParam(x, path=path))(*next(box)), params, is_leaf=is_variable
            )
            return mean_loss(graph, gathering, batch)

        value, gradient = jax.value_and_grad(loss)(shards)
        return jax.lax.pmean(value, "data"), [g / 8 for g in gradient]

    GatheringParam.reads.clear()
    step = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, PartitionSpec("data")), out_specs=(PartitionSpec(), specs), check_vma=False
    )
    value, gradient = jax.jit(step)(leaves, batch)
    assert sorted(GatheringParam.reads) == sorted(paths)
    plain_loss = jax.jit(jax.value_and_grad(lambda x: mean_loss(graph, jax.tree.unflatten(tree, x), batch)))
    want, plain = plain_loss(leaves)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for got, expected in zip(gradient, plain, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
