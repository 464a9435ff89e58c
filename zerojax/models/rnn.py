"""Language models that read one token after another: LSTM and GRU."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.models.transformer import check_choice, check_dropout, drop, linear

Carry = tuple[jax.Array, ...]


class LSTM(nnx.Module):
    """One layer of long short-term memory (Hochreiter and Schmidhuber 1997; forget gate of Gers et al. 2000).

    The columns of both kernels are the gates ``[input forget candidate output]``. The carry is the output (batch, dim)
    in the parameters' dtype, and the memory (batch, dim) in fp32.
    """

    def __init__(self, dim: int, rngs: nnx.Rngs) -> None:
        self.dim = dim
        self.kernel, self.recurrent = uniform(dim, (dim, 4 * dim), rngs), uniform(dim, (dim, 4 * dim), rngs)
        # A memory that forgets at first learns late: Jozefowicz et al. 2015, section 2.2.
        self.bias = nnx.Param(jnp.zeros(4 * dim).at[dim : 2 * dim].set(1.0))

    def initial_carry(self, batch: int, dtype: jnp.dtype) -> Carry:
        return jnp.zeros((batch, self.dim), dtype), jnp.zeros((batch, self.dim), jnp.float32)

    def __call__(self, x: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        """(batch, length, dim) and a carry to the same."""
        recurrent = self.recurrent[...]  # read before the loop over time, so that it is gathered once, not every turn

        def turn(carry: Carry, from_input: jax.Array) -> tuple[Carry, jax.Array]:
            h, memory = carry
            gates = (from_input + h @ recurrent).astype(jnp.float32)
            i, f, candidate, o = jnp.split(gates, 4, axis=-1)
            memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(candidate)
            h = (jax.nn.sigmoid(o) * jnp.tanh(memory)).astype(h.dtype)
            return (h, memory), h

        return over_time(turn, carry, x @ self.kernel[...] + self.bias[...])


class GRU(nnx.Module):
    """One layer of gated recurrent units (Cho et al. 2014, arXiv:1406.1078), as cuDNN and PyTorch compute it.

    The columns of both kernels are the gates ``[reset update candidate]``; the reset gate applies after the recurrent
    product of the candidate, which has a bias of its own. The carry is the output (batch, dim).
    """

    def __init__(self, dim: int, rngs: nnx.Rngs) -> None:
        self.dim = dim
        self.kernel, self.recurrent = uniform(dim, (dim, 3 * dim), rngs), uniform(dim, (dim, 3 * dim), rngs)
        self.bias, self.candidate_bias = nnx.Param(jnp.zeros(3 * dim)), nnx.Param(jnp.zeros(dim))

    def initial_carry(self, batch: int, dtype: jnp.dtype) -> Carry:
        return (jnp.zeros((batch, self.dim), dtype),)

    def __call__(self, x: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        """(batch, length, dim) and a carry to the same."""
        recurrent, candidate_bias = self.recurrent[...], self.candidate_bias[...]  # read once, as in `LSTM`

        def turn(carry: Carry, from_input: jax.Array) -> tuple[Carry, jax.Array]:
            (h,) = carry
            inputs = jnp.split(from_input.astype(jnp.float32), 3, axis=-1)
            own = jnp.split((h @ recurrent).astype(jnp.float32), 3, axis=-1)
            reset, update = (jax.nn.sigmoid(inputs[i] + own[i]) for i in (0, 1))
            candidate = jnp.tanh(inputs[2] + reset * (own[2] + candidate_bias))
            h = ((1 - update) * candidate + update * h).astype(h.dtype)
            return (h,), h

        return over_time(turn, carry, x @ self.kernel[...] + self.bias[...])


class RNN(nnx.Module):
    """A language model of embedding, LSTM or GRU layers, and a linear head.

    Parameters are born in fp32; the model computes in the dtype of the parameters that it finds, gates and memory in
    fp32. Every parameter is read once in a forward pass, before the loop over time. Sequences may be of any length.

    Args:
        vocab_size: number of tokens.
        dim: width of the embedding and of every layer.
        layers: number of recurrent layers.
        cell: "lstm" or "gru".
        dropout: rate after the embedding and after every layer.
        rngs: the stream ``params`` is drawn from.

    Raises:
        UserError: a choice that is not offered.

    >>> model = RNN(vocab_size=64, dim=16, layers=2, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 5), jnp.int32)).shape
    (3, 5, 64)
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        layers: int,
        cell: Literal["lstm", "gru"] = "lstm",
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        check_choice("cell", cell, ("lstm", "gru"))
        check_dropout(dropout)
        self.dropout = dropout
        self.deterministic = False  # set by nnx's `eval()`: nothing is dropped then
        self.embedding = uniform(dim, (vocab_size, dim), rngs)
        self.layers = nnx.List([LSTM(dim, rngs) if cell == "lstm" else GRU(dim, rngs) for _ in range(layers)])
        self.head = linear(dim, vocab_size, dim**-0.5, True, rngs)

    def __call__(self, tokens: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """(batch, length) integers to logits (batch, length, vocab_size), from carries of zeros; see `run`."""
        return self.run(tokens, None, rng)[0]

    def run(
        self, tokens: jax.Array, carries: tuple[Carry, ...] | None, rng: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[Carry, ...]]:
        """Goes on from where another call has ended.

        Args:
            tokens: (batch, length), integers.
            carries: of each layer, as a call before has returned them; None for zeros, at a text's beginning.
            rng: the key of the dropout masks; without it, and in evaluation mode, nothing is dropped.

        Returns:
            Logits (batch, length, vocab_size) in the parameters' dtype, and the carries at the end.

        >>> model, tokens = RNN(vocab_size=8, dim=4, layers=1, cell="gru", rngs=nnx.Rngs(0)), jnp.array([[1, 2, 3]])
        >>> _, carries = model.run(tokens[:, :2], None)
        >>> bool(jnp.allclose(model.run(tokens[:, 2:], carries)[0][:, 0], model(tokens)[:, 2]))
        True
        """
        keys: Any = [None] * (len(self.layers) + 1)
        if rng is not None and self.dropout > 0 and not self.deterministic:
            keys = jax.random.split(rng, len(keys))
        h = drop(self.embedding[...][tokens], self.dropout, keys[0])
        if carries is None:
            carries = tuple(layer.initial_carry(tokens.shape[0], h.dtype) for layer in self.layers)
        ends = []
        for layer, carry, key in zip(self.layers, carries, keys[1:], strict=True):
            h, end = layer(h, carry)
            h = drop(h, self.dropout, key)
            ends.append(end)
        return self.head(h), tuple(ends)


def over_time(
    turn: Callable[[Carry, jax.Array], tuple[Carry, jax.Array]], carry: Carry, x: jax.Array
) -> tuple[jax.Array, Carry]:
    """``turn`` over the second dim of (batch, length, ...): the outputs in the same order of dims, and the carry."""
    carry, y = jax.lax.scan(turn, carry, x.swapaxes(0, 1))
    return y.swapaxes(0, 1), carry


def uniform(dim: int, shape: tuple[int, ...], rngs: nnx.Rngs) -> nnx.Param:
    """Uniform in ``1 / sqrt(dim)`` on both sides of 0, as PyTorch's recurrent layers."""
    bound = dim**-0.5
    return nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))
