"""Groups of parameters with settings of their own."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from zerojax.errors import UserError, shown
from zerojax.optim.leaves import on_floating_leaves
from zerojax.paths import as_patterns, matches, path_name, require_matches


def grouped(
    optimizer: Callable[..., optax.GradientTransformation],
    groups: Sequence[Mapping[str, Any]],
    default: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """One optimizer whose settings differ between groups of parameters.

    A group is chosen by the path of a leaf, not by its number of dims: where the layers of a model are one stack, its
    biases and scales have two dims.

    Args:
        optimizer: a function of settings such as ``learning_rate`` and ``weight_decay``: `adamw`, ``optax.adamw``.
        groups: each a mapping of "params", a pattern or a list of patterns, and of the settings that differ. A pattern
            is matched against the whole path of a leaf as it is in ``state.params``, such as
            "blocks/attention/qkv/bias": * stands for anything, also for slashes, ? for one character, [ab] for one of
            some. The first group with a match takes the leaf.
        default: settings of all groups, and of the leaves that are in none.

    Raises:
        UserError: a group that is no such mapping, a setting that the optimizer does not have; when the optimizer meets
            the parameters, a pattern that matches none of them.

    >>> import jax.numpy as jnp
    >>> no_decay = {"params": ["*bias", "*norm*"], "weight_decay": 0.0}
    >>> optimizer = grouped(optax.adamw, [no_decay], default={"learning_rate": 0.5, "weight_decay": 0.5})
    >>> params = {"mlp": {"kernel": jnp.ones((2, 1)), "bias": jnp.ones(1)}, "norm": {"scale": jnp.ones(1)}}
    >>> zeros = jax.tree.map(jnp.zeros_like, params)
    >>> updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    >>> jax.tree.map(lambda p: p.sum().tolist(), optax.apply_updates(params, updates))
    {'mlp': {'bias': 1.0, 'kernel': 1.5}, 'norm': {'scale': 1.0}}
    """
    if not callable(optimizer):
        raise UserError(f"optimizer is {shown(optimizer)}; accepted: a function of settings, such as optax.adamw")
    default = {} if default is None else default
    if not isinstance(default, Mapping):
        raise UserError(f"default is {shown(default)}; accepted: a mapping of settings")
    patterns = [as_patterns(f"groups[{i}]['params']", group["params"]) for i, group in enumerate(_checked(groups))]
    transforms = {
        f"group_{i}": _make(f"groups[{i}]", optimizer, {**default, **{k: v for k, v in group.items() if k != "params"}})
        for i, group in enumerate(groups)
    }
    transforms["rest"] = _make("default", optimizer, dict(default))
    return on_floating_leaves(optax.multi_transform(transforms, lambda params: _labels(patterns, params)))


def _labels(patterns: Sequence[Sequence[str]], params: Any) -> Any:
    names = [path_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    for i, group in enumerate(patterns):
        require_matches(f"groups[{i}]: params", group, names)

    def label(path: Any, _: Any) -> str:
        name = path_name(path)
        return next((f"group_{i}" for i, group in enumerate(patterns) if matches(name, group)), "rest")

    return jax.tree_util.tree_map_with_path(label, params)


def _checked(groups: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(groups, str) or not isinstance(groups, Sequence):
        raise UserError(f"groups is {shown(groups)}; accepted: a list of mappings with 'params' and settings")
    for i, group in enumerate(groups):
        if not isinstance(group, Mapping) or not group.get("params"):
            raise UserError(f"groups[{i}] is {shown(group)}; accepted: a mapping with 'params' and settings")
    return groups


def _make(
    where: str, optimizer: Callable[..., optax.GradientTransformation], settings: dict[str, Any]
) -> optax.GradientTransformation:
    accepted = inspect.signature(optimizer).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        for name in settings:
            if name not in accepted:
                raise UserError(f"{where} has the setting {name!r}; accepted: {', '.join(accepted)}")
    try:
        return optimizer(**settings)
    except TypeError as error:  # a required setting is missing; whether gin has it shows in the call only
        raise UserError(f"{where}: the optimizer does not take {shown(settings)}: {error}") from error
