"""ResNet against the same network in PyTorch, its statistics, and its training in shards."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.models.sharded import assert_each_parameter_is_read_once, assert_shards_train_as_one_device_does
from zerojax.errors import UserError
from zerojax.models.classification import image_classification_loss
from zerojax.models.resnet import ResNet

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "weights_resnet.npz"
TINY = dict(classes=5, widths=(4, 6), depths=(1, 2))


def make(seed=0, **arguments):
    return ResNet(**TINY | arguments, rngs=nnx.Rngs(seed))


def images(batch=8, size=8, channels=3, seed=1):
    pixels, labels = jax.random.split(jax.random.key(seed))
    shape = (batch, size, size, channels)
    return {"images": jax.random.normal(pixels, shape), "labels": jax.random.randint(labels, (batch,), 0, 5)}


def pytorchs():
    """The model with PyTorch's parameters, and the arrays of the file."""
    found = dict(np.load(GOLDEN))
    ends = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}

    def given(path, part):
        *module, end = path
        x = found[f"{part} {'.'.join(map(str, module))}.{ends[end]}"]
        return x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T

    model = make()
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable[...] = given(path, "parameter")
    return model, found, given


def test_training_and_evaluation_equal_pytorchs():
    """`torch.nn.Conv2d` and `BatchNorm2d` (2.13.0), which keeps the unbiased variance."""
    model, found, given = pytorchs()
    np.testing.assert_allclose(model(found["images"]), found["training"], atol=1e-4)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.BatchStat)):
        want = given(path, "buffer")
        if path[-1] == "var":
            n = 4 * (8 * 8 if path[0] == "stem" or path[1] == 0 else 4 * 4)
            want = 0.9 + (want - 0.9) * (n - 1) / n
        np.testing.assert_allclose(variable[...], want, rtol=1e-4, atol=1e-6, err_msg=str(path))
        variable[...] = given(path, "buffer")
    model.eval()
    np.testing.assert_allclose(model(found["images"]), found["evaluation"], atol=1e-4)


def test_the_published_size():
    abstract = nnx.eval_shape(lambda: ResNet(classes=10, rngs=nnx.Rngs(0)))
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(nnx.state(abstract, nnx.Param))]
    assert sum(sizes) == 11_173_962  # github.com/kuangliu/pytorch-cifar, ResNet18


@pytest.mark.parametrize("size, channels", [(28, 1), (32, 3)])
def test_logits_have_the_dtype_of_the_parameters(size, channels):
    graph, params, statistics = nnx.split(make(channels=channels), nnx.Param, nnx.BatchStat)
    for dtype in (jnp.float32, jnp.bfloat16):
        model = nnx.merge(graph, optax.tree.cast(params, dtype), statistics)
        logits = model(images(2, size, channels)["images"])
        assert (logits.shape, logits.dtype) == ((2, 5), dtype)
        assert model.stem.norm.mean[...].dtype == jnp.float32


def test_in_evaluation_an_image_stands_alone():
    model, batch = make(), images()["images"]
    model(batch)
    assert (model.stem.norm.mean[...] != 0).all()
    model.eval()
    before = np.asarray(model.stem.norm.mean[...])
    np.testing.assert_allclose(model(batch[:1]), model(batch)[:1], atol=1e-5)
    np.testing.assert_array_equal(model.stem.norm.mean[...], before)


def test_as_many_widths_as_depths():
    with pytest.raises(UserError, match=r"widths=\(4, 6\), depths=\(1,\): must be one of each for every stage"):
        make(depths=(1,))


def test_each_parameter_is_read_once():
    assert_each_parameter_is_read_once(make(), lambda model: model(images()["images"]))


def test_shards_train_as_one_device_does():
    """Statistics are those of the whole batch."""
    make_model = lambda key: ResNet(**TINY, rngs=nnx.Rngs(key))
    model = assert_shards_train_as_one_device_does(make_model, image_classification_loss, images(), rtol=1e-4)
    assert (model.stem.norm.mean[...] != 0).all()
