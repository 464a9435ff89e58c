"""ViT against that of transformers, its patches, and its training in shards."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.models.sharded import assert_each_parameter_is_read_once, assert_shards_train_as_one_device_does
from zerojax.errors import UserError
from zerojax.models.classification import image_classification_loss
from zerojax.models.vit import ViT

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TINY = dict(classes=5, image_size=8, patch_size=4, dim=16, layers=2, heads=4)


def make(seed=0, **arguments):
    return ViT(**TINY | arguments, rngs=nnx.Rngs(seed))


def images(batch=8, seed=1):
    pixels, labels = jax.random.split(jax.random.key(seed))
    return {"images": jax.random.normal(pixels, (batch, 8, 8, 3)), "labels": jax.random.randint(labels, (batch,), 0, 5)}


def test_logits_equal_those_of_transformers():
    """`ViTForImageClassification` of transformers 5.24."""
    model = ViT(
        classes=5, image_size=8, patch_size=4, dim=24, layers=2, heads=4, mlp_dim=40, norm_epsilon=1e-12, scan=False,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    tensors = load_file(GOLDEN / "weights_vit.safetensors")
    embeddings = {name: tensors[f"vit.embeddings.{name}"] for name in ("cls_token", "position_embeddings")}
    projection = "vit.embeddings.patch_embeddings.projection"
    model.patches.kernel[...] = tensors[f"{projection}.weight"].transpose(2, 3, 1, 0).reshape(-1, 24)
    model.patches.bias[...] = tensors[f"{projection}.bias"]
    model.class_token[...] = embeddings["cls_token"][0, 0]
    model.positions[...] = embeddings["position_embeddings"][0]

    def linear(layer, name):
        layer.kernel[...], layer.bias[...] = tensors[f"{name}.weight"].T, tensors[f"{name}.bias"]

    def norm(layer, name):
        layer.scale[...], layer.bias[...] = tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    for i, block in enumerate(model.blocks):
        theirs = f"vit.encoder.layer.{i}"
        parts = [f"{theirs}.attention.attention.{name}" for name in ("query", "key", "value")]
        kernels = [tensors[f"{name}.weight"].T.reshape(24, 4, 6) for name in parts]
        biases = [tensors[f"{name}.bias"].reshape(4, 6) for name in parts]
        block.attention.qkv.kernel[...] = np.concatenate(kernels, axis=-1).reshape(24, 72)
        block.attention.qkv.bias[...] = np.concatenate(biases, axis=-1).ravel()
        linear(block.attention.out, f"{theirs}.attention.output.dense")
        linear(block.mlp.up, f"{theirs}.intermediate.dense")
        linear(block.mlp.down, f"{theirs}.output.dense")
        norm(block.attention_norm, f"{theirs}.layernorm_before")
        norm(block.mlp_norm, f"{theirs}.layernorm_after")
    norm(model.final_norm, "vit.layernorm")
    linear(model.head, "classifier")
    found = np.load(GOLDEN / "weights_vit.npz")
    assert np.abs(found["logits"]).max() > 1
    np.testing.assert_allclose(model(found["images"]), found["logits"], atol=1e-4)


def test_the_published_size():
    base = dict(classes=1000, image_size=224, patch_size=16, dim=768, layers=12, heads=12)
    abstract = nnx.eval_shape(lambda: ViT(**base, rngs=nnx.Rngs(0)))
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(nnx.state(abstract, nnx.Param))]
    assert sum(sizes) == 86_567_656  # torchvision's vit_b_16


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_without_positions_the_order_of_patches_does_not_matter(pool):
    model, given = make(pool=pool), images()["images"]
    model.positions[...] = jnp.zeros_like(model.positions[...])
    swapped = jnp.concatenate([given[:, 4:], given[:, :4]], axis=1)
    np.testing.assert_allclose(model(given), model(swapped), atol=1e-5)
    turned = given[:, ::-1]  # pixels inside of a patch
    assert not np.allclose(model(given), model(turned), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_have_the_dtype_of_the_parameters(dtype):
    graph, params = nnx.split(make())
    logits = nnx.merge(graph, optax.tree.cast(params, dtype))(images()["images"])
    assert (logits.shape, logits.dtype) == ((8, 5), dtype)


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_equals_unscanned(remat):
    losses = []
    for scan in (True, False):
        graph, params = nnx.split(make(scan=scan, remat=remat))
        loss = lambda params, graph=graph: image_classification_loss(nnx.merge(graph, params), images())[0].total
        value, gradient = jax.jit(jax.value_and_grad(loss))(params)
        losses.append((value, optax.tree.norm(gradient)))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_dropout_follows_its_key_and_ends_in_evaluation():
    model, given = make(dropout=0.5), images()["images"]
    a, b = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(model(given, a), model(given, a))
    assert (model(given, a) != model(given, b)).any()
    model.eval()
    np.testing.assert_array_equal(model(given, a), make()(given))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(patch_size=3), "patch_size=3: must be a positive divisor of image_size=8"),
        (dict(heads=3), "heads=3: must be a positive divisor of dim=16"),
        (dict(pool="max"), "pool='max': must be one of 'class', 'mean'"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(UserError, match=message):
        make(**wrong)


def test_images_of_another_size_are_named():
    with pytest.raises(UserError, match=r"images of shape \(8, 8, 1\): the model's are \(8, 8, 3\)"):
        make()(jnp.zeros((2, 8, 8, 1)))


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_each_parameter_is_read_once(pool):
    assert_each_parameter_is_read_once(make(pool=pool, remat=True), lambda model: model(images()["images"]))


def test_shards_train_as_one_device_does():
    make_model = lambda key: ViT(**TINY, rngs=nnx.Rngs(key))
    assert_shards_train_as_one_device_does(make_model, image_classification_loss, images())
