"""Build the ``Accelerator`` and compare it with the launch request.

Accelerate falls back silently: an FSDP2 file on a machine without a GPU starts N independent trainers, a MULTI_CPU file
starts one process, and ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS`` overrides the script. Each of these raises here,
before a model is built, with the remedy in the message.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType

from accel_train.config import UsageError, launched_processes
from accel_train.data.sampler import accumulation_steps
from accel_train.launch_files import flight_recorder
from accel_train.launch_files.deepspeed_settings import check_file_of_environment, refuse_offload
from accel_train.launch_files.parents import parent_command_lines
from accel_train.launch_files.processes import (
    device_of_process,
    refuse_launch_without_device,
    refuse_without_device,
)
from accel_train.launch_files.requested import (
    Requested,
    clear_environment,
    launcher_flags,
    notices,
    read_request,
    refuse_accumulation,
    refuse_experiment_settings,
    refuse_unsupported,
)
from accel_train.precision import Precision
from accel_train.runtime import step_overhead, tested_versions
from accel_train.runtime.distributed_options import DistributedConfig, ddp_handlers
from accel_train.runtime.early_stop import end_with_the_launcher
from accel_train.runtime.exiting import begin_run
from accel_train.runtime.hosts.connecting import connect
from accel_train.runtime.strategy import strategy_of

ACCELERATE_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}

logger = logging.getLogger(__name__)


def build_accelerator(
    *,
    precision: Precision,
    global_batch_size: int,
    micro_batch_size: int,
    max_grad_norm: float,
    collective_timeout_seconds: int = 1800,
    distributed: DistributedConfig | None = None,
    logs: Path | None = None,
    config: object = None,
) -> Accelerator:
    """Build the ``Accelerator`` of this process and verify it. All ranks call it, once, before any heavy work.

    ZeRO's own settings (clipping, accumulation, batch sizes, precision) are generated from the arguments. NCCL writes
    its last collectives to ``logs`` when one of them times out. ``config`` must be equal on all ranks.

    Raises ``UsageError`` with both values if the machine differs from the launch request, or one process from another,
    and ``MissingProcessError`` if a process never connects.
    """
    # Called first, because it checks whether Accelerate has state already, before this run creates any.
    begin_run().callback(_forget_accelerator())
    step_overhead.remember_lookups()
    end_with_the_launcher()
    requested = read_request(os.environ, parent_command_lines())
    world_size = launched_processes(os.environ)
    accumulation = accumulation_steps(global_batch_size, world_size, micro_batch_size)
    refuse_experiment_settings(requested, os.environ, precision)
    refuse_accumulation(requested, os.environ, accumulation)
    _refuse_wrong_machine(requested, world_size, precision)
    # Accelerate prefers these variables to explicit constructor arguments. The comparisons above have read them.
    clear_environment(os.environ)

    plugin = None
    if requested.strategy == "deepspeed":
        plugin = zero_plugin(requested, precision, max_grad_norm, micro_batch_size, world_size)
    handlers = ddp_handlers(
        distributed or DistributedConfig(),
        strategy_family(requested, world_size),
        precision=precision,
        on_device=not _on_cpu(),
        accumulation_steps=accumulation,
    )
    _silence_known_warnings()
    if logs is not None and not _on_cpu():
        flight_recorder.set_up(logs, os.environ)
    timeout = timedelta(seconds=collective_timeout_seconds)
    connect(requested, config, plugin, timeout, cpu=_on_cpu())
    accelerator = Accelerator(
        mixed_precision=ACCELERATE_PRECISION[precision],
        # The loop accumulates by itself. With more steps Accelerate would rescale the loss.
        gradient_accumulation_steps=1,
        deepspeed_plugin=plugin,
        kwargs_handlers=list(handlers),
    )
    _verify(accelerator, requested, world_size, precision)
    _set_timeout_of_mesh(accelerator, timeout)
    # Before `prepare`, which takes the policy from the plugin.
    _keep_fsdp_in_fp32(accelerator)
    return accelerator


def strategy_family(requested: Requested, world_size: int) -> str:
    """Return "single", "ddp", "fsdp2" or "zero"."""
    if requested.strategy == "fsdp":
        return "fsdp2"
    if requested.strategy == "deepspeed":
        return "zero"
    return "ddp" if world_size > 1 else "single"


def _forget_accelerator() -> Callable[[], None]:
    """Return a function that resets Accelerate's shared state. Call it before ``build_accelerator``.

    The reset does nothing if Accelerate had state already, which belongs to other code, or with several processes,
    whose process group outlives the run.
    """
    process_state = cast("Any", PartialState)
    accelerator_state = cast("Any", AcceleratorState)
    gradient_state = cast("Any", GradientState)
    had_state = bool(process_state._shared_state)

    def forget() -> None:
        num_processes = process_state._shared_state.get("num_processes", 1)
        if not had_state and num_processes == 1:
            accelerator_state._reset_state(True)
            gradient_state._reset_state()

    return forget


def log_notices() -> None:
    """Log launch settings without effect, and packages newer than tested. Every process, once logging is set up."""
    command_lines = parent_command_lines()
    machine = read_request(os.environ, command_lines).machine
    for sentence in notices(machine, os.environ, launcher_flags(command_lines)):
        logger.warning("%s", sentence)
    newer = tested_versions.notice()
    if newer is not None:
        logger.warning("%s", newer)


def _silence_known_warnings() -> None:
    """Ignore warnings of torch and Accelerate about their own calls. Nobody here can act on them."""
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _keep_fsdp_in_fp32(accelerator: Accelerator) -> None:
    """Let FSDP2 in low precision reduce gradients in fp32 and pass inputs to the model uncast."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin: Any = accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    if policy is not None:
        # torch's default casts every floating input of the model, and timesteps would keep only three digits. A model
        # casts its own inputs, as under autocast and DeepSpeed.
        plugin.mixed_precision_policy = dataclasses.replace(
            policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )


