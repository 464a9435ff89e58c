"""The sizes of a pretrained model, from its ``config.json``."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerojax.errors import UserError, shown

Config = Mapping[str, Any]


class PretrainedConfig(NamedTuple):
    """What a ``config.json`` says.

    Attributes:
        kind: of `load_weights`: "bert", "gpt2" or "llama".
        arguments: for the constructor of our `BERT` ("bert") or `GPT` ("gpt2", "llama").
    """

    kind: str
    arguments: dict[str, Any]


def from_config(path: str | os.PathLike[str]) -> PretrainedConfig:
    """The kind and the sizes of the model that a Hugging Face ``config.json`` describes.

    Heads are not in it: what `BERT` is to have of them is for the caller to add. Attention's probabilities are not
    dropped by our models; ``dropout`` is the rate in the residual stream.

    Args:
        path: the file, or the directory it is in.

    Raises:
        UserError: the file is absent or no JSON, lacks a size, or describes what our models do not compute.

    >>> import tempfile
    >>> sizes = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16, layer_norm_epsilon=1e-5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    ...     from_config(folder).arguments["dim"]
    32
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror}; accepted: a config.json, or a directory with one") from error
    except ValueError as error:
        raise UserError(f"config {path}: not JSON: {error}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UserError(f"config {path}: model_type is {shown(kind)}; accepted: {', '.join(map(repr, _KINDS))}")
    required, arguments = _KINDS[kind]
    for key, accepted in required.items():
        value = config.get(key, accepted[0])
        if value not in accepted:
            raise UserError(f"config {path}: {key} is {shown(value)}; accepted: {', '.join(map(repr, accepted))}")
    try:
        return PretrainedConfig(kind, arguments(config))
    except KeyError as error:
        raise UserError(f"config {path}: {error.args[0]} is missing; accepted: a {kind} config with it") from error
    except _Refused as error:
        raise UserError(f"config {path}: {error}") from error


class _Refused(Exception):
    """What our models do not compute."""


def _bert(config: Config) -> dict[str, Any]:
    return dict(
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        max_length=config["max_position_embeddings"],
        mlp_dim=config["intermediate_size"],
        token_types=config["type_vocab_size"],
        norm_epsilon=config["layer_norm_eps"],
        dropout=config.get("hidden_dropout_prob", 0.1),
    )


def _gpt2(config: Config) -> dict[str, Any]:
    return dict(
        vocab_size=config["vocab_size"],
        dim=config["n_embd"],
        layers=config["n_layer"],
        heads=config["n_head"],
        max_length=config["n_positions"],
        mlp_dim=config.get("n_inner"),
        norm_epsilon=config["layer_norm_epsilon"],
        tied=config.get("tie_word_embeddings", True),
        dropout=config.get("resid_pdrop", 0.1),
    )


def _llama(config: Config) -> dict[str, Any]:
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    if (config.get("head_dim") or dim // heads) * heads != dim:
        raise _Refused(
            f"head_dim is {config['head_dim']}; accepted: hidden_size / num_attention_heads = {dim // heads}"
        )
    # Files of transformers 5 and later have `rope_parameters`, older ones `rope_theta` and `rope_scaling`.
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    scaling = config.get("rope_scaling") or rope
    if (rope_type := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
        raise _Refused(f"rope_type is {shown(rope_type)}; accepted: 'default'")
    return dict(
        vocab_size=config["vocab_size"],
        dim=dim,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        max_length=config["max_position_embeddings"],
        mlp_dim=config["intermediate_size"],
        norm="rmsnorm",
        norm_epsilon=config["rms_norm_eps"],
        mlp="swiglu",
        positions="rope",
        rope_theta=float(rope["rope_theta"]),
        bias=False,
        tied=config.get("tie_word_embeddings", False),
    )


# For each kind: what a key may say, its default first, and the function of the rest.
_KINDS: Mapping[str, tuple[Mapping[str, tuple[Any, ...]], Callable[[Config], dict[str, Any]]]] = {
    "bert": (
        {"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,)},
        _bert,
    ),
    "gpt2": (
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        _gpt2,
    ),
    "llama": (
        {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        _llama,
    ),
}
