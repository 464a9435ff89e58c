"""Groups of parameters with settings of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.optim import trees
from zerojax import Zero, optim
from zerojax.errors import UserError

GROUPS = [
    {"params": ["*bias", "*norm*"], "weight_decay": 0.0},
    {"params": "out/*", "learning_rate": 0.01},
    {"params": ["*out*", "embed*"], "learning_rate": 0.0},  # out/kernel is taken
]
DEFAULT = {"learning_rate": 0.1, "weight_decay": 0.5}


def apart(steps: list[Any], params: Any) -> Any:
    """Every leaf trained by itself with the settings that its group should give it."""
    settings = {
        "blocks/up/kernel": DEFAULT,
        "blocks/up/bias": DEFAULT | {"weight_decay": 0.0},
        "blocks/norm/scale": DEFAULT | {"weight_decay": 0.0},
        "embedding": DEFAULT | {"learning_rate": 0.0},
        "out/kernel": DEFAULT | {"learning_rate": 0.01},
        "table": {"learning_rate": 0.0},
    }

    def train(path: Any, x: jax.Array, *gradients: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return x if name == "table" else trees.trained(optax.adamw(**settings[name]), x, gradients)

    return jax.tree_util.tree_map_with_path(train, params, *steps)


@pytest.mark.parametrize("optimizer", [optax.adamw, optim.adamw], ids=["optax", "zerojax"])
@pytest.mark.parametrize("wrap", [lambda update: update, jax.jit], ids=["eager", "jit"])
def test_equals_leaves_trained_by_themselves(optimizer: Any, wrap: Any) -> None:
    params = trees.params()
    steps = trees.gradients(params, 3)
    after = trees.trained(optim.grouped(optimizer, GROUPS, DEFAULT), params, steps, wrap)
    trees.assert_close(after, apart(steps, params))


def test_groups_may_have_schedules() -> None:
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    rate = optim.warmup_lr(0.25, 0.5, 2, "linear")
    optimizer = optim.grouped(optax.sgd, [{"params": "a", "learning_rate": rate}], {"learning_rate": 1.0})
    after = trees.trained(optimizer, params, [params] * 3, jax.jit)
    assert after["a"].tolist() == [1 - 0.25 - 0.25 - 0.375] * 2
    assert after["b"].tolist() == [-2.0] * 2


def test_abstract_leaves_have_paths_too() -> None:
    optimizer = optim.grouped(optax.adamw, GROUPS, DEFAULT)
    abstract = jax.eval_shape(trees.params)
    state = jax.eval_shape(optimizer.init, abstract)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(trees.params()))
    with pytest.raises(UserError, match="matches no parameter"):
        jax.eval_shape(optim.grouped(optax.adamw, [{"params": "nothing"}], DEFAULT).init, abstract)


def test_paths_are_those_of_the_state_and_shards_do_not_matter() -> None:
    make = lambda rng: {"mlp": {"kernel": jax.random.normal(rng, (16, 8)), "bias": jnp.ones(8)}}
    loss = lambda model, batch, rng: jnp.mean(jnp.square(batch @ model["mlp"]["kernel"] + model["mlp"]["bias"]))
    groups = [{"params": "mlp/bias", "learning_rate": 0.0}]
    after = []
    for stage in 0, 3:
        zero = Zero(stage=stage, min_shard_size=0)
        state = zero.init(make, optim.grouped(optax.adamw, groups, DEFAULT))
        state, _ = zero.train_step(loss)(state, jnp.ones((16, 16)))
        after.append(zero.gather(state))
    assert after[0]["mlp"]["bias"].tolist() == [1.0] * 8
    trees.assert_close(after[1], after[0])


REFUSED: dict[str, Any] = {
    r"groups is {'params': '\*'}; accepted: a list of mappings": dict(groups={"params": "*"}),
    r"groups\[0\] is '\*bias'; accepted: a mapping with 'params'": dict(groups=["*bias"]),
    r"groups\[1\] is {'weight_decay': 0.0}; accepted: a mapping with 'params'": dict(
        groups=[{"params": "*"}, {"weight_decay": 0.0}]
    ),
    r"groups\[0\] is {'params': \[\]}; accepted: a mapping with 'params'": dict(groups=[{"params": []}]),
    r"groups\[0\]\['params'\] is \['a', 1\]; accepted: a pattern such as": dict(groups=[{"params": ["a", 1]}]),
    r"groups\[0\] has the setting 'lr'; accepted: learning_rate, b1, b2": dict(groups=[{"params": "*", "lr": 0.1}]),
    r"default has the setting 'decay'; accepted: learning_rate, b1, b2": dict(default={"decay": 0.1}),
    "default is 0.1; accepted: a mapping of settings": dict(default=0.1),
    "default: the optimizer does not take {}: .*missing 1 required positional argument: 'learning_rate'": dict(
        default=None
    ),
    "optimizer is 'adamw'; accepted: a function of settings": dict(optimizer="adamw"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input(message: str) -> None:
    settings = dict(optimizer=optax.adamw, groups=[], default=DEFAULT) | REFUSED[message]
    with pytest.raises(UserError, match=message):
        optim.grouped(**settings)


def test_a_pattern_without_a_parameter_is_told_with_what_there_is() -> None:
    optimizer = optim.grouped(optax.adamw, [{"params": "*kernel"}, {"params": ["table", "*biass"]}], DEFAULT)
    with pytest.raises(UserError) as error:
        optimizer.init({"a": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}, "table": jnp.ones(1)})
    assert str(error.value) == (
        "groups[1]: params '*biass' matches no parameter; there are 'a/bias', 'a/kernel', 'table'"
    )
