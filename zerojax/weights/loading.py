"""Reading weights: checked as a whole, then parameter by parameter straight into its shards."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from zerojax.errors import UserError
from zerojax.weights.files import DTYPES, TensorFiles
from zerojax.weights.formats import Format, format_of
from zerojax.weights.pieces import Piece, complete_names, matches, pieces_of
from zerojax.weights.targets import Parameter, Target, replaced, target_of

T = TypeVar("T")
Range = tuple[tuple[int, int], ...]  # first and end of each dim


def load_weights(
    path: str | os.PathLike[str],
    state_or_model: T,
    kind: str,
    *,
    fresh: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> T:
    """The state or model with the weights of a file in Hugging Face's layout.

    Names and shapes are compared both ways before anything is read. Then each parameter goes straight into its shards,
    in the dtype that it has: beside a parameter's shards on this process, the host holds the tensors of one layer.
    Every process of a run calls this, and reads the files itself.

    Args:
        path: a ``.safetensors`` file, or a directory with ``model.safetensors`` or ``model.safetensors.index.json``.
        state_or_model: a `zerojax.State` of one of our models, or the model itself. A state is used up, as by a step; a
            model is left as it is.
        kind: the file's layout: "bert", "gpt2" or "llama".
        fresh: patterns of names of parameters ("head/*") that keep what they are where the file does not have them.
        ignore: patterns of names of tensors in the file ("cls.*") that are left out.

    Returns:
        The same kind of thing. A state's optimizer state begins anew; its step and randomness go on.

    Raises:
        UserError: the file is not there or damaged, or it does not match: one line lists what is missing, what is left
            over and what has another shape, and nothing is loaded.

    >>> import tempfile
    >>> from zerojax.models import GPT
    >>> from zerojax.weights import save_weights
    >>> make = lambda seed: GPT(vocab_size=16, dim=8, layers=2, heads=2, max_length=4, rngs=nnx.Rngs(seed))
    >>> first, tokens = make(0), jax.numpy.zeros((1, 4), int)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(folder, first, "gpt2")
    ...     second = load_weights(folder, make(1), "gpt2")
    >>> bool((first(tokens) == second(tokens)).all())
    True
    """
    for name, patterns in (("fresh", fresh), ("ignore", ignore)):
        if isinstance(patterns, str):
            raise UserError(f"{name}={patterns!r}: must be a list of patterns")
    target = target_of(state_or_model)
    form = format_of(kind, target.model)
    files = TensorFiles(path)
    names = complete_names((name for name in files.specs if not matches(name, ignore)), form)
    pieces = _check(files, names, target, form, kind, fresh)
    keep = isinstance(state_or_model, nnx.Module)
    arrays = {}
    for name, parameter in target.parameters.items():
        arrays[name] = _load(files, names, parameter, pieces[name], keep) if pieces[name] else parameter.array
    return replaced(state_or_model, arrays)


def _check(
    files: TensorFiles, names: Mapping[str, str], target: Target, form: Format, kind: str, fresh: Sequence[str]
) -> dict[str, list[Piece]]:
    """The pieces to load; none for a parameter that stays as it is."""
    pieces = pieces_of(target.shapes, form.rules)
    idle = [pattern for pattern in fresh if not any(matches(name, [pattern]) for name in pieces)]
    if idle:
        raise UserError(f"fresh={idle[0]!r} matches no parameter of the model, such as {next(iter(pieces))}")
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    for parameter, made_of in pieces.items():
        wanted = {name: shape for piece in made_of for name, shape in piece.tensors.items()}
        absent = [name for name in wanted if name not in names]
        used |= wanted.keys()
        if not made_of or absent:
            if matches(parameter, fresh) and len(absent) == len(wanted):
                pieces[parameter] = []
            else:
                missing += absent or [f"any tensor for {parameter}"]
        for name in wanted.keys() - absent:
            spec = files.specs[names[name]]
            if spec.shape != wanted[name] or spec.dtype not in DTYPES:
                misshapen.append(f"{names[name]} {spec.dtype}{list(spec.shape)}, expected {list(wanted[name])}")
    extra, differing = [], []
    for name in names.keys() - used:
        original = form.copies.get(name)
        if original is None or original not in names:
            extra.append(names[name])
        elif not np.array_equal(files.read(names[name]), files.read(names[original])):
            differing.append(f"{names[name]}, which the model ties to {names[original]}")
    faults = {
        "missing": missing,
        "not of the model": extra,
        "of another shape or dtype": misshapen,
        "differs": differing,
    }
    if any(faults.values()):
        told = "; ".join(f"{fault}: {', '.join(sorted(found))}" for fault, found in faults.items() if found)
        raise UserError(f"weights {files.path} do not match the model as kind {kind!r}, nothing is loaded: {told}")
    return pieces


def _load(
    files: TensorFiles, names: Mapping[str, str], parameter: Parameter, pieces: Sequence[Piece], keep: bool
) -> jax.Array:
    """The parameter with the shards of its array, which is deleted unless it is to be kept."""
    array = parameter.array
    shape, sharding, dtype = array.shape, array.sharding, array.dtype
    if not keep:
        array.delete()
    ranges = {_range(index, shape): None for index in sharding.addressable_devices_indices_map(shape).values()}
    shards = {r: np.zeros([stop - start for start, stop in r], dtype) for r in ranges}
    for piece in pieces:
        whole = piece.transform.join([files.read(names[name]) for name in piece.tensors])
        for r, shard in shards.items():
            _copy(whole, piece.layer, r, parameter.shape, shard)
    loaded = jax.make_array_from_callback(shape, sharding, lambda index: shards[_range(index, shape)])
    return jax.block_until_ready(loaded)  # the host's copies of one parameter end before those of the next begin


def _range(index: Any, shape: tuple[int, ...]) -> Range:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _copy(whole: np.ndarray, layer: int | None, shard_range: Range, shape: tuple[int, ...], shard: np.ndarray) -> None:
    """Copies what a shard holds of a parameter, or of one layer of it; beyond the parameter's shape it stays zeros."""
    bounds = [(start, min(stop, n)) for (start, stop), n in zip(shard_range, shape, strict=True)]
    if layer is not None:
        (first, end), *bounds = bounds
        if not first <= layer < end:
            return
        shard = shard[layer - first]
    if all(start < stop for start, stop in bounds):
        part = whole[tuple(slice(*b) for b in bounds)]
        shard[tuple(slice(0, n) for n in part.shape)] = part
