"""Layers whose large intermediate arrays never exist whole: they go through a loop over chunks of the rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.errors import UserError, shown
from zerojax.models.losses import check_rows, cross_entropy
from zerojax.weighted import Weighted


def chunked_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    chunks: int = 8,
) -> Weighted:
    """`cross_entropy` of the logits ``hidden @ head + bias``, which exist for one chunk of the rows at a time.

    The gradients of a chunk are made together with its loss, while its logits are there, so nothing is computed twice:
    the backward pass only scales. What waits for it is the gradient of ``hidden`` and those of ``head`` and ``bias``,
    summed over the chunks in fp32. In place of ``4 rows vocab`` bytes of fp32 logits these are
    ``4 rows vocab / chunks + 4 dim vocab + 4 rows dim``.

    Args:
        hidden: (..., dim), any float dtype.
        head: (dim, vocab); an embedding's transpose for a tied head.
        targets: (...), integers in [0, vocab).
        weights: (...), or None for 1 each. No gradient flows to them.
        bias: (vocab,), or None.
        chunks: the number of parts that the rows are computed in; the last is filled up with rows of weight 0.

    Returns:
        The weighted sum of ``-log softmax(logits)[target]`` in nats, and the sum of the weights.

    Raises:
        UserError: if ``chunks`` is not a positive integer, or the shapes do not go together.

    >>> key = jax.random.key(0)
    >>> hidden, head = jax.random.normal(key, (6, 4)), jax.random.normal(key, (4, 10))
    >>> chunked = chunked_cross_entropy(hidden, head, jnp.arange(6), chunks=4)
    >>> bool(jnp.allclose(chunked.total, cross_entropy(hidden @ head, jnp.arange(6)).total))
    True
    """
    _check_chunks(chunks)
    check_rows("hidden", hidden, targets, weights)
    if head.ndim != 2 or head.shape[0] != hidden.shape[-1]:
        raise UserError(f"head has shape {head.shape}; accepted: ({hidden.shape[-1]}, vocab), as hidden has")
    if bias is not None and bias.shape != head.shape[1:]:
        raise UserError(f"bias has shape {bias.shape}; accepted: {head.shape[1:]}, as head's last dimension")
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    weights = jax.lax.stop_gradient(weights)
    rows = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weights.reshape(-1))
    return Weighted(_total(head, bias, *(_in_chunks(x, chunks) for x in rows)), weights.sum())


def _chunk_loss(
    head: jax.Array, bias: jax.Array | None, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    logits = hidden @ head
    return cross_entropy(logits if bias is None else logits + bias, targets, weights).total


@jax.custom_vjp
def _total(
    head: jax.Array, bias: jax.Array | None, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """The sum of the losses of chunks of rows: (chunks, rows, dim) and (chunks, rows)."""
    return jax.lax.map(lambda chunk: _chunk_loss(head, bias, *chunk), (hidden, targets, weights)).sum()


def _total_forward(
    head: jax.Array, bias: jax.Array | None, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple[Any, Any, Any]]:
    differentiate = jax.value_and_grad(_chunk_loss, argnums=(0, 1, 2))

    def add(sums: Any, chunk: Any) -> tuple[Any, jax.Array]:
        loss, (of_head, of_bias, of_hidden) = differentiate(head, bias, *chunk)
        return jax.tree.map(lambda total, x: total + x, sums, (loss, of_head, of_bias)), of_hidden

    shared = (head, bias)
    zeros = (jnp.zeros((), jnp.float32), *jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shared))
    (total, *of_shared), of_hidden = jax.lax.scan(add, zeros, (hidden, targets, weights))
    of_head, of_bias = jax.tree.map(lambda x, like: like.astype(x.dtype), shared, tuple(of_shared))
    return total, (of_head, of_bias, of_hidden)


def _total_backward(kept: tuple[Any, Any, Any], ct: jax.Array) -> tuple[Any, Any, Any, None, None]:
    of_head, of_bias, of_hidden = jax.tree.map(lambda x: (ct * x).astype(x.dtype), kept)
    return of_head, of_bias, of_hidden, None, None


_total.defvjp(_total_forward, _total_backward)


def tiled(function: Callable[[jax.Array], jax.Array], x: jax.Array, *, chunks: int) -> jax.Array:
    """``function(x)`` of a function that treats rows alike (an MLP), a chunk of the rows at a time.

    The backward pass computes a chunk again, so what a chunk needs inside exists for one chunk at a time in both. An
    NNX module's parameters are read once, before the loop, and what it changes in itself is lost. Whatever else the
    function reads from outside, it reads for every chunk.

    Args:
        function: an NNX module or a function, (rows, dim) to (rows, ...), each row by itself.
        x: (..., dim).
        chunks: the number of parts; the last is filled up with rows of zeros, whose results are left out.

    Returns:
        (..., what the function makes of a row).

    Raises:
        UserError: if ``chunks`` is not a positive integer, or the function does not return a row for each row.

    >>> x = jnp.arange(10.0).reshape(5, 2)
    >>> bool((tiled(jnp.square, x, chunks=2) == jnp.square(x)).all())
    True
    """
    _check_chunks(chunks)
    if isinstance(function, nnx.Module):
        function = _with_parameters_read(function)
    rows = x.reshape(-1, x.shape[-1])
    out = jax.lax.map(jax.checkpoint(function, prevent_cse=False), parts := _in_chunks(rows, chunks))
    if out.shape[:2] != parts.shape[:2]:
        raise UserError(
            f"tiled: the function makes shape {out.shape[1:]} of {parts.shape[1:]}; accepted: a function that "
            "returns a row for each row"
        )
    out = out.reshape(-1, *out.shape[2:])[: rows.shape[0]]
    return out.reshape(*x.shape[:-1], *out.shape[1:])


def _with_parameters_read(module: Any) -> Any:
    """The module with arrays in the place of parameters that are made where they are read, as from shards."""
    graph, *states = nnx.split(module, nnx.Param, ...)
    params, rest = states
    read = lambda param: type(param).from_metadata(param.get_value(), param.get_metadata())
    flat = [(path, read(param)) for path, param in nnx.to_flat_state(params)]
    return nnx.merge(graph, nnx.from_flat_state(flat), rest)


def _in_chunks(x: jax.Array, chunks: int) -> jax.Array:
    """(rows, ...) to (chunks, rows of a chunk, ...), filled up with zeros."""
    size = -(-x.shape[0] // chunks)
    x = jnp.pad(x, [(0, chunks * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(chunks, size, *x.shape[1:])


def _check_chunks(chunks: int) -> None:
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise UserError(f"chunks is {shown(chunks)}; accepted: a positive integer")
