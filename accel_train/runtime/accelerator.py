"""Build the ``Accelerator`` and compare what was asked with what came up.

Accelerate falls back in silence: an FSDP2 file on a machine without a GPU gives N independent trainers, a
MULTI_CPU file gives one process, ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS`` beats the script. Each of these
stops here, before a model exists, with the remedy in the message.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType

from accel_train.config import UsageError
from accel_train.data.sampler import accumulation_steps
from accel_train.launch_files.parents import parent_command_lines
from accel_train.launch_files.requested import (
    Requested,
    clear_environment,
    launcher_flags,
    notices,
    read_request,
    refuse_accumulation,
    refuse_experiment_settings,
)
from accel_train.precision import Precision
from accel_train.runtime import rehearsal, tested_versions
from accel_train.runtime.distributed_options import DistributedConfig, ddp_handlers, verify_ddp
from accel_train.runtime.early_stop import end_with_the_launcher
from accel_train.runtime.exiting import begin_run
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
) -> Accelerator:
    """The verified ``Accelerator`` of this process. All ranks must call it, once, before anything heavy.

    ZeRO's own settings (clipping, accumulation, batch sizes, precision) are generated from the arguments.
    Raises ``UsageError`` where the machine is not what the launch request says, naming both.
    """
    begin_run().callback(_forget_accelerator())
    end_with_the_launcher()
    requested = read_request(os.environ, parent_command_lines())
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    pieces = accumulation_steps(global_batch_size, world_size, micro_batch_size)
    refuse_experiment_settings(requested, os.environ, precision)
    refuse_accumulation(requested, os.environ, pieces)
    _refuse_wrong_machine(requested, world_size, precision)
    clear_environment(os.environ)  # what would beat an explicit constructor argument

    plugin = None
    if requested.strategy == "deepspeed":
        plugin = zero_plugin(requested, precision, max_grad_norm, micro_batch_size, world_size)
    kind = {"fsdp": "fsdp2", "deepspeed": "zero", None: "ddp" if world_size > 1 else "single"}[requested.strategy]
    exchange, on_device = distributed or DistributedConfig(), not _on_cpu()
    handlers = ddp_handlers(exchange, kind, precision=precision, on_device=on_device, accumulation_steps=pieces)
    _silence_known_warnings()
    _connect(requested, timedelta(seconds=collective_timeout_seconds))
    accelerator = Accelerator(
        mixed_precision=ACCELERATE_PRECISION[precision],
        gradient_accumulation_steps=1,
        deepspeed_plugin=plugin,
        kwargs_handlers=[*handlers],
    )
    _verify(accelerator, requested, world_size, precision)
    _keep_fsdp_in_fp32(accelerator)
    return accelerator


def _forget_accelerator() -> Callable[[], None]:
    """What puts Accelerate's shared state back as it is now; call it before ``build_accelerator``.

    The function leaves the state alone where there was one already, for it is not ours, and with several processes,
    whose group outlives it.
    """
    process, state, gradients = (cast("Any", kind) for kind in (PartialState, AcceleratorState, GradientState))
    if process._shared_state:
        return lambda: None

    def forget() -> None:
        if process._shared_state.get("num_processes", 1) == 1:
            state._reset_state(True)
            gradients._reset_state()

    return forget


def log_notices() -> None:
    """Log what was asked of the machine and is not followed, and packages that are newer than tested.

    Every process, once logging is set up.
    """
    command_lines = parent_command_lines()
    machine = read_request(os.environ, command_lines).machine
    for sentence in notices(machine, os.environ, launcher_flags(command_lines)):
        logger.warning("%s", sentence)
    if (newer := tested_versions.notice()) is not None:
        logger.warning("%s", newer)


def _silence_known_warnings() -> None:
    """Warnings that torch and Accelerate raise about their own calls, and that nobody here can act on."""
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _keep_fsdp_in_fp32(accelerator: Accelerator) -> None:
    """FSDP2 in low precision: gradients are reduced in fp32, and inputs reach the model as they are.

    torch's default casts every floating input of the model, so that times would lose all but three digits; a model
    casts what it computes on itself, as under autocast and DeepSpeed.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        policy = plugin.mixed_precision_policy
        plugin.mixed_precision_policy = dataclasses.replace(
            policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )


