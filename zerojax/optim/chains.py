"""What the optimizers here have in common: a weight decay, a learning rate, float32."""

import optax

from zerojax.optim import checks
from zerojax.optim.leaves import in_float32


def weight_decayed(weight_decay: float) -> optax.GradientTransformation:
    """Adds ``weight_decay * p`` to every update, whatever the leaf's shape: a stack of biases has two dims too."""
    checks.real("weight_decay", weight_decay)
    return optax.add_decayed_weights(weight_decay)


def descent(
    learning_rate: optax.ScalarOrSchedule, *parts: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """``parts`` one after another and a step of ``learning_rate`` down what they give, in float32."""
    checks.rate("learning_rate", learning_rate)
    return in_float32(optax.chain(*parts, optax.scale_by_learning_rate(learning_rate)))
