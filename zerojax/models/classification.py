"""Loss and accuracy of a classifier, and the loss of one that sees images."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.errors import UserError, shown
from zerojax.models.losses import cross_entropy
from zerojax.weighted import Weighted


class ImageModel(Protocol):
    """Images (batch, height, width, channels) and the key of the dropout masks to logits (batch, classes)."""

    def __call__(self, images: jax.Array, rng: jax.Array | None = None) -> jax.Array: ...


def classification(
    logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None
) -> tuple[Weighted, dict[str, Weighted]]:
    """Cross-entropy in nats, and the accuracy.

    A label outside of [0, classes) makes the loss NaN, without a gradient, unless its weight is 0. Inside a compiled
    step nothing can be raised: `check_labels` refuses such labels where data are loaded.

    Args:
        logits: (batch, classes), any float dtype.
        labels: (batch,), any integer dtype.
        weights: (batch,), or None for 1 each.

    Returns:
        The loss, and ``{"accuracy": ...}``, both with the sum of the weights for weight.

    >>> loss, metrics = classification(jnp.eye(3), jnp.array([0, 1, 0]))
    >>> round(float(metrics["accuracy"].total / metrics["accuracy"].weight), 3)
    0.667
    """
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    loss = cross_entropy(logits, labels.astype(jnp.int32), weights)
    hits = (weights * (logits.argmax(-1) == labels)).sum()
    return loss, {"accuracy": Weighted(hits, loss.weight)}


def image_classification_loss(
    model: ImageModel, batch: Mapping[str, jax.Array], rng: jax.Array | None = None
) -> tuple[Weighted, dict[str, Weighted]]:
    """`classification` of images.

    Args:
        model: a `ResNet`, a `ViT`, or another function of images and a key.
        batch: ``images`` (batch, height, width, channels), floats; ``labels`` (batch,); ``weights`` (batch,) or none.
        rng: the key of the dropout masks; None for none.
    """
    return classification(model(batch["images"], rng), batch["labels"], batch.get("weights"))


def check_labels(labels: Any, classes: int) -> None:
    """Refuses labels that a classifier of ``classes`` has no output for; for code that loads data.

    Raises:
        UserError: they are no integers, or one lies outside of [0, classes); the first such is named.

    >>> check_labels([0, 1, 2], classes=3)
    >>> check_labels([0, 3], classes=3)
    Traceback (most recent call last):
        ...
    zerojax.errors.UserError: labels[1]=3: must lie in [0, 3)
    """
    values = np.asarray(labels)
    if not np.issubdtype(values.dtype, np.integer):
        raise UserError(f"labels={shown(labels)}: must be integers in [0, {classes})")
    wrong = np.argwhere((values < 0) | (values >= classes))
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise UserError(f"labels[{', '.join(map(str, place))}]={values[place]}: must lie in [0, {classes})")
