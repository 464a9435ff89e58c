"""`zero_optimization`: the stage, and what DeepSpeed tunes around it."""

import sys

from zerojax.config.deepspeed.keys.key import (
    ANYTHING,
    COUNT,
    FLAG,
    INTEGER,
    NUMBER,
    TEXT,
    Key,
    Status,
    choice,
    honoured,
    needless,
    old_name,
    optional,
    parts,
    refused,
    section,
)

_COMPILED = "XLA schedules the collectives of the compiled step"
_STAGE3 = "XLA schedules the gathers of stage 3, and frees what was gathered after its use"
_LOADING = "a checkpoint loads at any stage, precision and number of devices"
_EAGER = "there are no module hooks: a parameter is gathered where the traced model uses it"
_ZENFLOW = "the update is computed on the device: offload_optimizer alone keeps its state elsewhere"
_QUANTISED = (
    'collectives carry the compute dtype: set `"bf16": {"enabled": true}`, or mics_shard_size for slow networks'
)
_PINNED = "host memory that a state lies in is always pinned"
_FILES = "at most three turns of the update are in memory: one is read, one computed, one written"
_NO_NVME = "parameters lie in no files"
_COPIES = "XLA schedules the copies, and the update is computed on the device"
_ALL_OFFLOADED = "all of the optimizer's state is in one place, and less on the device than asked for"
_DEVICE = optional(choice("none", "cpu", "nvme"))

_GATHER_ON_SAVE = needless(
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    FLAG,
    False,
    "`zero.gather` gives the whole model at any stage",
    auto=True,
)

_STAGE_3: tuple[Key, ...] = (
    honoured(
        "zero_optimization.stage3_param_persistence_threshold",
        COUNT,
        100_000,
        "`Zero.min_shard_size` at stage 3: parameters with fewer elements stay whole, their optimizer states too; "
        "unless it is given, `Zero` keeps its own default of 1024",
        auto=True,
    ),
    refused(
        "zero_optimization.stage3_model_persistence_threshold",
        COUNT,
        sys.maxsize,
        "lower stage3_param_persistence_threshold instead",
    ),
    needless("zero_optimization.stage3_prefetch_bucket_size", COUNT, 50_000_000, _STAGE3, auto=True),
    needless("zero_optimization.stage3_max_live_parameters", COUNT, 1_000_000_000, _STAGE3),
    needless("zero_optimization.stage3_max_reuse_distance", COUNT, 1_000_000_000, _STAGE3),
    needless("zero_optimization.stage3_use_all_reduce_for_fetch_params", FLAG, False, _STAGE3),
    needless("zero_optimization.stage3_allgather_sequential", FLAG, False, _STAGE3),
    needless("zero_optimization.stage3_module_granularity_threshold", COUNT, 0, _EAGER),
    needless("zero_optimization.stage3_partition_stream_chunk_size", COUNT, 0, "parameters are born in their shards"),
    _GATHER_ON_SAVE,
)
_OTHER_NAMES = tuple(old_name(key.path.replace("stage3_", ""), key) for key in _STAGE_3)