def _refuse_wrong_machine(requested: Requested, world_size: int, precision: Precision) -> None:
    """Differences that can be seen before the processes are connected."""
    _refuse_half_a_launch(world_size)
    machine = requested.machine
    has_device = torch.accelerator.is_available()
    sharded = requested.strategy is not None or (machine is not None and machine.strategy not in ("single", "ddp"))
    if requested.num_processes is not None and requested.num_processes != world_size:
        raise UsageError(
            f"num_processes: {requested.num_processes} was asked for by {requested.source}, but WORLD_SIZE is "
            f"{world_size}: the launcher started {world_size} process(es). On CPU, `accelerate launch` starts one "
            f"process whatever the file says; use `python -m torch.distributed.run --nproc_per_node "
            f"{requested.num_processes} RECIPE` or `accel-train rehearse`"
        )
    wants_device = sharded or (machine is not None and machine.distributed_type == "MULTI_GPU" and not machine.use_cpu)
    if wants_device and not has_device and not requested.rehearsal:
        strategy = machine.strategy if machine is not None else requested.strategy
        raise UsageError(
            f"distributed_type: {strategy} was asked for by {requested.source}, but this machine shows no "
            "accelerator device, where Accelerate would ignore the setting; run it on GPUs, or try it here with "
            "`accel-train rehearse --config_file FILE --num_processes N RECIPE ...`"
        )
    if machine is not None and machine.fsdp is not None and machine.fsdp.activation_checkpointing:
        raise UsageError(
            f"fsdp_activation_checkpointing: true in {requested.source} would rename the model's parameters, and "
            "checkpoints with them; remove it from the file"
        )
    if precision == "fp16" and not has_device:
        raise UsageError("precision: fp16 needs a GPU (loss scaling has no CPU form); use --precision bf16 or fp32")
    if (
        precision == "bf16"
        and torch.cuda.is_available()
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UsageError(
            f"precision: bf16 is not supported by {torch.cuda.get_device_name()} (compute capability "
            f"{torch.cuda.get_device_capability()}; 8.0 is needed); use --precision fp16 or fp32"
        )


def _refuse_half_a_launch(world_size: int) -> None:
    """``WORLD_SIZE`` without a rank: on a GPU machine Accelerate would train that many copies, each alone."""
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world_size > 1 and missing:
        raise UsageError(
            f"WORLD_SIZE: {world_size} is set, but {', '.join(missing)} not, so no launcher started this process; "
            "unset it for one process, or start all of them with `accelerate launch` or torchrun"
        )


def _connect(requested: Requested, timeout: timedelta) -> None:
    """Start the process group with our timeout.

    ``InitProcessGroupKwargs`` drops a timeout that equals its own default (accelerate#2611), so it goes to
    ``PartialState`` directly; DeepSpeed's later subgroups read theirs from the environment (accelerate#3711).
    """
    os.environ["DEEPSPEED_TIMEOUT"] = str(max(1, math.ceil(timeout.total_seconds() / 60)))
    if requested.rehearsal:
        rehearsal.connect(requested.strategy, timeout)
        return
    PartialState(cpu=_on_cpu(), timeout=timeout)


def _on_cpu() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true" or not torch.accelerator.is_available()


def zero_plugin(
    requested: Requested, precision: Precision, max_grad_norm: float, micro_batch_size: int, world_size: int
) -> DeepSpeedPlugin:
    """DeepSpeed's settings, generated from the experiment so that nothing is written twice.

    Accumulation is 1 because the loop weighs micro-batches itself and marks the boundary; clipping is ours
    because ZeRO clips in its own step and ignores ``clip_grad_norm_`` (an omitted value means 1.0 there).
    A DeepSpeed file that says otherwise is refused.
    """
    os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = "false"  # one path for every strategy: built, loaded, then sharded
    try:
        plugin = DeepSpeedPlugin()
    except ImportError as error:
        raise UsageError(
            f"distributed_type: DEEPSPEED in {requested.source} needs deepspeed, which is not installed; "
            "run `pip install 'accel-train[deepspeed]'`"
        ) from error
    settings = plugin.deepspeed_config
    generated: dict[str, Any] = {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": float(max_grad_norm),
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "train_batch_size": micro_batch_size * world_size,
    }
    refuse_zero_contradictions(settings, generated, precision, requested.source)
    settings.update(generated)
    settings["zero_allow_untested_optimizer"] = True
    settings["zero_force_ds_cpu_optimizer"] = False  # torch's fused CPU AdamW: the same arithmetic as everywhere
    for name in ("fp16", "bf16"):
        settings[name] = {**settings.get(name, {}), "enabled": precision == name}
    if precision == "bf16":
        settings["bf16"]["check_grad_overflow"] = True  # a non-finite gradient must not reach the optimizer
    if precision != "fp32":
        settings.setdefault("communication_data_type", "fp32")  # as the other strategies reduce
    return plugin


def refuse_zero_contradictions(
    settings: Mapping[str, Any], generated: Mapping[str, Any], precision: Precision, source: str
) -> None:
    """Values in a DeepSpeed file that the experiment decides differently (1 and 'auto' say nothing)."""
    for key in ("optimizer", "scheduler"):
        if key in settings:
            raise UsageError(f"{key!r} in the DeepSpeed settings of {source} contradicts the recipe's own; remove it")
    for key, ours in generated.items():
        value = settings.get(key)
        said_nothing = value in (None, "auto") or (key == "gradient_accumulation_steps" and value == 1)
        if not said_nothing and value != ours:
            raise UsageError(
                f"{key}: {value} in the DeepSpeed settings of {source} contradicts the experiment, which gives "
                f"{ours}; remove it from the file, it is generated from the recipe's options"
            )
    for name in ("fp16", "bf16"):
        if str(settings.get(name, {}).get("enabled", "auto")).lower() == "true" and name != precision:
            raise UsageError(
                f"{name}.enabled: true in the DeepSpeed settings of {source} contradicts precision: {precision}; "
                f"remove it from the file or give --precision {name}"
            )


def _verify(accelerator: Accelerator, requested: Requested, world_size: int, precision: Precision) -> None:
    """Compare the finished Accelerator with the request; each difference is a silent fallback of some layer."""
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
    strategies = {"fsdp": ("fsdp2",), "deepspeed": ("zero1", "zero2", "zero3"), None: ("single", "ddp")}
    checks: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
        ("num_processes", (world_size,), accelerator.num_processes),
        ("strategy", strategies[requested.strategy], strategy_of(accelerator)),
        ("gradient_accumulation_steps", (1,), accelerator.gradient_accumulation_steps),
        ("mixed_precision", (ACCELERATE_PRECISION[precision],), accelerator.mixed_precision),
    )
    for name, asked, real in checks:
        if real not in asked:
            raise UsageError(
                f"{name}: {' or '.join(map(str, asked))} was asked for by {requested.source}, but {real} came up; "
                "check the launch command (`accel-train check --config_file FILE RECIPE` explains what it reads)"
            )


