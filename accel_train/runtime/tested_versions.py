"""Tested versions of other packages, and their private names used here.

A private name may change in any release. It is used only where no public counterpart exists or does what is
needed. ``tests/runtime/test_tested_versions.py`` keeps the table complete and looks up each dotted name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from accel_train import __version__


@dataclass(frozen=True)
class Tested:
    """One package: its newest release that passed the tests, and its private names in use."""

    newest: str
    """Release line, such as 2.13. Patch releases are assumed to be alike."""

    private: Mapping[str, str]
    """Purpose of each private or undocumented name. A dotted name can be looked up in the package."""


TESTED: Mapping[str, Tested] = {
    "torch": Tested(
        "2.13",
        {
            "torch._amp_foreach_non_finite_check_and_unscale_": "step guard: finite check without a device wait",
            "torch._foreach_copy_": "snapshot: one call for many tensors",
            "torch._foreach_lerp_": "EMA: one call for many tensors",
            "torch._fused_adamw_": "AdamW: the kernel without torch's work around it",
            "torch.optim.Adam._init_group": "AdamW: the state that torch makes",
            "torch._C._accelerator_setAllocatorSettings": "memory.expandable_segments: in a running process",
            "torch._foreach_norm": "gradient norm: one call for many tensors",
            "torch._dynamo.exc.FailOnRecompileLimitHit": "compile: the remedy in the message",
            "torch._dynamo.exc.TorchDynamoException": "compile: the remedy in the message",
            "torch._dynamo.utils.counters": "compile: summary in the log at the start",
            "torch._dynamo.utils.get_compilation_metrics": "compile: summary in the log at the start",
            "torch._inductor.choices.InductorChoices": "compile: reductions of rows on a GPU",
            "torch._inductor.cpp_builder.get_cpp_compiler": "compile: the compiler's own error",
            "torch._inductor.dependencies.MemoryDep": "compile: reductions of rows on a GPU",
            "torch._inductor.virtualized.V": "compile: reductions of rows on a GPU",
            "torch._C._distributed_c10d._dump_fr_trace_json": "hangs: the last collectives of gloo",
            "_is_mkldnn_bf16_supported": "linting: whether a CPU has fast bf16 products",
            "_dump_nccl_trace": "hangs: the last collectives of NCCL, which a torch for CPUs lacks",
            "_dump_nccl_trace_json": "hangs: the last collectives of NCCL, which a torch for CPUs lacks",
            "torch._C._current_autograd_node": "replay --upgrade: the node of a backward, for its forward's module",
            "torch.autograd._engine_run_backward": "simulation: casts of CUDA in recomputed forwards",
            "torch._C._current_graph_task_id": "simulation: whether a backward runs",
            "torch._C._get_dispatch_stack_at": "simulation: whether DTensor computes shapes",
            "torch.Tensor._backward_hooks": "initial weights: hooks, which no other process would get",
            "torch.Tensor._post_accumulate_grad_hooks": "initial weights: hooks, which no other process would get",
            "torch.Tensor._version": "whether a gradient was zeroed, and an offloaded activation changed in place",
            "torch.utils._pytree.tree_flatten": "activation_checkpointing.offload: tensors in lists of arguments",
            "torch.utils._pytree.tree_unflatten": "activation_checkpointing.offload: the arguments again",
            "_local_scalar_dense": "simulation: numbers that DeepSpeed's engine reads from tensors",
            "torch._C._len_torch_dispatch_stack": "simulation: whether DTensor computes shapes",
            "torch.autograd._get_sequence_nr": "replay --upgrade: the number of a forward's autograd node",
            "torch._guards.TracingContext": "simulation: DTensor computes shapes in the same mode",
            "torch._guards.tracing": "simulation: DTensor computes shapes in the same mode",
            "torch._subclasses.fake_tensor.DataDependentOutputException": "simulation: a step that reads a value",
            "torch._subclasses.fake_tensor.DynamicOutputShapeException": "simulation: a step that reads a value",
            "torch._subclasses.fake_tensor.FakeTensor": "simulation: tensors without memory",
            "torch._subclasses.fake_tensor.FakeTensorMode": "simulation: tensors without memory",
            "torch.distributed._compute_bucket_assignment_by_size": "simulation: DDP's buckets",
            "torch.distributed.distributed_c10d._resolve_process_group": "simulation: the group of a collective",
            "torch.distributed.distributed_c10d._set_pg_timeout": "HSDP: the timeout of its groups",
            "torch.distributed.distributed_c10d._world": "HSDP: its groups",
            "torch.distributed.fsdp._fully_shard._fsdp_param": "simulation: parts of a parameter, one rank's only",
            "torch.cuda.memory._dump_snapshot": "profile.memory: the file for pytorch.org/memory_viz",
            "torch.cuda.memory._record_memory_history": "profile.memory: every allocation with its stack",
            "torch.nn.Module._call_impl": "compile: a block in place, its parameter names unchanged",
            "torch.nn.Module._compiled_call_impl": "compile: a block in place, its parameter names unchanged",
            "torch.nn.modules.conv._ConvNd": "parameter kinds: every convolution",
            "torch.utils._python_dispatch.TorchDispatchMode": "attention: which kernel ran; every operator of a step",
            "torch._C": "simulation: whether a backward runs; replay --upgrade: its node",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "simulation: operations of attention",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "simulation: the same",
            "torch.testing._internal.distributed.fake_pg.FakeStore": "simulation: processes that are not there",
            "torch.utils.cpp_extension._get_build_directory": "DeepSpeed's build: folder of a stale lock",
            "_cdata": "UntypedStorage: its identity",
            "_comm_hooks": "DistributedDataParallel: registered hooks",
            "_has_rebuilt_buckets": "DistributedDataParallel: final order of reduction",
            "_local_tensor": "DTensor: this rank's part",
            "_non_persistent_buffers_set": "Module: which buffers a checkpoint holds",
            "_overloadpacket": "operator: its name without the variant",
            "_schema": "operator: its name, and what it writes to",
            "_sequence_nr": "autograd node: its number",
            "_type": "ScriptObject: whether it is a process group",
            "_orig_mod": "OptimizedModule: the module that was compiled",
            "_step_supports_amp_scaling": "optimizers with a skip of the step on the device",
            "_workers": "the DataLoader's iterator: processes to end if one hangs",
        },
    ),
    "accelerate": Tested(
        "1.15",
        {
            "accelerate.commands.launch._validate_launch_command": "accel-train launch: the launcher's own checks",
            "accelerate.state.AcceleratorState._reset_state": "a second run in one process",
            "accelerate.state.GradientState._reset_state": "a second run in one process",
            "accelerate.state.PartialState._shared_state": "a second run in one process",
            "_action_groups": "the launcher's parser: which keys a launch file may hold",
            "_group_actions": "the launcher's parser: which keys a launch file may hold",
            "_models": "Accelerator: whether a module has been prepared",
        },
    ),
    "deepspeed": Tested(
        "0.19",
        {
            "_flush_coalesced_reduction_zero12": "engine: the reduction of `coalesce_grad_reduction`, left out",
            "_flush_coalesced_reduction_zero3": "engine: the same",
            "__compatible_ops__": "rehearsal: whether the CPU communication can be compiled",
            "coalesce_grad_reduction": "engine: one reduction per step",
            "ds_id": "ZeRO-3 parameter",
            "ds_numel": "ZeRO-3 parameter",
            "ds_shape": "ZeRO-3 parameter",
            "ds_tensor": "ZeRO-3 parameter: this rank's shard",
            "fp32_partitioned_groups_flat": "ZeRO-3: fp32 masters",
            "get_param_id": "ZeRO-3: location of a master",
            "grad_position": "ZeRO-3: location of a master",
            "_hp_mapping": "ZeRO-1 and -2 parameter: location of its master",
            "lp_fragment_address": "ZeRO-1 and -2: this rank's part of a parameter",
            "hp_fragment_address": "ZeRO-1 and -2: its location in the group's fp32 shard",
            "param_group_index": "ZeRO-1 and -2: the group of a parameter",
            "single_partition_of_fp32_groups": "ZeRO-1 and -2: fp32 masters",
            "overflow": "fp16: whether the last step was skipped",
            "was_step_applied": "engine: whether a step that is not finite was discarded",
            "zero_optimization_stage": "engine: told apart from other models by it",
        },
    ),
    "huggingface-hub": Tested(
        "2.4",
        {
            "huggingface_hub.utils._http.default_client_factory": "timeouts of its HTTP client",
        },
    ),
    "diffusers": Tested(
        "0.42",
        {
            "_AttentionBackendRegistry": "attention: calls of a backend, and the one of the process",
            "_backends": "attention: calls of a backend",
        },
    ),
    "transformers": Tested(
        "5.24",
        {
            "_attn_implementation": "config: the attention that a model chose",
            "_attn_implementation_internal": "config: the same, to be set without the checks, for the proof by eager",
            "_keep_in_fp32_modules": "model: weights that stay fp32 in a base of half precision",
            "_keep_in_fp32_modules_strict": "model: the same, in bf16 as well",
            "_is_stateful": "model: a state over the whole row, with which texts cannot be packed",
        },
    ),
}  # fmt: skip


def newer_than_tested() -> list[str]:
    """List installed packages newer than tested, such as ``torch 2.15.0 (tested up to 2.13)``."""
    found: list[str] = []
    for name, tested in TESTED.items():
        try:
            installed = Version(version(name))
        except PackageNotFoundError:
            continue
        newest = Version(tested.newest)
        # A development version such as 2.14.0a0 counts as its release.
        if installed.release[:2] > newest.release[:2]:
            found.append(f"{name} {installed} (tested up to {tested.newest})")
    return found


def notice() -> str | None:
    """Return a line for the start of a run, or None if no package is newer than tested."""
    newer = ", ".join(newer_than_tested())
    if not newer:
        return None
    return f"newer than tested: {newer}. If a private name has changed, an error names it; install a tested version"


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of this package and of those of ``packages`` that are installed."""
    found = {"accel_train": __version__}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
