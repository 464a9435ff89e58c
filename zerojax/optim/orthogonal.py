"""Muon for the matrices of a model, Adam for the rest, as DeepSpeed combines them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.optim import checks
from zerojax.optim.adaptive import adamw
from zerojax.optim.chains import descent, weight_decayed
from zerojax.optim.moments import Coefficient, moment
from zerojax.paths import as_patterns, matches, path_name

# DeepSpeed names "embed" and "lm_head". The other names are those of tables and heads here, and of vectors, stacks of
# which have two dims.
ADAM_PARAMS = ("*embed*", "*positions", "*lm_head*", "head/*", "*bias", "*scale", "*norm*")

NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan 2024: the largest slope at 0, singular values near 1 after 5 steps
RESTART = 2  # where the Gram form goes back to the matrix, since its error grows with every step


class MuonState(NamedTuple):
    """The moving averages of the gradients."""

    mu: Any


def muon(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    *,
    ns_method: str = "gram",
    ns_dtype: Any = None,
    adam_lr: optax.ScalarOrSchedule | None = None,
    betas: Sequence[Coefficient] = (0.9, 0.95),
    eps: float = 1e-10,
    adam_params: str | Sequence[str] = ADAM_PARAMS,
) -> optax.GradientTransformationExtraArgs:
    """Muon (Jordan 2024, kellerjordan.github.io/posts/muon) with AdamW for what is no matrix of a hidden layer.

    A matrix W, laid out (inputs, outputs) as the kernel of a Flax layer is, has the average m <- momentum m +
    (1 - momentum) g and moves by ``-lr (sqrt(max(1, outputs / inputs)) U + weight_decay W)``, where U is
    (1 - momentum) g + momentum m with its singular values drawn to 1.

    A leaf of more dims is a batch of matrices in its last two dims: a stack of layers or of experts. That is wrong for
    kernels that have several input or output dims (convolutions, attention heads as a dim of their own); name those in
    ``adam_params``.

    Args:
        learning_rate: of the matrices, a number or a schedule.
        momentum: see above.
        weight_decay: of the matrices and of the rest, apart from the moments.
        ns_method: "standard", or "gram", which works on products of the shorter sides and so costs less where the sides
            differ (tridao.me/blog/2026/gram-newton-schulz).
        ns_dtype: what the singular values are drawn to 1 in; None for DeepSpeed's, bfloat16 for "standard" and
            float16 for "gram".
        adam_lr: of the rest, a number or a schedule; None for ``learning_rate``.
        betas, eps: of the rest.
        adam_params: patterns, as in `grouped`, of leaves that belong to the rest although they have two dims or more.

    Raises:
        UserError: a value out of its range.

    >>> optimizer = muon(0.1, ns_dtype=jnp.float32)
    >>> params = {"kernel": jnp.diag(jnp.array([4.0, 1.0])), "bias": jnp.ones(2)}
    >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
    >>> print(jnp.diag(updates["kernel"]).round(1), updates["bias"].round(1))
    [-0.1 -0.1] [-0.1 -0.1]
    """
    checks.real("momentum", momentum, below=1)
    checks.choice("ns_method", ns_method, tuple(NEWTON_SCHULZ))
    if ns_dtype is not None:
        checks.floating("ns_dtype", ns_dtype)
    of_adam = as_patterns("adam_params", adam_params)
    matrices = descent(learning_rate, scale_by_muon(momentum, ns_method, ns_dtype), weight_decayed(weight_decay))
    rest = adamw(learning_rate if adam_lr is None else adam_lr, betas, eps, weight_decay)

    def kind(path: Any, x: Any) -> str:
        return "adam" if jnp.ndim(x) < 2 or matches(path_name(path), of_adam) else "muon"

    kinds = lambda params: jax.tree_util.tree_map_with_path(kind, params)
    return optax.multi_transform({"muon": matrices, "adam": rest}, kinds)


def scale_by_muon(momentum: float, ns_method: str, ns_dtype: Any) -> optax.GradientTransformation:
    """Gradients of batches of (inputs, outputs) to ``sqrt(max(1, outputs / inputs)) U`` of `muon`."""

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        mu = moment(momentum, updates, state.mu)
        step = lambda g: max(1.0, g.shape[-1] / max(1, g.shape[-2])) ** 0.5 * orthogonalize(g, ns_method, ns_dtype)
        return jax.tree.map(step, moment(momentum, updates, mu)), MuonState(mu)

    return optax.GradientTransformation(init, update)


def orthogonalize(x: jax.Array, ns_method: str = "gram", ns_dtype: Any = None) -> jax.Array:
    """Matrices with the singular vectors of ``x`` and singular values near 1, by five steps of Newton and Schulz.

    A step is X <- a X + (b A + c A A) X with A = X X^T. The matrix is first divided by its Frobenius norm, in its own
    dtype, so that no gradient is too large or too small for 16 bits.

    Args:
        x: (..., m, n).
        ns_method, ns_dtype: as in `muon`.

    >>> print(jnp.diag(orthogonalize(jnp.diag(jnp.array([900.0, -300.0])), ns_dtype=jnp.float32)).round(1))
    [ 0.8 -1.1]
    """
    iterate, dtype = NEWTON_SCHULZ[ns_method]
    tall = x.shape[-2] > x.shape[-1]
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    wide = ((x.mT if tall else x) / (norm + 1e-7)).astype(dtype if ns_dtype is None else ns_dtype)
    wide = (iterate if wide.shape[-2] < wide.shape[-1] else _standard)(wide)
    return (wide.mT if tall else wide).astype(x.dtype)


def _standard(x: jax.Array) -> jax.Array:
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = _dot(x, x.mT)
        x = a * x + _dot(b * gram + c * _dot(gram, gram), x)
    return x


def _gram(x: jax.Array) -> jax.Array:
    """The same polynomials, of the small square X X^T; what they amount to is multiplied with X at the end."""
    a, b, c = COEFFICIENTS
    for steps in RESTART, NEWTON_SCHULZ_STEPS - RESTART:
        gram, product = _dot(x, x.mT), jnp.eye(x.shape[-2], dtype=x.dtype)
        for i in range(steps):
            z = b * gram + c * _dot(gram, gram)
            product = a * product + (_dot(z, product) if i else z)
            if i < steps - 1:  # the next matrix is (a + Z) X, and its gram (a + Z) X X^T (a + Z)
                half = a * gram + _dot(z, gram)
                gram = a * half + _dot(half, z)
        x = _dot(product, x)
    return x


NEWTON_SCHULZ = {"standard": (_standard, jnp.bfloat16), "gram": (_gram, jnp.float16)}


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)  # float32 means float32, not the GPU's TF32