def verify_prepared(accelerator: Accelerator, model: torch.nn.Module, max_grad_norm: float) -> str:
    """Check that ``prepare`` really wrapped the model as the strategy says; returns one line for the log.

    All ranks must call it, right after ``prepare``. An FSDP2 wrap policy that matches no block, for example,
    shards the root alone and gathers the whole model at once.
    """
    strategy = strategy_of(accelerator)
    if strategy == "ddp":
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel), type(model)
        settings = verify_ddp(model, accelerator.ddp_handler)
        return f"ddp: {accelerator.num_processes} process(es) on {accelerator.device.type}, {settings}"
    if strategy == "fsdp2":
        return f"fsdp2: {_check_fsdp_units(accelerator, model)} sharded units, one a block"
    if strategy.startswith("zero"):
        engine: Any = model
        clip = float(engine.gradient_clipping())
        if not math.isclose(clip, max_grad_norm):
            raise UsageError(f"gradient_clipping: ZeRO clips at {clip}, the experiment asks for {max_grad_norm}")
        return f"{strategy}: clips at {clip:g} in its own step"
    return f"{strategy}: {accelerator.num_processes} process(es) on {accelerator.device.type}"


def _check_fsdp_units(accelerator: Accelerator, model: torch.nn.Module) -> int:
    from torch.distributed.fsdp import FSDPModule

    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if len(units) < 2:
        plugin: Any = accelerator.state.fsdp_plugin
        raise UsageError(
            f"fsdp_auto_wrap_policy: {plugin.auto_wrap_policy} wrapped {len(units)} module of {type(model).__name__}, "
            "so the whole model would be gathered at once; use TRANSFORMER_BASED_WRAP without naming classes "
            f"(the model names {getattr(model, '_no_split_modules', None)})"
        )
    return len(units)
