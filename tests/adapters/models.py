"""One network in four kinds: Linen, NNX, Equinox and plain functions, with the same numbers."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zerojax

WIDTH, HIDDEN, DEPTH, ROWS = 16, 64, 3, 32
BATCHES = [np.random.default_rng(i).normal(size=(ROWS, WIDTH)).astype(np.float32) for i in range(10)]


def numbers():
    """The network's weights: DEPTH layers of `up` (WIDTH, HIDDEN), its `bias` and `down` (HIDDEN, WIDTH)."""
    rng = np.random.default_rng(7)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)
    return [{"up": draw(WIDTH, HIDDEN), "bias": draw(1, HIDDEN)[0], "down": draw(HIDDEN, WIDTH)} for _ in range(DEPTH)]


def stacked():
    return jax.tree.map(lambda *layers: jnp.stack(layers), *numbers())


def error(y, x):
    return jnp.mean(jnp.square(y - jnp.roll(x, 1, axis=-1)))


# Plain functions.


@zerojax.block
def layer(weights, h):
    return h + jnp.tanh(h @ weights["up"] + weights["bias"]) @ weights["down"]


def plain(scan, remat=False):
    run = jax.checkpoint(layer) if remat else layer

    def loss(params, x, rng):
        if scan:
            return error(jax.lax.scan(lambda h, weights: (run(weights, h), None), x, params)[0], x)
        h = x
        for weights in params:
            h = run(weights, h)
        return error(h, x)

    return lambda key: stacked() if scan else jax.tree.map(jnp.asarray, numbers()), loss


# Flax Linen, as its authors write it.


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, h, _=None):
        return h + nn.Dense(WIDTH, use_bias=False, name="down")(jnp.tanh(nn.Dense(HIDDEN, name="up")(h))), None


class LinenNet(nn.Module):
    scan: bool
    remat: bool

    @nn.compact
    def __call__(self, h):
        kind = nn.remat(LinenLayer, prevent_cse=not self.scan) if self.remat else LinenLayer
        if self.scan:
            layers = nn.scan(kind, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH)
            return layers(name="layers")(h, None)[0]
        for i in range(DEPTH):
            h, _ = kind(name=f"layer{i}")(h)
        return h


def linen(scan, remat=False):
    net = LinenNet(scan, remat)
    named = lambda w: {"up": {"kernel": w["up"], "bias": w["bias"]}, "down": {"kernel": w["down"]}}

    def make(key):
        layers = {"layers": named(stacked())} if scan else {f"layer{i}": named(w) for i, w in enumerate(numbers())}
        made = net.init(key, jnp.zeros((1, WIDTH)))["params"]
        return {"params": jax.tree.map(lambda _, x: jnp.asarray(x), made, layers)}

    return make, lambda variables, x, rng: error(net.apply(variables, x), x)


# Flax NNX, as its authors write it.


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, h):
        return h + self.down(jnp.tanh(self.up(h)))


class NnxNet(nnx.Module):
    def __init__(self, scan, remat, rngs):
        self.scan, self.remat = scan, remat
        make = lambda rngs: NnxLayer(rngs)
        self.layers = nnx.vmap(make)(rngs.split(DEPTH)) if scan else nnx.List([make(rngs) for _ in range(DEPTH)])

    def __call__(self, h):
        run = lambda layer, h: layer(h)
        run = nnx.remat(run) if self.remat else run
        if self.scan:
            return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, h)
        for one in self.layers:
            h = run(one, h)
        return h


def nnx_model(scan, remat=False):
    def fill(module, weights):
        module.up.kernel[...], module.up.bias[...] = weights["up"], weights["bias"]
        module.down.kernel[...] = weights["down"]

    def make(key):
        net = NnxNet(scan, remat, nnx.Rngs(key))
        for module, weights in [(net.layers, stacked())] if scan else zip(net.layers, numbers(), strict=True):
            fill(module, weights)
        return net

    return make, lambda model, x, rng: error(model(x), x)


# Equinox, as its authors write it.


class EquinoxLayer(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, key=key)
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, use_bias=False, key=key)

    def __call__(self, h):
        return h + self.down(jnp.tanh(self.up(h)))


class EquinoxNet(eqx.Module):
    layers: EquinoxLayer | list
    remat: bool = eqx.field(static=True)

    def __call__(self, h):
        run = lambda layer, h: layer(h)
        run = jax.checkpoint(run) if self.remat else run
        if isinstance(self.layers, list):
            for one in self.layers:
                h = run(one, h)
            return h
        arrays, rest = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda h, arrays: (run(eqx.combine(arrays, rest), h), None), h, arrays)[0]


def equinox(scan, remat=False):
    where = lambda layer: (layer.up.weight, layer.up.bias, layer.down.weight)

    def filled(layer, w):
        transposed = lambda x: jnp.swapaxes(x, -1, -2)
        return eqx.tree_at(where, layer, (transposed(w["up"]), jnp.asarray(w["bias"]), transposed(w["down"])))

    def make(key):
        if scan:
            layers = filled(eqx.filter_vmap(EquinoxLayer)(jax.random.split(key, DEPTH)), stacked())
        else:
            layers = [filled(EquinoxLayer(key), w) for w in numbers()]
        return EquinoxNet(layers, remat)

    return make, lambda model, x, rng: error(jax.vmap(model)(x), x)


KINDS = {"plain": plain, "linen": linen, "nnx": nnx_model, "equinox": equinox}