def _refuse_wrong_machine(requested: Requested, world_size: int, precision: Precision) -> None:
    """Refuse differences that are visible before the processes are connected."""
    _refuse_half_a_launch(world_size)
    if requested.num_processes is not None and requested.num_processes != world_size:
        raise UsageError(
            f"num_processes: {requested.num_processes} was asked for by {requested.source}, but WORLD_SIZE is "
            f"{world_size}: the launcher started {world_size} process(es). On CPU, `accelerate launch` starts one "
            f"process whatever the file says; use `python -m torch.distributed.run --nproc_per_node "
            f"{requested.num_processes} RECIPE` or `accel-train rehearse`"
        )
    _refuse_missing_device(requested)
    refuse_unsupported(requested, os.environ)
    _refuse_unsupported_precision(precision)


def _refuse_missing_device(requested: Requested) -> None:
    """Refuse more processes than devices, and FSDP, ZeRO and MULTI_GPU without any, unless it is a rehearsal."""
    if requested.rehearsal:
        return
    if torch.accelerator.is_available():
        if not _on_cpu():
            device_of_process(os.environ, torch.accelerator.device_count())
        return
    machine = requested.machine
    if machine is not None:
        refuse_launch_without_device(machine, requested.source)
    if requested.strategy is not None:
        refuse_without_device(requested.strategy, requested.source)


def _refuse_unsupported_precision(precision: Precision) -> None:
    """Refuse a precision that this machine cannot compute in."""
    # A machine with a GPU may be told to train on its CPU, where Accelerate would drop fp16 without a word.
    on_cpu = _on_cpu()
    if precision == "fp16" and on_cpu:
        raise UsageError(
            "precision: fp16 needs a GPU (loss scaling has no CPU form), and this run is on the CPU; use --precision "
            "bf16 or fp32"
        )
    if precision != "bf16" or on_cpu or not torch.cuda.is_available():
        return
    # By default torch counts emulated bf16 as supported.
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError(
            f"precision: bf16 is not supported by {torch.cuda.get_device_name()} (compute capability "
            f"{torch.cuda.get_device_capability()}; 8.0 is needed); use --precision fp16 or fp32"
        )


def _refuse_half_a_launch(world_size: int) -> None:
    """Refuse ``WORLD_SIZE`` without a rank: on a GPU machine Accelerate would train that many independent copies."""
    required = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if name not in os.environ]
    if world_size > 1 and missing:
        raise UsageError(
            f"WORLD_SIZE: {world_size} is set, but not {', '.join(missing)}, so no launcher started this process; "
            "unset it for one process, or start all of them with `accelerate launch` or torchrun"
        )


def _set_timeout_of_mesh(accelerator: Accelerator, timeout: timedelta) -> None:
    """Let the groups of HSDP wait as long as the process group. ``init_device_mesh`` takes no timeout for them."""
    if accelerator.torch_device_mesh is None:
        return
    from torch.distributed import distributed_c10d

    # The mesh itself names no group of its flattened dimensions, which FSDP2 uses.
    torch_groups: Any = distributed_c10d
    for group in torch_groups._world.pg_map:
        torch_groups._set_pg_timeout(timeout, group)


def _on_cpu() -> bool:
    asked_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    return asked_for_cpu or not torch.accelerator.is_available()


