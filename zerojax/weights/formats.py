"""Where each parameter of a model is in a file: the names that Hugging Face gives to BERT, GPT-2 and Llama."""

import dataclasses
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from flax import nnx

from zerojax.errors import UserError
from zerojax.models.bert import BERT
from zerojax.models.gpt import GPT
from zerojax.models.transformer import Attention
from zerojax.weights.transforms import Heads, Joined, JoinedHeads, Same, Transform

LAYER = "{layer}"
TRANSPOSED = Joined()


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of parameter.

    Attributes:
        parameter: its name in a tree of parameters, with ``{layer}`` in the place of a block's number.
        tensors: the names of the tensors that make it up, complete with the format's prefix.
        transform: how they do.
    """

    parameter: str
    tensors: tuple[str, ...]
    transform: Transform


@dataclasses.dataclass(frozen=True)
class Format:
    """The names in a file of one kind.

    Attributes:
        prefix: before the names of the base model's tensors; files of the base model alone leave it out.
        heads: how the names begin that never have the prefix.
        keeps_prefix: whether a file that is written has the prefix.
        rules: one for each kind of parameter.
        buffers: patterns of tensors that hold no parameters.
        copies: tensors that a file may repeat under a second name, by that name.
        renamed: ends of names that older files have, with those of today.
    """

    prefix: str
    heads: tuple[str, ...]
    keeps_prefix: bool
    rules: tuple[Rule, ...]
    buffers: tuple[str, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def complete(self, name: str) -> str:
        """A file's name for a tensor as the rules have it."""
        for old, new in self.renamed.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        return name if name.startswith((self.prefix, *self.heads)) else self.prefix + name

    def written(self, name: str) -> str:
        """The name in a new file of a tensor of the rules."""
        return name if self.keeps_prefix else name.removeprefix(self.prefix)

    def is_buffer(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.buffers)


def format_of(kind: str, model: Any) -> Format:
    """The format ``kind`` of the weights of ``model``, whose arrays may be abstract.

    Raises:
        UserError: there is no such kind, or it is not one of such models.
    """
    if kind not in FORMATS:
        raise UserError(f"kind={kind!r}: must be one of {', '.join(map(repr, FORMATS))}")
    model_type, make = FORMATS[kind]
    if not isinstance(model, model_type):
        raise UserError(f"kind={kind!r} is of {model_type.__name__} models: the model is a {type(model).__name__}")
    return make(model)


