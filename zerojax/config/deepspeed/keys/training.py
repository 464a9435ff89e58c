"""Batch, optimizer, scheduler and gradients: the keys at the top of a configuration."""

from zerojax.config.deepspeed.keys.key import (
    AMOUNT,
    ANYTHING,
    DTYPE,
    FLAG,
    INTEGER,
    LIST,
    NUMBER,
    TEXT,
    Key,
    choice,
    honoured,
    needless,
    old_name,
    optional,
    refused,
    section,
)

BATCH: tuple[Key, ...] = (
    honoured(
        "train_batch_size",
        optional(INTEGER),
        None,
        "rows of a step on all devices; two of the three batch sizes give the third",
        auto=True,
    ),
    honoured(
        "train_micro_batch_size_per_gpu",
        optional(INTEGER),
        None,
        "rows that a device computes at once",
        auto=True,
    ),
    honoured("gradient_accumulation_steps", optional(INTEGER), None, "`Zero.micro_batches`", auto=True),
    refused(
        "managed_gradient_accumulation",
        FLAG,
        True,
        "the engine counts micro-batches itself: call `engine.step()` after each of them",
    ),
    honoured("dataloader_drop_last", FLAG, False, "whether a last batch that is not full is left out"),
)

OPTIMIZER: tuple[Key, ...] = (
    *section(
        "optimizer",
        "`zerojax.optim.by_name`",
        honoured("type", TEXT, None, "the optimizer's name"),
        *section(
            "params",
            "the optimizer's own parameters, under DeepSpeed's names",
            honoured("lr", NUMBER, None, "the learning rate", auto=True),
            honoured("betas", LIST, None, "decay rates of the moments", auto=True),
            honoured("eps", NUMBER, None, "term of the denominator", auto=True),
            honoured("weight_decay", NUMBER, None, "weight decay", auto=True),
            refused("max_grad_norm", NUMBER, None, "set `gradient_clipping`"),
            open=True,
        ),
        needless("legacy_fusion", FLAG, False, "XLA fuses the update"),
    ),
    *section(
        "scheduler",
        "`zerojax.optim.schedule_by_name`",
        honoured("type", TEXT, None, "the schedule's name"),
        *section(
            "params",
            "the schedule's own parameters, under DeepSpeed's names",
            honoured("warmup_min_lr", ANYTHING, None, "learning rate that the warm-up begins with", auto=True),
            honoured("warmup_max_lr", ANYTHING, None, "learning rate that the warm-up ends with", auto=True),
            honoured("warmup_num_steps", ANYTHING, None, "steps of the warm-up", auto=True),
            honoured("total_num_steps", ANYTHING, None, "steps of the whole run", auto=True),
            open=True,
        ),
    ),
    needless("zero_allow_untested_optimizer", FLAG, False, "any optax transformation works at any stage"),
    needless("zero_force_ds_cpu_optimizer", FLAG, True, "the update runs where the shards are"),
)

_SEQUENCE_DTYPE = needless(
    "seq_parallel_communication_data_type", DTYPE, "fp32", "gradients have no sequence-parallel sum"
)

GRADIENTS: tuple[Key, ...] = (
    honoured(
        "gradient_clipping",
        AMOUNT,
        1.0,
        "`Zero.clip_norm`; 0 turns it off, and the norm that is reported is the one before clipping",
        auto=True,
    ),
    honoured(
        "communication_data_type",
        DTYPE,
        None,
        "`Precision.reduce`, the dtype in which gradients are summed over devices",
    ),
    _SEQUENCE_DTYPE,
    old_name("seq_parallel_comm_data_type", _SEQUENCE_DTYPE),
    needless(
        "prescale_gradients", FLAG, False, "the mean is the same; `communication_data_type` says in what it is summed"
    ),
    needless(
        "gradient_predivide_factor",
        NUMBER,
        1.0,
        "the mean is the same; `communication_data_type` says in what it is summed",
    ),
    refused(
        "gradient_allreduce_op",
        choice("mean", "sum"),
        "mean",
        "gradients are averaged over devices: return the loss times the number of devices for a sum",
    ),
    refused(
        "sparse_gradients",
        FLAG,
        False,
        "gradients of embeddings are dense, and in shards from stage 1 on: leave it out",
    ),
    needless("disable_allgather", FLAG, False, "XLA chooses how an all-gather is carried out"),
)
