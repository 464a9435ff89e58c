"""Reference models that a config can name. They know nothing of ZeRO."""

from zerojax.models.bert import BERT as BERT
from zerojax.models.chunked import chunked_cross_entropy as chunked_cross_entropy
from zerojax.models.chunked import tiled as tiled
from zerojax.models.classification import check_labels as check_labels
from zerojax.models.classification import image_classification_loss as image_classification_loss
from zerojax.models.gpt import GPT as GPT
from zerojax.models.gpt import next_token_loss as next_token_loss
from zerojax.models.losses import cross_entropy as cross_entropy
from zerojax.models.resnet import ResNet as ResNet
from zerojax.models.rnn import RNN as RNN
from zerojax.models.vit import ViT as ViT
