"""Weights in the files of Hugging Face: read into a model or into the shards of a training state, and written back."""

from zerojax.weights.config import PretrainedConfig as PretrainedConfig
from zerojax.weights.config import from_config as from_config
from zerojax.weights.loading import load_weights as load_weights
from zerojax.weights.saving import save_weights as save_weights
from zerojax.weights.tokenizer import read_tokenizer as read_tokenizer
