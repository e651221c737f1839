"""Keys of a deepspeed_config_file. Each must be known here, and must not change the result of a run.

DeepSpeed ignores an unknown key at the top, and refuses one in a section only when the engine is built. Keys that
only change speed and memory may have any value. Keys that change the arithmetic may have one value, which is that of
every other strategy. All others, such as DeepSpeed's own data sampling, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Only:
    """A key whose other values contradict the experiment or this project."""

    value: object
    reason: str


ANY = "any"
"""Its type and value are checked elsewhere: by the reader of the section, or against the experiment."""
BOOLEAN = "boolean"
COUNT = "count"
COUNT_OR_AUTO = "count or auto"
"""Accelerate replaces ``auto`` by a number that depends on the model's width."""
_PREDIVIDE = "the gradient is averaged as by the other strategies"
_SCALING = "the loss is scaled in the same way under every launch file"
_ROUNDED = "the weights and gradients would be rounded, and it would be a different run"
_NVME = "it applies to NVMe only, and offloading goes to host memory here"

_TOP: Mapping[str, object] = {
    "zero_optimization": ANY,
    "gradient_accumulation_steps": ANY,
    "gradient_clipping": ANY,
    "train_batch_size": ANY,
    "train_micro_batch_size_per_gpu": ANY,
    "fp16": ANY,
    "bf16": ANY,
    # Refused with their own message, where they are compared with the experiment.
    "optimizer": ANY,
    "scheduler": ANY,
    # Accelerate replaces the number, so that nothing is printed.
    "steps_per_print": COUNT,
    "wall_clock_breakdown": BOOLEAN,
    "memory_breakdown": BOOLEAN,
    "dump_state": BOOLEAN,
    "communication_data_type": Only("fp32", "gradients are reduced in fp32, as by the other strategies"),
    "prescale_gradients": Only(False, _PREDIVIDE),
    "gradient_predivide_factor": Only(1, _PREDIVIDE),
    "gradient_allreduce_op": Only("mean", _PREDIVIDE),
    "zero_allow_untested_optimizer": Only(True, "the optimizer is the experiment's"),
    "zero_force_ds_cpu_optimizer": Only(False, "the optimizer is the experiment's"),
}
_ZERO: Mapping[str, object] = {
    "stage": ANY,
    "offload_param": ANY,
    "offload_optimizer": ANY,
    "contiguous_gradients": BOOLEAN,
    "reduce_scatter": BOOLEAN,
    "reduce_bucket_size": COUNT_OR_AUTO,
    "use_multi_rank_bucket_allreduce": BOOLEAN,
    "allgather_partitions": BOOLEAN,
    "allgather_bucket_size": COUNT,
    "overlap_comm": BOOLEAN,
    "sub_group_size": COUNT,
    "ignore_unused_parameters": BOOLEAN,
    "round_robin_gradients": Only(False, "the weights after a step depend on it"),
    "parameter_alignment": BOOLEAN,
    "memory_efficient_linear": BOOLEAN,
    "override_module_apply": BOOLEAN,
    "log_trace_cache_warnings": BOOLEAN,
    "enable_sanity_checks": BOOLEAN,
    "stage3_prefetch_bucket_size": COUNT_OR_AUTO,
    "stage3_param_persistence_threshold": COUNT_OR_AUTO,
    "stage3_model_persistence_threshold": COUNT,
    "stage3_max_live_parameters": COUNT,
    "stage3_max_reuse_distance": COUNT,
    "stage3_gather_16bit_weights_on_model_save": ANY,
    "stage3_module_granularity_threshold": COUNT,
    "stage3_use_all_reduce_for_fetch_params": BOOLEAN,
    "stage3_allgather_sequential": BOOLEAN,
    "compute_grad_norm": Only(True, "the norm of the gradient is logged and used for clipping"),
    "load_from_fp32_weights": Only(True, _ROUNDED),
    "zero_quantized_weights": Only(False, _ROUNDED),
    "zero_quantized_nontrainable_weights": Only(False, _ROUNDED),
    "zero_quantized_gradients": Only(False, _ROUNDED),
    "zero_hpz_partition_size": Only(1, "weights are sharded over all processes"),
    "elastic_checkpoint": Only(False, "checkpoints are this project's own"),
    "pipeline_loading_checkpoint": Only(False, "checkpoints are this project's own"),
    "legacy_stage1": Only(False, "DeepSpeed has removed it"),
}
_PARAM: Mapping[str, object] = {"device": ANY, "nvme_path": ANY, "pin_memory": BOOLEAN}
_OPTIMIZER: Mapping[str, object] = {
    "device": ANY,
    "nvme_path": ANY,
    "pin_memory": BOOLEAN,
    "pipeline_read": Only(False, _NVME),
    "pipeline_write": Only(False, _NVME),
    "fast_init": Only(False, _NVME),
    "ratio": Only(1, "the whole optimizer is offloaded"),
    "super_offload": Only(False, "the optimizer is the experiment's"),
}
_FP16: Mapping[str, object] = {
    "enabled": ANY,
    "auto_cast": Only(False, "the experiment casts"),
    "loss_scale": Only(0, _SCALING),
    "initial_scale_power": Only(16, _SCALING),
    "loss_scale_window": Only(1000, _SCALING),
    "hysteresis": Only(2, _SCALING),
    "consecutive_hysteresis": Only(False, _SCALING),
    "min_loss_scale": Only(1, _SCALING),
    "fp16_master_weights_and_grads": Only(False, _ROUNDED),
}
_BF16: Mapping[str, object] = {
    "enabled": ANY,
    "immediate_grad_update": Only(False, _ROUNDED),
    "check_grad_overflow": Only(True, "a gradient that is not finite must not reach the optimizer"),
    "bf16_master_weights_and_grads": Only(False, _ROUNDED),
    "bf16_optimizer_states": Only(False, _ROUNDED),
}
SECTIONS: Mapping[str, Mapping[str, object]] = {
    "": _TOP,
    "zero_optimization": _ZERO,
    "zero_optimization.offload_param": _PARAM,
    "zero_optimization.offload_optimizer": _OPTIMIZER,
    "fp16": _FP16,
    "bf16": _BF16,
}
INSTEAD = {
    "cpu_offload": 'write `"offload_optimizer": {"device": "cpu"}`',
    "cpu_offload_param": 'write `"offload_param": {"device": "cpu"}`',
    "cpu_offload_use_pin_memory": "write `pin_memory` under offload_optimizer or offload_param",
    "bfloat16": "write `bf16`",
    "activation_checkpointing": "delete it: the experiment decides, with --activation_checkpointing.mode",
    "torch_autocast": "delete it: --precision decides",
    "curriculum_learning": "delete it: the experiment decides on its data",
    "data_efficiency": "delete it: the experiment decides on its data",
    "compression_training": "delete it: weights are trained unquantised",
    "sparse_gradients": "delete it: gradients are dense",
}
"""Remedies for keys that have no near name here."""
