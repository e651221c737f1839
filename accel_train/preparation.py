"""Build the model and prepare it for training: weights, speed options, optimizer, strategy, restore."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import nn

from accel_train import initial_weights, simulated
from accel_train.checkpoints.restore import restore
from accel_train.frozen_weights import offload_frozen, resolve_base
from accel_train.linting.reporting import log_findings
from accel_train.metrics.logs import details, info, log_file
from accel_train.metrics.recorder import RunInfo
from accel_train.runtime.strategy import (
    apply_fsdp2_prefetch,
    device_of_updates,
    embeddings_optional,
    name_wrapped_classes,
    refuse_unshardable,
    strategy_of,
    verify_prepared,
)
from accel_train.speed.apply import Applied, SpeedOptions, apply_speed_options
from accel_train.train_state import Experiment, TrainState
from accel_train.training.ema import build_ema, refuse_wide
from accel_train.training.gradients.sync import resolve_sync
from accel_train.training.health.options import has_replicas, nothing_to_compare, refuse_inexact
from accel_train.training.optimizers import build_optimizer
from accel_train.training.shards import Shards, exact_masters
from accel_train.training.step_guard import StepGuard, resolve_step_guard

if TYPE_CHECKING:
    from accel_train.speed.attention.other_libraries import Example
    from accel_train.speed.attention.table import AttentionNeeds
    from accel_train.store.pretrained_base import PretrainedBase, TrainedBase

logger = logging.getLogger(__name__)
P = ParamSpec("P")
NOTHING: Mapping[str, Sequence[str]] = MappingProxyType({})
STEP_GUARD = "step_guard"
"""Key among the choices of a run: whether host or device detects a non-finite step. Not an option."""


def build_model(opened: Experiment, model: Callable[P, nn.Module], *shape: P.args, **named: P.kwargs) -> nn.Module:
    """Return ``model(*shape)`` with initial weights from the experiment's seed, the same on every process. Collective.

    Under FSDP2, and under DDP on GPUs, one process of each host calls ``model``, and the others get its modules and map
    its memory. An error of one process is raised on all.

    Raises ``UsageError`` with the numbers for a model that cannot fit, before any memory is allocated.
    """
    config = opened.config
    accelerator = opened.accelerator
    simulation = simulated.active()
    if simulation is not None:
        return simulation.build_model(accelerator, lambda: model(*shape, **named))
    size = initial_weights.size_that_fits(opened, lambda: model(*shape, **named))
    log_findings(config, accelerator, "model", parameters=size.trained, frozen_bytes=size.frozen_bytes)

    def make() -> nn.Module:
        # Set here, because the count above has built the model once already, on the meta device.
        torch.manual_seed(config.seed)
        return model(*shape, **named)

    return initial_weights.build_once_per_host(accelerator, make)


def _trained_in_fp32(model: nn.Module) -> list[str]:
    """Cast trained parameters to fp32, in which the optimizer steps. Return a notice if any was narrower.

    Raises ``UsageError`` for wider ones.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    refuse_wide(trained)
    narrow = [parameter for parameter in trained.values() if parameter.dtype in (torch.bfloat16, torch.float16)]
    for parameter in narrow:
        parameter.data = parameter.data.float()
    if not narrow:
        return []
    values = sum(parameter.numel() for parameter in narrow)
    return [f"{values:,} trained values cast to fp32: the optimizer steps on fp32 weights"]


