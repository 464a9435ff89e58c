"""Every constructor and function that a configuration may name: the one place where the library and gin meet."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gin
import optax
from optax import contrib

import zerojax
from zerojax import data, optim, trainer
from zerojax.models import bert, classification, gpt, resnet, rnn, vit

OPTIMIZERS = (
    "adabelief adadelta adafactor adagrad adam adamax adamw adan amsgrad fromage lamb lars lion nadam nadamw noisy_sgd "
    "novograd optimistic_adam_v2 radam rmsprop rprop sgd sign_sgd sm3 yogi"
).split()
CONTRIB_OPTIMIZERS = "ademamix dadapt_adamw muon prodigy schedule_free_adamw sophia".split()
TRANSFORMATIONS = (
    "add_decayed_weights adaptive_grad_clip apply_if_finite centralize clip clip_by_block_rms clip_by_global_norm ema "
    "identity masked multi_transform normalize_by_update_norm scale scale_by_adam scale_by_learning_rate scale_by_lion "
    "scale_by_rms scale_by_schedule scale_by_trust_ratio set_to_zero trace zero_nans"
).split()
SCHEDULES = (
    "constant_schedule cosine_decay_schedule cosine_onecycle_schedule exponential_decay join_schedules "
    "linear_onecycle_schedule linear_schedule piecewise_constant_schedule polynomial_schedule sgdr_schedule "
    "warmup_constant_schedule warmup_cosine_decay_schedule warmup_exponential_decay_schedule"
).split()

DEEPSPEED_OPTIMIZERS = "adam adamw lamb lion adagrad sgd muon by_name grouped".split()
ROUNDINGS = "stochastic_rounding kahan master_weights narrow_state".split()
DEEPSPEED_SCHEDULES = "warmup_lr warmup_decay_lr warmup_cosine_lr one_cycle one_cycle_momentum lr_range_test".split()


def chain(transforms: Sequence[optax.GradientTransformation]) -> optax.GradientTransformation:
    """``optax.chain(*transforms)``: a configuration names its arguments, so they come as one list."""
    return optax.chain(*transforms)


def constructors() -> dict[str, Callable[..., Any]]:
    """What a configuration may name, by its complete name; the end of a name that is unique stands for it."""
    return {
        "zerojax.Zero": zerojax.Zero,
        "zerojax.LossScale": zerojax.LossScale,
        "zerojax.Precision": zerojax.Precision,
        "zerojax.Remat": zerojax.Remat,
        "zerojax.make_mesh": zerojax.make_mesh,
        "zerojax.trainer.train": trainer.train,
        "zerojax.models.gpt.GPT": gpt.GPT,
        "zerojax.models.gpt.next_token_loss": gpt.next_token_loss,
        "zerojax.models.bert.BERT": bert.BERT,
        "zerojax.models.bert.classification_loss": bert.classification_loss,
        "zerojax.models.bert.masked_lm_loss": bert.masked_lm_loss,
        "zerojax.models.rnn.RNN": rnn.RNN,
        "zerojax.models.resnet.ResNet": resnet.ResNet,
        "zerojax.models.vit.ViT": vit.ViT,
        "zerojax.models.classification.image_classification_loss": classification.image_classification_loss,
        "zerojax.data.text_dataset": data.text_dataset,
        "zerojax.data.read_text": data.read_text,
        "zerojax.data.make_tokenizer": data.make_tokenizer,
        "zerojax.data.loader": data.loader,
        "zerojax.data.evaluation_batches": data.evaluation_batches,
        **{
            f"zerojax.optim.{name}": getattr(optim, name)
            for name in (*DEEPSPEED_OPTIMIZERS, *ROUNDINGS, *DEEPSPEED_SCHEDULES)
        },
        "optax.chain": chain,
        **{f"optax.{name}": getattr(optax, name) for name in (*OPTIMIZERS, *TRANSFORMATIONS, *SCHEDULES)},
        **{f"optax.{name}": getattr(contrib, name) for name in CONTRIB_OPTIMIZERS},
    }


@functools.cache
def register() -> tuple[str, ...]:
    """Makes gin know every constructor, once; returns their complete names."""
    table = constructors()
    for complete, constructor in table.items():
        module, _, name = complete.rpartition(".")
        gin.external_configurable(constructor, name=name, module=module)
    return tuple(table)
