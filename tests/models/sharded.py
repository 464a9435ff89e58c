"""What every reference model promises: parameters read once, and the same training in shards as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from zerojax import Zero


class CountedParam(nnx.Param):
    """Notes the path of every read."""

    reads: list[str] = []

    def get_value(self, **kwargs):
        CountedParam.reads.append(self.get_metadata()["path"])
        return super().get_value(**kwargs)


def assert_each_parameter_is_read_once(model, forward):
    """``forward`` of the model is only traced."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    flat = [(path, CountedParam(v.get_value(), path=str(path))) for path, v in nnx.to_flat_state(params)]
    CountedParam.reads.clear()
    copied = lambda: nnx.merge(graph, nnx.from_flat_state(flat), jax.tree.map(jnp.copy, rest))
    jax.make_jaxpr(lambda: forward(copied()))()
    assert sorted(CountedParam.reads) == sorted(str(path) for path, _ in flat)


def train(zero, make_model, loss_fn, batch, steps):
    """Losses and gradient norms, and the trained model."""
    state = zero.init(make_model, optax.sgd(0.3))
    step, history = zero.train_step(loss_fn), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        history.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(history), zero.gather(state)


def assert_shards_train_as_one_device_does(make_model, loss_fn, batch, *, steps=3, rtol=1e-5):
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    history, model = train(Zero(stage=3, min_shard_size=8), make_model, loss_fn, batch, steps)
    want, _ = train(Zero(stage=0, mesh=one), make_model, loss_fn, batch, steps)
    assert want[-1, 0] < want[0, 0]
    np.testing.assert_allclose(history, want, rtol=rtol)
    return model
