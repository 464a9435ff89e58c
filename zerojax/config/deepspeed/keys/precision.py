"""Precision: the dtypes of a training step and the loss scale."""

from zerojax.config.deepspeed.keys.key import (
    AMOUNT,
    DTYPE,
    FLAG,
    INTEGER,
    LIST,
    NUMBER,
    TEXT,
    Key,
    Status,
    honoured,
    needless,
    old_name,
    parts,
    refused,
    section,
)

_BF16 = section(
    "bf16",
    '`Precision(compute="bfloat16")`: the optimizer\'s states are float32',
    honoured("enabled", FLAG, False, "compute in bfloat16", auto=True),
    honoured(
        "check_grad_overflow",
        FLAG,
        True,
        "`Precision.skip_nonfinite`: a step with a gradient that is not finite is skipped",
    ),
    needless("immediate_grad_update", FLAG, False, "gradients are accumulated where they are reduced"),
    honoured(
        "bf16_master_weights_and_grads",
        FLAG,
        False,
        "`Precision.master` and, unless grad_accum_dtype is given, `Precision.accumulate`",
    ),
    refused(
        "bf16_optimizer_states",
        FLAG,
        False,
        "pass `initialize` an optimizer of optax, whose states take the dtype of the parameters between steps",
    ),
)

PRECISION: tuple[Key, ...] = (
    *section(
        "fp16",
        '`Precision(compute="float16", loss_scale=LossScale(...))`',
        honoured("enabled", FLAG, False, "compute in float16", auto=True),
        refused("auto_cast", FLAG, False, "inputs keep their dtype: cast them in the model"),
        honoured("loss_scale", AMOUNT, 0, "`LossScale.static`; 0 is a dynamic scale"),
        honoured("initial_scale_power", INTEGER, 16, "`LossScale.initial_power`"),
        honoured("loss_scale_window", INTEGER, 1000, "`LossScale.window`"),
        honoured("hysteresis", INTEGER, 2, "`LossScale.hysteresis`"),
        honoured("consecutive_hysteresis", FLAG, False, "`LossScale.consecutive_hysteresis`"),
        honoured("min_loss_scale", NUMBER, 1, "`LossScale.minimum`"),
        refused(
            "fp16_master_weights_and_grads",
            FLAG,
            False,
            "a float16 parameter loses small updates: leave it out, and let stage 1 or more hold float32 in shards",
        ),
        needless("fused_mode", FLAG, True, "XLA fuses the update"),
    ),
    *_BF16,
    *(old_name(key.path.replace("bf16", "bfloat16", 1), key) for key in _BF16),
    *section(
        "data_types",
        "`Precision`",
        honoured(
            "grad_accum_dtype",
            DTYPE,
            None,
            "`Precision.accumulate`; null is float32, where DeepSpeed takes the model's dtype",
        ),
        honoured("param_dtype", DTYPE, None, "has to be the dtype that `fp16` or `bf16` asks for"),
        refused(
            "buffer_dtype", DTYPE, None, "variables that are not parameters keep their dtype: cast them in the model"
        ),
    ),
    *section(
        "torch_autocast",
        "",
        refused(
            "enabled", FLAG, False, 'set `"bf16": {"enabled": true}`; the model may compute parts of itself in float32'
        ),
        *parts(Status.REFUSED, "read only where `torch_autocast.enabled` is true", dtype=None),
        refused("lower_precision_safe_modules", LIST, None, "read only where `torch_autocast.enabled` is true"),
    ),
    *section(
        "amp",
        "",
        refused("enabled", FLAG, False, 'set `"bf16": {"enabled": true}`, or fp16', auto=True),
        refused("opt_level", TEXT, None, "read only where `amp.enabled` is true", auto=True),
        open=True,
    ),
)
