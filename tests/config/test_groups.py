"""Parameter groups from a configuration."""

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax import Zero
from zerojax.config.gin import configured, load
from zerojax.errors import UserError

CONFIG = """
grouped.optimizer = @optax.adamw
grouped.groups = [{"params": "*bias", "weight_decay": 0.0}, {"params": ["head/*"], "learning_rate": 0.0}]
optax.adamw.learning_rate = 1e-2
optax.adamw.weight_decay = 0.5
"""


@pytest.fixture
def optimizer(tmp_path):
    path = tmp_path / "a.gin"
    path.write_text(CONFIG)
    load(path)
    yield configured("grouped")()
    gin.clear_config()


def make_model(key):
    return {"body": {"kernel": jnp.ones((4, 64, 64)), "bias": jnp.ones((4, 64))}, "head": {"kernel": jnp.ones((64, 8))}}


def test_groups_of_a_configuration_have_their_own_settings(optimizer):
    """No gradient: what moves is decayed. A bias of scanned layers has two dimensions and is a bias all the same."""
    zero = Zero(stage=3)
    state = zero.init(make_model, optimizer)
    state, _ = zero.train_step(lambda model, batch, rng: 0.0 * jnp.sum(model["head"]["kernel"]))(state, np.ones((8, 1)))
    np.testing.assert_array_equal(state.params["body"]["bias"], 1.0)
    np.testing.assert_allclose(state.params["body"]["kernel"], 1 - 1e-2 * 0.5, rtol=1e-6)
    np.testing.assert_array_equal(state.params["head"]["kernel"], 1.0)


def test_a_pattern_that_matches_nothing_is_told(optimizer):
    with pytest.raises(UserError, match=r"head/\*"):
        jax.eval_shape(optimizer.init, {"body": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}})
    assert isinstance(optimizer, optax.GradientTransformation)
