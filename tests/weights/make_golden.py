"""Makes the files tests/golden/weights_*: tiny models of PyTorch and transformers, with what they compute.

    python tests/weights/make_golden.py

writes new weights. Wants the packages torch, transformers and safetensors. Each case is three files: the weights, the
config.json, and an .npz of inputs and outputs; the cases of PyTorch's own modules are one .npz.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
VOCAB = 48

BERT = dict(
    vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
    max_position_embeddings=16, type_vocab_size=2, attn_implementation="eager",
)  # fmt: skip
CASES = {
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, n_positions=16),
    ),
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
            intermediate_size=40, max_position_embeddings=16, rms_norm_eps=1e-6, tie_word_embeddings=False,
        ),
    ),
    "bert_classes": (transformers.BertForSequenceClassification, transformers.BertConfig(**BERT, num_labels=3)),
    "bert_masked": (transformers.BertForMaskedLM, transformers.BertConfig(**BERT)),
    "vit": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, image_size=8,
            patch_size=4, num_channels=3, num_labels=5,
        ),
    ),
}  # fmt: skip


def inputs(name):
    rng = np.random.default_rng(1)
    if name == "vit":
        return {"images": rng.normal(size=(3, 8, 8, 3)).astype(np.float32)}
    tokens = {"tokens": rng.integers(0, VOCAB, (3, 12))}
    if name.startswith("bert"):
        tokens["mask"] = (np.arange(12) < np.array([[12], [7], [3]])).astype(np.int64)
        tokens["token_types"] = (np.arange(12) >= np.array([[5], [2], [1]])).astype(np.int64)
    return tokens


def logits(model, given):
    given = {name: torch.from_numpy(x) for name, x in given.items()}
    with torch.no_grad():
        if "images" in given:
            return model(pixel_values=given["images"].permute(0, 3, 1, 2)).logits.numpy()
        extra = dict(attention_mask=given["mask"], token_type_ids=given["token_types"]) if "mask" in given else {}
        return model(input_ids=given["tokens"], **extra).logits.numpy()


def spread(module):
    """No parameter stays at what a wrong mapping would give too: biases of 0 and scales of 1."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.3) + is_scale)


def make_transformer(name):
    kind, config = CASES[name]
    model = kind(config).eval()
    spread(model)
    folder = GOLDEN / "made"
    model.save_pretrained(folder)
    shutil.move(folder / "model.safetensors", GOLDEN / f"weights_{name}.safetensors")
    shutil.move(folder / "config.json", GOLDEN / f"weights_{name}.json")
    shutil.rmtree(folder)
    given = inputs(name)
    np.savez_compressed(GOLDEN / f"weights_{name}.npz", **given, logits=logits(model, given))


def make_recurrent():
    arrays = {"x": np.random.default_rng(2).normal(size=(3, 7, 6)).astype(np.float32)}
    for name, kind in (("lstm", nn.LSTM), ("gru", nn.GRU)):
        layer = kind(6, 6, batch_first=True)
        spread(layer)
        with torch.no_grad():
            y, end = layer(torch.from_numpy(arrays["x"]))
        end = end if name == "lstm" else (end,)
        parameters = {key.removesuffix("_l0"): x.detach().numpy() for key, x in layer.named_parameters()}
        arrays |= {f"{name}_{key}": x for key, x in parameters.items()} | {f"{name}_y": y.numpy()}
        arrays |= {f"{name}_end{i}": x[0].numpy() for i, x in enumerate(end)}
    np.savez_compressed(GOLDEN / "weights_rnn.npz", **arrays)


class Normed(nn.Module):
    def __init__(self, inputs, outputs, size, stride):
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, size, stride, (size - 1) // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x):
        return self.norm(self.convolution(x))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first, self.second = Normed(inputs, outputs, 3, stride), Normed(outputs, outputs, 3, 1)
        self.shortcut = Normed(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = Normed(3, 4, 3, 1), nn.Linear(6, 5)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 6, 2), Block(6, 6, 1))

    def forward(self, x):
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


def make_resnet():
    model = ResNet().train()
    spread(model)
    images = np.random.default_rng(3).normal(size=(4, 8, 8, 3)).astype(np.float32)
    arrays = {f"parameter {name}": x.detach().numpy().copy() for name, x in model.named_parameters()}
    with torch.no_grad():
        x = torch.from_numpy(images).permute(0, 3, 1, 2)
        arrays |= {"images": images, "training": model(x).numpy()}
        arrays |= {f"buffer {name}": x.numpy().copy() for name, x in model.named_buffers() if "tracked" not in name}
        arrays["evaluation"] = model.eval()(x).numpy()
    np.savez_compressed(GOLDEN / "weights_resnet.npz", **arrays)


if __name__ == "__main__":
    torch.manual_seed(0)
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        make_transformer(case)
    make_recurrent()
    make_resnet()
    made = {path.name: path.stat().st_size for path in sorted(GOLDEN.glob("weights_*"))}
    json.dump(made, sys.stdout, indent=2)