ZERO: tuple[Key, ...] = (
    *section(
        "zero_optimization",
        "`zerojax.Zero`",
        honoured("stage", choice(0, 1, 2, 3), 0, "`Zero.stage`"),
        honoured(
            "mics_shard_size",
            INTEGER,
            -1,
            '`Zero.mesh`: partitions over so many neighbouring devices on "data", copies of them on "replica"',
        ),
        needless("contiguous_gradients", FLAG, True, "XLA allocates the gradients of the compiled step"),
        needless("reduce_scatter", FLAG, True, "the stage says which collective reduces a gradient"),
        needless("reduce_bucket_size", COUNT, 500_000_000, _COMPILED, auto=True),
        needless("allgather_partitions", FLAG, True, _COMPILED),
        needless("allgather_bucket_size", COUNT, 500_000_000, _COMPILED),
        needless("use_multi_rank_bucket_allreduce", FLAG, True, _COMPILED),
        needless("overlap_comm", optional(FLAG), None, _COMPILED),
        needless("round_robin_gradients", FLAG, False, _COMPILED),
        needless("sub_group_size", COUNT, 1_000_000_000, "the update is compiled whole, every device on its shards"),
        needless("load_from_fp32_weights", FLAG, True, _LOADING),
        needless("elastic_checkpoint", FLAG, False, _LOADING),
        needless("pipeline_loading_checkpoint", FLAG, False, _LOADING),
        needless(
            "ignore_unused_parameters", FLAG, True, "a parameter that the loss does not use has a gradient of zero"
        ),
        needless("legacy_stage1", FLAG, False, "there is one stage 1"),
        needless("memory_efficient_linear", FLAG, True, _EAGER),
        needless("override_module_apply", FLAG, True, _EAGER),
        needless("log_trace_cache_warnings", FLAG, False, _EAGER),
        needless("enable_sanity_checks", FLAG, False, "shapes and placements are checked when the step is traced"),
        needless("save_muon_momentum_buffer_in_memory", FLAG, False, _ALL_OFFLOADED),
        needless("compute_grad_norm", FLAG, True, "the step's metrics always hold the norm"),
        *section(
            "leaf_module",
            "",
            *parts(Status.NEEDLESS, _EAGER, classes=[], names=[], name_suffixes=[]),
        ),
        *section(
            "offload_param",
            "",
            honoured(
                "device",
                _DEVICE,
                "none",
                '"cpu" at stage 3: "params" in `Zero.offload`, which are the fp32 master parameters; "nvme" is refused',
                auto=True,
            ),
            *parts(
                Status.NEEDLESS,
                _NO_NVME,
                nvme_path=None,
                buffer_count=5,
                buffer_size=100_000_000,
                max_in_cpu=1_000_000_000,
            ),
            needless("pin_memory", FLAG, True, _PINNED),
        ),
        *section(
            "offload_optimizer",
            "",
            honoured(
                "device",
                _DEVICE,
                "none",
                '"cpu" at stages 1 to 3: "optimizer" in `Zero.offload`; "nvme": with `Zero.offload_path` too; the fp32 '
                "master parameters go with offload_param",
                auto=True,
            ),
            honoured("nvme_path", optional(TEXT), None, '`Zero.offload_path` where the device is "nvme"'),
            *parts(
                Status.NEEDLESS,
                _FILES,
                buffer_count=4,
                pipeline=False,
                pipeline_read=False,
                pipeline_write=False,
            ),
            needless("pin_memory", FLAG, True, _PINNED),
            needless("ratio", NUMBER, 1.0, _ALL_OFFLOADED),
            *parts(Status.NEEDLESS, _COPIES, fast_init=False, super_offload=False, cpuadam_cores_perc=0.8),
        ),
        honoured(
            "cpu_offload",
            optional(FLAG),
            None,
            'an old word for "cpu" as the device of offload_optimizer',
            excludes=("zero_optimization.offload_optimizer",),
        ),
        honoured(
            "cpu_offload_param",
            optional(FLAG),
            None,
            'an old word for "cpu" as the device of offload_param',
            excludes=("zero_optimization.offload_param",),
        ),
        needless(
            "cpu_offload_use_pin_memory",
            optional(FLAG),
            None,
            _PINNED,
            excludes=("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
        ),
        refused(
            "zero_hpz_partition_size",
            INTEGER,
            1,
            "set mics_shard_size, which keeps partitions within groups of neighbouring devices",
            harmless=(0,),
        ),
        refused("zero_quantized_weights", FLAG, False, _QUANTISED),
        refused("zero_quantized_gradients", FLAG, False, _QUANTISED),
        refused(
            "zero_quantized_nontrainable_weights",
            FLAG,
            False,
            "keep frozen parameters in bfloat16 outside of the trained tree",
        ),
        *section(
            "zeropp_loco_param",
            _QUANTISED,
            *parts(Status.REFUSED, "read only with quantised gradients", err_beta=0.8, reset_T=1024),
            status=Status.REFUSED,
        ),
        needless("mics_hierarchical_params_gather", FLAG, False, _COMPILED),
        *section(
            "zenflow",
            _ZENFLOW,
            *parts(
                Status.REFUSED,
                "a part of ZenFlow",
                topk_ratio=0.1,
                select_strategy="auto",
                overlap_step=False,
                offload=False,
                auto_ratio=0.99,
                full_warm_up_rounds=0,
                pt_reserved_cores_perc=0.5,
                steps_per_epoch=None,
            ),
            refused("select_interval", ANYTHING, "auto", "a part of ZenFlow"),
            refused("update_interval", ANYTHING, "auto", "a part of ZenFlow"),
            status=Status.REFUSED,
        ),
    ),
    *_STAGE_3,
    *_OTHER_NAMES,
    old_name("zero_optimization.stage3_gather_fp16_weights_on_model_save", _GATHER_ON_SAVE),
)

AIO: tuple[Key, ...] = section(
    "aio",
    "",
    *parts(
        Status.NEEDLESS,
        _FILES,
        block_size=1_048_576,
        queue_depth=8,
        intra_op_parallelism=1,
        thread_count=1,
        single_submit=False,
        overlap_events=True,
        use_gds=False,
    ),
)
