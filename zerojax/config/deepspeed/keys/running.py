"""Logs, timers, checkpoints and activation checkpointing: what happens around a training step."""

from zerojax.config.deepspeed.keys.key import (
    ANYTHING,
    COUNT,
    FLAG,
    INTERVAL,
    NUMBER,
    TEXT,
    Key,
    Status,
    choice,
    feature,
    honoured,
    needless,
    optional,
    parts,
    refused,
    section,
)

_OTHER_MONITORS = "set `tensorboard` or `csv_monitor`"
_REMAT = "`Zero.remat` and the model say what is computed again; `Remat.every` chooses every n-th block"
_ON_SAVE = "every process writes the shards it holds"

# Where the figures go.
MONITORS: tuple[Key, ...] = (
    *(
        key
        for name, words in {"tensorboard": "TensorBoard events", "csv_monitor": "CSV files"}.items()
        for key in section(
            name,
            f"figures of the run as {words}",
            honoured("enabled", FLAG, False, f"whether {words} are written"),
            honoured("output_path", TEXT, "", "the directory they go to"),
            honoured("job_name", TEXT, "DeepSpeedJobName", "a directory within it"),
        )
    ),
    *feature("wandb", _OTHER_MONITORS, group=None, team=None, project="deepspeed"),
    *feature(
        "comet",
        _OTHER_MONITORS,
        samples_log_interval=100,
        project=None,
        workspace=None,
        api_key=None,
        experiment_name=None,
        experiment_key=None,
        online=None,
        mode=None,
    ),
    *feature("trackio", _OTHER_MONITORS, project="deepspeed"),
)

DIAGNOSTICS: tuple[Key, ...] = (
    honoured(
        "steps_per_print", INTERVAL, None, "steps between lines that tell the step, the learning rate and the speed"
    ),
    honoured("wall_clock_breakdown", FLAG, False, "whether the times of a step are told"),
    needless("memory_breakdown", FLAG, False, "not printed: `print(zero.report(state, step, batch))` tells it"),
    needless("dump_state", FLAG, False, "not printed: `print(engine.config)` tells it"),
    needless("log_level", ANYTHING, None, "set the level of Python's `logging`"),
    needless("disable_python_gc", FLAG, False, "call `gc.disable()`"),
    needless("vocabulary_size", optional(COUNT), None, "XLA pads what a matrix unit needs"),
    needless("graph_harvesting", FLAG, False, "the step is one compiled program"),
    *section(
        "timers",
        "",
        *section(
            "throughput",
            "",
            *parts(
                Status.NEEDLESS, "steps run ahead of the host, which waits for none", enabled=True, synchronized=True
            ),
        ),
    ),
    *feature(
        "flops_profiler",
        "trace with `jax.profiler`; `step.lower(state, batch).compile().cost_analysis()` counts operations",
        recompute_fwd_factor=0.0,
        profile_step=1,
        module_depth=-1,
        top_modules=1,
        detailed=True,
        output_file=None,
    ),
    *feature(
        "comms_logger",
        "`zero.report(state, step, batch)` lists every collective with its bytes",
        verbose=False,
        debug=False,
        prof_all=True,
        prof_ops=[],
    ),
)

CHECKPOINTS: tuple[Key, ...] = (
    *section(
        "checkpoint",
        "`engine.save_checkpoint`",
        honoured(
            "tag_validation",
            choice("WARN", "IGNORE", "FAIL"),
            "WARN",
            "what happens where processes give a checkpoint different names",
        ),
        needless(
            "load_universal",
            FLAG,
            False,
            "every checkpoint loads at any stage, precision and number of devices",
        ),
        refused(
            "use_node_local_storage",
            FLAG,
            False,
            "save to a directory that all processes see",
        ),
        *section("parallel_write", "", needless("pipeline_stage", FLAG, False, _ON_SAVE)),
        *parts(Status.NEEDLESS, _ON_SAVE, checkpoint_serialization=True),
        *section(
            "writer",
            "",
            *parts(
                Status.NEEDLESS,
                _ON_SAVE,
                type="FAST",
                decoupled=False,
                io_buffer_size=64 * 1024**2,
                io_buffer_double=True,
                io_multiplier=1,
                show_statistics=False,
                data_parallel=None,
            ),
        ),
    ),
    *feature(
        "nebula",
        "`engine.save_checkpoint` writes to a file system",
        persistent_storage_path=None,
        persistent_time_interval=100,
        num_of_version_in_retention=2,
        enable_nebula_load=True,
        nebula_load_path=None,
    ),
    *section(
        "datastates_ckpt",
        "`engine.save_checkpoint` writes to a file system",
        status=Status.REFUSED,
        open=True,
    ),
)

ACTIVATIONS: tuple[Key, ...] = section(
    "activation_checkpointing",
    "",
    needless("partition_activations", FLAG, False, "a device holds the activations of its own rows alone"),
    honoured(
        "cpu_checkpointing",
        FLAG,
        False,
        '`Zero.remat = "offload"`: what the backward pass needs of matrix products waits in the host\'s memory',
    ),
    needless("contiguous_memory_optimization", FLAG, False, "XLA allocates the activations of the compiled step"),
    needless("synchronize_checkpoint_boundary", FLAG, False, "the step is one compiled program"),
    needless("number_checkpoints", optional(NUMBER), None, _REMAT),
    needless("profile", FLAG, False, "trace with `jax.profiler`"),
)
