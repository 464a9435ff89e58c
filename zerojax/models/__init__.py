"""Reference models that a config can name. They know nothing of ZeRO."""

from zerojax.models.gpt import GPT as GPT
from zerojax.models.gpt import next_token_loss as next_token_loss
from zerojax.models.losses import cross_entropy as cross_entropy
