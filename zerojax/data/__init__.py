"""Texts, labelled sentences and images: deterministic batches for any number of processes, and what to compare with."""

from zerojax.data.arrays import ArrayDataset as ArrayDataset
from zerojax.data.arrays import batches_in_order as batches_in_order
from zerojax.data.augmentation import Augmented as Augmented
from zerojax.data.augmentation import RandomShift as RandomShift
from zerojax.data.baselines import Baselines as Baselines
from zerojax.data.baselines import bits_per_byte as bits_per_byte
from zerojax.data.baselines import entropy_baselines as entropy_baselines
from zerojax.data.evaluation import EvaluationBatches as EvaluationBatches
from zerojax.data.evaluation import evaluation_batches as evaluation_batches
from zerojax.data.images import mnist_images as mnist_images
from zerojax.data.loading import Loader as Loader
from zerojax.data.loading import loader as loader
from zerojax.data.sentences import sentence_dataset as sentence_dataset
from zerojax.data.snippets import Snippets as Snippets
from zerojax.data.snippets import movie_snippets as movie_snippets
from zerojax.data.texts import Text as Text
from zerojax.data.texts import read_text as read_text
from zerojax.data.tokenizers import Tokenizer as Tokenizer
from zerojax.data.tokenizers import make_tokenizer as make_tokenizer
from zerojax.data.windows import TextDataset as TextDataset
from zerojax.data.windows import text_dataset as text_dataset
