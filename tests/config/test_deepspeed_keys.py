"""The table of DeepSpeed's keys: complete, consistent, and the documentation's."""

import pytest

from zerojax.config.deepspeed import markdown_table
from zerojax.config.deepspeed.keys import BY_PATH, KEYS, Status

# What DeepSpeed 0.19.6 reads, by section.
INVENTORY = {
    "": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
        zero_optimization fp16 bf16 bfloat16 data_types torch_autocast amp communication_data_type
        seq_parallel_communication_data_type gradient_clipping prescale_gradients gradient_predivide_factor
        gradient_allreduce_op sparse_gradients disable_allgather optimizer scheduler zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer activation_checkpointing flops_profiler tensorboard csv_monitor wandb comet
        wall_clock_breakdown memory_breakdown dump_state steps_per_print log_level dataloader_drop_last comms_logger
        autotuning elasticity curriculum_learning data_efficiency progressive_layer_drop eigenvalue
        compression_training sparse_attention pipeline expert_parallel tensor_parallel sequence_parallel_size compile
        checkpoint hybrid_engine weight_quantization aio""",
    "zero_optimization": """stage contiguous_gradients reduce_scatter reduce_bucket_size
        use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights
        elastic_checkpoint sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters legacy_stage1
        round_robin_gradients memory_efficient_linear override_module_apply pipeline_loading_checkpoint
        log_trace_cache_warnings enable_sanity_checks leaf_module save_muon_momentum_buffer_in_memory compute_grad_norm
        cpu_offload cpu_offload_param cpu_offload_use_pin_memory stage3_gather_fp16_weights_on_model_save offload_param
        offload_optimizer zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients
        zero_quantized_nontrainable_weights zeropp_loco_param mics_shard_size mics_hierarchical_params_gather
        zenflow""",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """device nvme_path buffer_count pin_memory pipeline_read pipeline_write
        fast_init ratio super_offload cpuadam_cores_perc""",
    "zero_optimization.zeropp_loco_param": "err_beta reset_T",
    "zero_optimization.zenflow": """topk_ratio select_strategy select_interval update_interval overlap_step offload
        auto_ratio full_warm_up_rounds pt_reserved_cores_perc""",
    "aio": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
    "fp16": """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads""",
    "bf16": """enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states""",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "optimizer": "type params",
    "scheduler": "type params",
    "activation_checkpointing": """partition_activations cpu_checkpointing contiguous_memory_optimization
        synchronize_checkpoint_boundary profile number_checkpoints""",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled samples_log_interval",
    "comms_logger": "enabled verbose debug prof_all prof_ops",
    "autotuning": """enabled fast metric start_profile_step end_profile_step num_tuning_micro_batch_sizes tuner_type
        tuner_early_stopping tuner_num_trials arg_mappings overwrite mp_size""",
    "elasticity": """enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_larger_batch
        version ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size""",
    "data_efficiency": "enabled seed data_sampling data_routing",
    "progressive_layer_drop": "enabled theta gamma",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval",
    "tensor_parallel": "autotp_size preset_model partition_config tp_overlap_comm",
    "compile": "deepcompile passes offload_activation offload_opt_states offload_parameters free_activation",
    "checkpoint": """tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization
        writer""",
    "checkpoint.parallel_write": "pipeline_stage",
    "checkpoint.writer": "type decoupled io_buffer_size io_buffer_double data_parallel",
}


@pytest.mark.parametrize("section", INVENTORY)
def test_every_key_is_known(section):
    missing = {name for name in INVENTORY[section].split() if f"{section}.{name}".lstrip(".") not in BY_PATH}
    assert not missing


DEFAULTS = {
    "gradient_clipping": 1.0,
    "zero_optimization.stage": 0,
    "zero_optimization.reduce_bucket_size": 5e8,
    "zero_optimization.allgather_bucket_size": 5e8,
    "zero_optimization.overlap_comm": None,
    "zero_optimization.sub_group_size": 1e9,
    "zero_optimization.stage3_prefetch_bucket_size": 5e7,
    "zero_optimization.stage3_param_persistence_threshold": 1e5,
    "zero_optimization.offload_param.pin_memory": True,
    "zero_optimization.offload_optimizer.device": "none",
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
    "bf16.check_grad_overflow": True,
    "steps_per_print": None,
    "autotuning.overwrite": True,
    "autotuning.tuner_type": "gridsearch",
    "aio.intra_op_parallelism": 1,
}


@pytest.mark.parametrize("path", DEFAULTS)
def test_defaults_are_those_of_the_code_where_documentation_differs(path):
    assert BY_PATH[path].default == DEFAULTS[path]


def test_the_table_is_consistent():
    assert len(BY_PATH) == len(KEYS)
    for key in KEYS:
        assert not key.parent or BY_PATH[key.parent].section, key.path
        assert key.section or key.why, key.path
        assert "\n" not in key.why and "|" not in key.why, key.path
        assert key.default is None or key.kind.accepts(key.default), key.path
        # A refused key's value is compared with the default.
        assert key.status is not Status.REFUSED or key.default is None or key.kind.normal(key.default) == key.default
        if key.old_name_of is not None:
            assert BY_PATH[key.old_name_of].status is key.status
        assert all(other in BY_PATH for other in key.excludes)
        assert not (key.harmless and key.status is not Status.REFUSED), key.path


def test_the_documentation_s_table_has_every_key():
    table = markdown_table()
    assert table == markdown_table()
    header, rule, *rows = table.splitlines()
    assert all(row.count(" | ") == header.count(" | ") == 3 and row.endswith(" |") for row in [rule, *rows])
    for key in KEYS:
        if not key.section and BY_PATH.get(key.parent, key).old_name_of is None:
            assert f"`{key.name}`" in table or f"`{key.path}`" in table, key.path
    row = next(row for row in rows if row.startswith("| `zero_optimization.reduce_bucket_size`"))
    assert "| needs nothing | XLA" in row and "500000000" in row