def prepare(
    opened: Experiment,
    model: nn.Module,
    needs: AttentionNeeds | None = None,
    freezable: Mapping[str, Sequence[str]] = NOTHING,
    base: PretrainedBase | TrainedBase | None = None,
    example: Example | None = None,
    names_in_weights: Mapping[str, str | None] | None = None,
) -> TrainState:
    """Load initial weights, apply speed options, build the optimizer, prepare with Accelerate, restore the checkpoint.

    Collective: every process calls it with the same weights in ``model``. Parameters with ``requires_grad`` off stay
    frozen. Checkpoints can leave them out only if ``base`` names the files that ``model`` was loaded from.

    ``needs`` describes the attention of a model of this package. A transformers or diffusers model has none: its
    library selects the kernel, or ``--attention`` names one that the library has. ``example`` calls such a model on a
    few small inputs, so that the kernel can be checked. ``freezable`` maps each part that is frozen in some steps only
    to prefixes of its modules. ``names_in_weights`` maps each tensor of the model to its name in the weights of
    ``init_from``, or to None if it keeps its initial value; by default the names are the same. The schedule and the
    loader are never prepared: both are functions of the step.

    Raises ``UsageError`` for options that cannot be obeyed, for a base that has changed since the checkpoint, and for
    a model that was not wrapped as the strategy requires.
    """
    config = opened.config
    accelerator = opened.accelerator
    strategy = strategy_of(accelerator)
    refuse_inexact(config.health, model, strategy, config.precision, config.distributed.comm_hook)
    replicated = has_replicas(accelerator, strategy)
    # A sharded module cannot load files of whole tensors, and float8 must find the weights in place.
    reference, notices = _load_weights(opened, model, base, names_in_weights)
    notices += name_wrapped_classes(accelerator, model)
    refuse_unshardable(accelerator, model)
    applied = _apply_speed_options(opened, model, needs, example)
    # Accelerate points the optimizer's groups to the sharded parameters, so it must hold the whole ones before.
    optimizer, optimizer_reason = _build_optimizer(opened, model, freezable)
    if config.offload_frozen:
        notices.append(offload_frozen(accelerator, opened.run, model, config.compile.mode))
    # Copied before `accelerator.prepare`, because DeepSpeed rounds the weights there.
    masters = exact_masters(model, config.precision)
    simulation = simulated.active()
    around = nullcontext() if simulation is None else simulation.preparing()
    with embeddings_optional(model), around:
        model, optimizer = accelerator.prepare(model, optimizer)
    weights = Shards(model, optimizer, masters)
    guard, guard_reason = _build_guard(opened, optimizer, on_cpu=simulation is not None)
    # The EMA of a fresh start begins at these weights. A restore then overwrites both.
    ema = build_ema(config.ema, weights, guard, optimizer)
    free = config.run_options().free_to_change
    restore(opened.run, accelerator, weights, ema, free, has_other_data=opened.history.has_changed)
    wrapped = verify_prepared(accelerator, model, config.optimizer.max_grad_norm)
    prefetch = apply_fsdp2_prefetch(config.distributed, model)
    _, sync_reason = resolve_sync(config.sync, accelerator)
    choices = {**applied.choices, "optimizer.name": optimizer_reason, "sync": sync_reason, STEP_GUARD: guard_reason}
    notices += nothing_to_compare(config.health, accelerator.num_processes, replicated=replicated)
    info(logger, wrapped, *notices, *prefetch, *applied.notices, *config.health.describe())
    _log_choices(opened, choices)
    run_info = _run_info(opened, applied, optimizer, choices)
    report = opened.report_directory
    return TrainState(accelerator, model, optimizer, ema, run_info, config.sync, guard, report, reference)


def _load_weights(
    opened: Experiment,
    model: nn.Module,
    base: PretrainedBase | TrainedBase | None,
    names: Mapping[str, str | None] | None,
) -> tuple[Mapping[str, Any] | None, list[str]]:
    """Load the weights of the start. Returns the reference to the files behind ``model``, and notices."""
    config = opened.config
    reference, notices = resolve_base(
        opened.accelerator, opened.run, model, base, option=config.checkpoints.base, precision=config.precision
    )
    initial_weights.load(opened, model, reference, names)
    return reference, [*notices, *_trained_in_fp32(model)]


def _build_guard(opened: Experiment, optimizer: Any, *, on_cpu: bool) -> tuple[StepGuard, str]:
    """Build the step guard, and attach what follows the losses, so that left-out steps do not move that either.

    Also returns where the guard decides, host or device, with the reason.
    """
    config = opened.config
    guard, reason = resolve_step_guard(opened.accelerator, optimizer, config.health, on_cpu=on_cpu)
    guard.plateau = opened.plateau
    guard.noise_scale = opened.noise_scale
    if config.balance.is_on:
        # Imported here, because most runs do not need it.
        from accel_train.training.feedback.balance import LossBalance

        guard.balance = LossBalance(config.balance)
    return guard, reason


def _apply_speed_options(
    opened: Experiment, model: nn.Module, needs: AttentionNeeds | None, example: Example | None
) -> Applied:
    config = opened.config
    options = SpeedOptions(config.attention, config.activation_checkpointing, config.compile, config.float8)
    return apply_speed_options(
        model,
        options,
        opened.accelerator.device,
        config.precision,
        needs,
        opened.most_accumulated,
        strategy_of(opened.accelerator),
        example,
    )


def _build_optimizer(
    opened: Experiment, model: nn.Module, freezable: Mapping[str, Sequence[str]]
) -> tuple[torch.optim.Optimizer, str]:
    return build_optimizer(
        model,
        opened.config.optimizer,
        device_of_updates(opened.accelerator),
        freezable,
        strategy=strategy_of(opened.accelerator),
        precision=opened.config.precision,
    )


def _log_choices(opened: Experiment, choices: Mapping[str, str]) -> None:
    """Log what was chosen and why, by option. The console shows only the options that were set."""
    for option, choice in choices.items():
        log = details if opened.config.is_default(option) else info
        log(logger, choice)
    info(logger, f"automatic choices, with reasons: {log_file(opened.run.directory, rank=0)}")


def _run_info(
    opened: Experiment, applied: Applied, optimizer: torch.optim.Optimizer, choices: Mapping[str, str]
) -> RunInfo:
    facts = {
        **applied.facts,
        "run_id": opened.run.run_id,
        "strategy": strategy_of(opened.accelerator),
        "choices": choices,
    }
    return RunInfo(facts, applied.compiled, optimizer)