def bert(model: BERT) -> Format:
    """``BertModel``; with a classifier ``BertForSequenceClassification``, with ``masked_lm`` ``BertForMaskedLM``."""
    ours, theirs = f"blocks/{LAYER}", f"bert.encoder.layer.{LAYER}"
    projections = ("query", "key", "value")
    rules = (
        Rule("embedding", ("bert.embeddings.word_embeddings.weight",), Same()),
        Rule("positions", ("bert.embeddings.position_embeddings.weight",), Same()),
        Rule("token_types", ("bert.embeddings.token_type_embeddings.weight",), Same()),
        *_norm("embedding_norm", "bert.embeddings.LayerNorm"),
        *(
            Rule(
                f"{ours}/attention/qkv/{end}",
                tuple(f"{theirs}.attention.self.{name}.{their_end}" for name in projections),
                _heads(model),
            )
            for end, their_end in (("kernel", "weight"), ("bias", "bias"))
        ),
        *_linear(f"{ours}/attention/out", f"{theirs}.attention.output.dense"),
        *_norm(f"{ours}/attention_norm", f"{theirs}.attention.output.LayerNorm"),
        *_linear(f"{ours}/mlp/up", f"{theirs}.intermediate.dense"),
        *_linear(f"{ours}/mlp/down", f"{theirs}.output.dense"),
        *_norm(f"{ours}/mlp_norm", f"{theirs}.output.LayerNorm"),
        *_linear("pooler", "bert.pooler.dense"),
        *_linear("head", "classifier"),
        *_linear("masked_lm/dense", "cls.predictions.transform.dense"),
        *_norm("masked_lm/norm", "cls.predictions.transform.LayerNorm"),
        Rule("masked_lm/bias", ("cls.predictions.bias",), Same()),
    )
    return Format(
        prefix="bert.",
        heads=("classifier.", "cls."),
        keeps_prefix=model.head is not None or model.masked_lm is not None,
        rules=rules,
        buffers=("bert.embeddings.position_ids",),
        copies={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    )


def gpt2(model: GPT) -> Format:
    """``GPT2LMHeadModel``. Its layers but the head are ``Conv1D``, whose kernels are (inputs, outputs) as ours."""
    heads = _heads(model)
    if heads.group != 1:
        raise UserError(f"kind='gpt2' of a model with {heads.kv_heads} key-value heads: GPT-2 has one for each query")
    ours, theirs = f"blocks/{LAYER}", f"transformer.h.{LAYER}"
    rules = (
        Rule("embedding", ("transformer.wte.weight",), Same()),
        Rule("positions", ("transformer.wpe.weight",), Same()),
        *_norm(f"{ours}/attention_norm", f"{theirs}.ln_1"),
        *_linear(f"{ours}/attention/qkv", f"{theirs}.attn.c_attn", JoinedHeads(heads)),
        *_linear(f"{ours}/attention/out", f"{theirs}.attn.c_proj", Same()),
        *_norm(f"{ours}/mlp_norm", f"{theirs}.ln_2"),
        *_linear(f"{ours}/mlp/up", f"{theirs}.mlp.c_fc", Same()),
        *_linear(f"{ours}/mlp/down", f"{theirs}.mlp.c_proj", Same()),
        *_norm("final_norm", "transformer.ln_f"),
        Rule("head/kernel", ("lm_head.weight",), TRANSPOSED),
    )
    return Format(
        prefix="transformer.",
        heads=("lm_head.",),
        keeps_prefix=True,
        rules=rules,
        buffers=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
        copies={"lm_head.weight": "transformer.wte.weight"},
    )


def llama(model: GPT) -> Format:
    """``LlamaForCausalLM``. Its rotary positions pair the halves of a head, as ours do."""
    ours, theirs = f"blocks/{LAYER}", f"model.layers.{LAYER}"
    projections = tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv")
    rules = (
        Rule("embedding", ("model.embed_tokens.weight",), Same()),
        Rule(f"{ours}/attention_norm/scale", (f"{theirs}.input_layernorm.weight",), Same()),
        Rule(f"{ours}/attention/qkv/kernel", projections, _heads(model)),
        Rule(f"{ours}/attention/out/kernel", (f"{theirs}.self_attn.o_proj.weight",), TRANSPOSED),
        Rule(f"{ours}/mlp_norm/scale", (f"{theirs}.post_attention_layernorm.weight",), Same()),
        Rule(f"{ours}/mlp/up/kernel", (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight"), Joined(2)),
        Rule(f"{ours}/mlp/down/kernel", (f"{theirs}.mlp.down_proj.weight",), TRANSPOSED),
        Rule("final_norm/scale", ("model.norm.weight",), Same()),
        Rule("head/kernel", ("lm_head.weight",), TRANSPOSED),
    )
    return Format(
        prefix="model.",
        heads=("lm_head.",),
        keeps_prefix=True,
        rules=rules,
        buffers=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    )


FORMATS: Mapping[str, tuple[type[nnx.Module], Callable[[Any], Format]]] = {
    "bert": (BERT, bert),
    "gpt2": (GPT, gpt2),
    "llama": (GPT, llama),
}


def _linear(ours: str, theirs: str, transform: Transform = TRANSPOSED) -> tuple[Rule, Rule]:
    return (
        Rule(f"{ours}/kernel", (f"{theirs}.weight",), transform),
        Rule(f"{ours}/bias", (f"{theirs}.bias",), transform),
    )


def _norm(ours: str, theirs: str) -> tuple[Rule, Rule]:
    return Rule(f"{ours}/scale", (f"{theirs}.weight",), Same()), Rule(f"{ours}/bias", (f"{theirs}.bias",), Same())


def _heads(model: BERT | GPT) -> Heads:
    block = model.blocks[0] if isinstance(model.blocks, nnx.List) else model.blocks
    attention: Attention = block.attention
    return Heads(attention.kv_heads, attention.group)