def zero_plugin(
    requested: Requested, precision: Precision, max_grad_norm: float, micro_batch_size: int, world_size: int
) -> DeepSpeedPlugin:
    """Build DeepSpeed's plugin, with settings generated from the experiment, so that no file has to repeat them.

    A DeepSpeed file with other values is refused.
    """
    check_file_of_environment(os.environ)
    # Under every strategy the model is built, loaded, then sharded. ZeRO-3 would shard it while it is built.
    os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = "false"
    try:
        plugin = DeepSpeedPlugin()
    except ImportError as error:
        raise UsageError(
            f"distributed_type: DEEPSPEED in {requested.source} needs deepspeed, which is not installed; "
            "run `pip install 'accel-train[deepspeed]'`"
        ) from error
    settings = plugin.deepspeed_config
    generated: dict[str, Any] = {
        # The loop weights the micro-batches itself and marks the boundary.
        "gradient_accumulation_steps": 1,
        # ZeRO clips in its own step and ignores `clip_grad_norm_`. An omitted value means 1.0 there.
        "gradient_clipping": float(max_grad_norm),
        "train_micro_batch_size_per_gpu": micro_batch_size,
        # DeepSpeed asserts that this is the product of the other two and the number of processes.
        "train_batch_size": micro_batch_size * world_size,
    }
    refuse_offload(settings, requested.source)
    refuse_zero_contradictions(settings, generated, precision, requested.source)
    settings.update(generated)
    # DeepSpeed refuses optimizers outside its own list otherwise.
    settings["zero_allow_untested_optimizer"] = True
    # torch's fused CPU AdamW keeps the arithmetic of the other strategies.
    settings["zero_force_ds_cpu_optimizer"] = False
    for name in ("fp16", "bf16"):
        settings[name] = {**settings.get(name, {}), "enabled": precision == name}
    if precision == "bf16":
        # A non-finite gradient must not reach the optimizer.
        settings["bf16"]["check_grad_overflow"] = True
    if precision != "fp32":
        # The other strategies reduce in fp32 as well.
        settings.setdefault("communication_data_type", "fp32")
    return plugin


def refuse_zero_contradictions(
    settings: Mapping[str, Any], generated: Mapping[str, Any], precision: Precision, source: str
) -> None:
    """Refuse values of a DeepSpeed file that contradict the experiment.

    "auto" and null leave the value to the experiment, and so does an accumulation of 1, Accelerate's default.
    """
    for key in ("optimizer", "scheduler"):
        if key in settings:
            raise UsageError(f"{key!r} in the DeepSpeed settings of {source} contradicts the recipe's own; remove it")
    for key, ours in generated.items():
        value = settings.get(key)
        is_default = key == "gradient_accumulation_steps" and value == 1
        if value not in (None, "auto", ours) and not is_default:
            raise UsageError(
                f"{key}: {value} in the DeepSpeed settings of {source} contradicts the experiment, which gives "
                f"{ours}; remove it from the file, it is generated from the recipe's options"
            )
    for name in ("fp16", "bf16"):
        enabled = settings.get(name, {}).get("enabled", "auto")
        if str(enabled).lower() == "true" and name != precision:
            raise UsageError(
                f"{name}.enabled: true in the DeepSpeed settings of {source} contradicts precision: {precision}; "
                f"remove it from the file or give --precision {name}"
            )


def _verify(accelerator: Accelerator, requested: Requested, world_size: int, precision: Precision) -> None:
    """Compare the finished Accelerator with the request. Each difference is a silent fallback of some layer."""
    state: Any = accelerator.state
    if accelerator.distributed_type == DistributedType.FSDP and state.fsdp_plugin.fsdp_version != 2:
        raise UsageError(
            f"fsdp_version: 1 in {requested.source} is not supported; set fsdp_version: 2 (`accelerate to-fsdp2` "
            "converts a file)"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED and state.deepspeed_plugin.zero_stage < 1:
        raise UsageError(
            f"zero_stage: 0 in {requested.source} is plain data parallelism; use distributed_type: MULTI_GPU"
        )
    strategies = {
        "fsdp": ("fsdp2",),
        "deepspeed": ("zero1", "zero2", "zero3"),
        None: ("single", "ddp"),
    }
    checks: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
        ("num_processes", (world_size,), accelerator.num_processes),
        ("strategy", strategies[requested.strategy], strategy_of(accelerator)),
        ("gradient_accumulation_steps", (1,), accelerator.gradient_accumulation_steps),
        ("mixed_precision", (ACCELERATE_PRECISION[precision],), accelerator.mixed_precision),
    )
    for name, asked, real in checks:
        if real not in asked:
            raise UsageError(
                f"{name}: {' or '.join(map(str, asked))} was asked for by {requested.source}, but {real} was set up; "
                "check the launch command (`accel-train check --config_file FILE RECIPE` explains what it reads)"
            )
