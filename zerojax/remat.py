"""What the forward pass keeps for the backward pass, by name."""

import dataclasses
import functools
import logging
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from zerojax.errors import UserError, shown

Policy = Callable[..., Any]

HOST = "pinned_host"

_log = logging.getLogger(__name__)

# The products of activations with weights, and not those of activations with each other: attention's scores, which
# have the batch among their dimensions, grow with the square of the length and cost little to compute again.
_POLICIES: dict[str, Policy] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", HOST),
}
NAMES = ("none", *_POLICIES)


@dataclasses.dataclass(frozen=True)
class Remat:
    """Which parts of a model compute their forward pass again in the backward pass, and what they keep of it.

    Attributes:
      policy: "full" keeps a block's inputs alone; "dots" its matrix products without batch dimensions too (those with
        weights, and not attention's scores); "offload" the same in the host's memory; or a policy of
        `jax.checkpoint_policies`.
      names: values that the model names with `jax.ad_checkpoint.checkpoint_name`, kept (for "offload" in the host's
        memory) beside what the policy keeps.
      blocks: the modules that are rematerialised, each by itself: patterns (`fnmatch`) of their paths ("blocks/3",
        "encoder/*") or of their types' names; of modules inside of each other the outermost. By default the repeated
        ones that the model does not rematerialise itself: numbered siblings of one type, and what scans call. A model
        without any is rematerialised as a whole.
      every: takes every n-th block only, from the first on.

    Raises:
      UserError: if a setting is out of its range.

    >>> Remat("dots", blocks="PreNormBlock", every=2).blocks
    ('PreNormBlock',)
    """

    policy: str | Policy = "full"
    names: Sequence[str] = ()
    blocks: str | Sequence[str] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if not (callable(self.policy) or (isinstance(self.policy, str) and self.policy in _POLICIES)):
            raise UserError(
                f"Remat.policy is {shown(self.policy)}; accepted: {', '.join(map(repr, _POLICIES))}, or a policy of "
                "jax.checkpoint_policies"
            )
        object.__setattr__(self, "names", _texts("names", self.names))
        if self.blocks is not None:
            object.__setattr__(self, "blocks", _texts("blocks", self.blocks))
            if not self.blocks:
                raise UserError("Remat.blocks is empty; accepted: patterns of module paths or type names, or None")
        if isinstance(self.every, bool) or not isinstance(self.every, numbers.Integral) or self.every < 1:
            raise UserError(f"Remat.every is {shown(self.every)}; accepted: a positive integer")

    @staticmethod
    def of(value: Any) -> "Remat | Policy | None":
        """What `Zero.remat` says: a name as a `Remat`, "none" as `None`.

        >>> Remat.of("dots") == Remat("dots"), Remat.of("none") is None
        (True, True)
        """
        if isinstance(value, str) and value in NAMES:
            return None if value == "none" else Remat(value)
        if value is None or isinstance(value, Remat) or (callable(value) and not isinstance(value, type)):
            return value
        raise UserError(
            f"remat is {shown(value)}; accepted: {', '.join(map(repr, NAMES))}, a zerojax.Remat, a policy of "
            "jax.checkpoint_policies, or None"
        )

    @property
    def keeps(self) -> Policy:
        """The policy for `jax.checkpoint`: the same object for equal settings, since JAX caches by it."""
        return _keeps(self.policy, tuple(self.names))

    def check_devices(self, devices: Iterable[Any]) -> None:
        """Raises a UserError if values are to go to a host's memory that a device cannot reach."""
        if self.policy != "offload":
            return
        for device in devices:
            if device.platform == "cpu":
                _warn_of_no_effect()
            kinds = _memory_kinds(device)
            if kinds and HOST not in kinds:
                raise UserError(
                    f"remat is 'offload', and {device.platform} devices have the memories {', '.join(sorted(kinds))} "
                    f"without {HOST}; accepted there: 'full', 'dots' or 'none'"
                )


@functools.cache
def _warn_of_no_effect() -> None:
    """Once."""
    _log.warning(
        "remat is 'offload', and devices of the backend 'cpu' compute in host memory: it saves no more memory here "
        "than 'dots', and the step computes the same"
    )


@functools.cache
def _keeps(policy: str | Policy, names: tuple[str, ...]) -> Policy:
    base: Policy = _POLICIES[policy] if isinstance(policy, str) else policy
    if not names:
        return base
    policies = jax.checkpoint_policies
    if policy == "offload":
        named = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=names, offload_src="device", offload_dst=HOST
        )
    else:
        named = policies.save_only_these_names(*names)

    def keeps(prim: Any, *avals: Any, **params: Any) -> Any:
        is_named = prim.name == "name" and params["name"] in names
        return (named if is_named else base)(prim, *avals, **params)

    return keeps


def _memory_kinds(device: Any) -> set[str]:
    """The kinds of memory that a device reaches; none if it cannot say, as one that is only compiled for."""
    return {memory.kind for memory in device.addressable_memories()}


def _texts(field: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"Remat.{field} is {shown(value)}; accepted: a text, or a sequence of texts")
    return texts
