"""Loss and accuracy of classes, and labels that a classifier has no output for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.models.classification import check_labels, classification, image_classification_loss

LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]))


def test_loss_and_accuracy():
    loss, metrics = classification(LOGITS, jnp.array([0, 2, 2], jnp.uint8), jnp.array([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(loss, [-np.log(0.5 * 0.1**2 * 0.6), 4.0], rtol=1e-6)
    assert metrics["accuracy"] == (2.0, 4.0)


def test_images_go_through_the_model():
    model = lambda images, rng: images.reshape(3, 3)
    batch = {"images": LOGITS.reshape(3, 1, 1, 3), "labels": jnp.array([0, 1, 2])}
    loss, metrics = image_classification_loss(model, batch)
    np.testing.assert_allclose(loss, [-np.log(0.5 * 0.8 * 0.6), 3.0], rtol=1e-6)
    assert metrics["accuracy"] == (3.0, 3.0)


@pytest.mark.parametrize("label", [-1, 3, 255])
def test_a_label_without_an_output_is_loud_unless_it_weighs_nothing(label):
    labels = jnp.array([0, label, 2])
    total = lambda logits, weights=None: classification(logits, labels, weights)[0].total
    value, gradient = jax.value_and_grad(total)(LOGITS)
    assert np.isnan(value) and not gradient.any()
    value, gradient = jax.value_and_grad(total)(LOGITS, jnp.array([1.0, 0.0, 1.0]))
    np.testing.assert_allclose(value, -np.log(0.5 * 0.6), rtol=1e-6)
    assert np.isfinite(gradient).all() and not gradient[1].any() and gradient[0].any()


@pytest.mark.parametrize(
    "labels, message",
    [
        ([0, 1, 10], r"labels\[2\]=10: must lie in \[0, 10\)"),
        (np.array([[3, 4], [-1, 12]]), r"labels\[1, 0\]=-1: must lie in \[0, 10\)"),
        ([0.0, 1.0], r"labels=\[0.0, 1.0\]: must be integers in \[0, 10\)"),
    ],
)
def test_labels_are_checked_where_data_are_loaded(labels, message):
    with pytest.raises(UserError, match=message):
        check_labels(labels, 10)


def test_labels_in_range_pass():
    check_labels(np.arange(10, dtype=np.uint8), 10)
    check_labels(np.zeros((0,), np.int64), 10)
