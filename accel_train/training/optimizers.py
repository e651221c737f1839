"""Optimizers with parameter groups by module type, and the two settings that change during a run: the learning rate
and the frozen parts. Both are written into `param_groups`. Accelerate's wrapper, FSDP2 and DeepSpeed all keep these
(DeepSpeed replaces the tensors of a group, never its other keys).
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
from torch import nn

from accel_train.config import FractionBelowOne, NonNegativeFloat, PositiveFloat, UsageError, refuse_without_effect
from accel_train.training.optimizer_choice import (
    OwnOptimizer,
    check_name,
    is_own,
    keyword_arguments,
    optimizer_class,
    refuse_combination,
    refuse_outside_table,
    try_saving,
)
from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW
from accel_train.training.optimizer_classes.muon import MuonAdamW, MuonPrecision
from accel_train.training.optimizer_classes.offload import HostAdamW
from accel_train.training.optimizer_classes.trial import one_pass_obstacle
from accel_train.training.parameter_groups import parameter_groups, read_factors
from accel_train.training.parameters import ParamGroup
from accel_train.training.shards import OWN_KEY
from accel_train.training.step_calls import note_learning_rates

_FUSED_DEVICES = ("cuda", "xpu", "mps", "cpu")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, Muon with AdamW, or a class of your own. Weight decay acts on matrices and convolutions only, never on
    norms, biases and embeddings. Options of another optimizer are refused."""

    name: str = "adamw"
    """adamw. muon: Muon for the matrices inside the blocks (not modulation, embeddings, heads), AdamW for the rest,
    not under ZeRO. adamw8bit: state in 8 bits (bitsandbytes, one process or DDP), 2 bytes per parameter instead of 8.
    adamw_offload: state and update in host memory, one GPU. Else module:Class of any torch.optim.Optimizer, on one
    process or DDP. A trial at the start checks that its state survives a save, and refuses it otherwise."""

    arguments: tuple[str, ...] = ()
    """module:Class: further keyword arguments as KEY=VALUE, such as d_coef=0.5 betas=[0.9,0.98,0.99]. Not lr and
    weight_decay; betas, eps and fused are passed if the class takes them."""

    lr: PositiveFloat = 1e-4
    """Peak learning rate, per optimizer step. The schedule multiplies it by a factor from 0 to 1. Never
    scaled by the number of processes or the batch."""

    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95)
    """Decay per optimizer step of the running mean of the gradient and of its square. 0.95 forgets within
    about 20 steps, 0.999 within 1000."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the running square. Larger values damp the step where gradients are tiny."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled decay: a decayed weight loses lr * weight_decay of its value each step. 0: off. Norms, biases and
    embeddings never decay."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Upper limit of the L2 norm of the gradient over all parameters and processes. A larger gradient is
    scaled down to it. 0: no clipping."""

    lr_factors: tuple[str, ...] = ()
    """Other learning rates for some modules, as MODULE=FACTOR: head=10 blocks.0=0.1. MODULE is a name as in
    named_parameters(), or a pattern with * for whole parameter names. Where several fit, the last counts."""

    no_decay: tuple[str, ...] = ()
    """Further modules without weight decay, named as in lr_factors: pos_embed blocks.0."""

    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole AdamW update instead of several per tensor. auto: where the device has it."""

    muon_lr: PositiveFloat | None = None
    """muon: peak learning rate of the matrices. None: lr, suitable for match_rms_adamw. With original about 0.02."""

    muon_weight_decay: NonNegativeFloat | None = None
    """muon: weight decay of the matrices. None: weight_decay."""

    muon_momentum: FractionBelowOne | None = None
    """muon: decay of the running mean of the gradient. None: 0.95."""

    muon_nesterov: bool | None = None
    """muon: look one gradient ahead of the running mean. None: True."""

    muon_adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = None
    """muon: the learning rate of an m x n matrix is multiplied by 0.2 * sqrt(max(m, n)) (match_rms_adamw: AdamW's
    usual size of update) or by sqrt(max(1, m/n)) (original). None: match_rms_adamw."""

    muon_precision: MuonPrecision | None = None
    """muon: precision of the Newton-Schulz steps. None: fp32. bf16 is faster on a GPU, but the loss then depends on
    the division of the batch: after 40 steps losses differ by about 1e-3 instead of 1e-7."""

    def __post_init__(self) -> None:
        check_name(self.name)
        read_factors(self.lr_factors)
        because = f"with optimizer.name: {self.name}"
        if is_own(self.name):
            keyword_arguments(self.arguments)
        else:
            refuse_without_effect(self, "optimizer", ["arguments"], because, "name a class as module:Class")
        if self.name != "muon":
            of_muon = [field.name for field in fields(self) if field.name.startswith("muon_")]
            refuse_without_effect(self, "optimizer", of_muon, because, "give --optimizer.name muon")
        if self.name in ("adamw8bit", "adamw_offload"):
            refuse_without_effect(self, "optimizer", ["fused"], f"{because}, whose kernels are always fused")

    @property
    def decay_of_muon(self) -> float:
        """Weight decay of the matrices that Muon updates."""
        return self.weight_decay if self.muon_weight_decay is None else self.muon_weight_decay

    def refuse_strategy(self, strategy: str, precision: str) -> None:
        """Raise ``UsageError`` for an optimizer that no machine runs under ``strategy``.

        Imports no class: the recipe may define it, and a login node may lack its package.
        """
        refuse_outside_table(self.name, strategy, precision)

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for the class of ``name``, without lr. ``arguments`` win over betas, eps and fused.

        Raises ``UsageError`` for a value of these three that the class does not take.
        """
        # Read from the class, because optimizers disagree about betas and eps, and an unknown keyword would be a
        # TypeError.
        taken = inspect.signature(optimizer_class(self.name)).parameters
        keywords = keyword_arguments(self.arguments)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("betas", "eps", "fused") or field.name in keywords:
                continue
            # Adafactor has a pair of eps.
            suits = field.name in taken and not (field.name == "eps" and isinstance(taken["eps"].default, tuple))
            if suits and value != "auto":
                keywords[field.name] = value
            elif not suits and value != field.default:
                default = field.default
                words = " ".join(map(str, default)) if isinstance(default, tuple) else default
                raise UsageError(
                    f"optimizer.{field.name}: {value}: {self.name} has no such argument, so the default is required. "
                    f"Give --optimizer.{field.name} {words}."
                )
        return keywords


class HasParameterGroups(Protocol):
    """A torch optimizer, Accelerate's wrapper around one, or DeepSpeed's own."""

    @property
    def param_groups(self) -> list[ParamGroup]: ...


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    device: torch.device,
    freezable: Mapping[str, Sequence[str]] | None = None,
    *,
    strategy: str = "single",
    precision: str = "fp32",
) -> tuple[torch.optim.Optimizer, str]:
    """Build the optimizer over the trainable parameters, in the order of `named_parameters()`, and a notice.

    Call it before `prepare`. `device` holds the parameters when they are updated, and `strategy` is
    `strategy_of(accelerator)`. Combinations outside `optimizer_choice.TABLE` are refused.
    `freezable` names parts of the model by module prefixes (`{"text": ["text_blocks", "text_head"]}`).
    Each part gets its own groups, so `set_frozen` can switch it later without rebuilding anything.

    Each group has `name` ("decay", "no_decay", "muon", "text/decay", "decay x0.1", ...), `part`, `base_lr` and
    `base_weight_decay`.
    """
    refuse_combination(config.name, strategy, precision, device)
    groups = parameter_groups(model, config, freezable or {})
    optimizer, reason = _build(config, device, groups, strategy)
    sizes: list[str] = []
    for group in groups:
        values = sum(parameter.numel() for parameter in group["params"])
        sizes.append(f"{group['name']} {len(group['params'])} tensors ({values:,} values)")
    return optimizer, f"{reason}; {', '.join(sizes)}"


def _build(
    config: OptimizerConfig, device: torch.device, groups: list[ParamGroup], strategy: str
) -> tuple[torch.optim.Optimizer, str]:
    if is_own(config.name):
        return _build_own(config, device, groups)
    if config.name == "adamw8bit":
        # By name, because bitsandbytes is an extra and its import takes seconds.
        eight_bit: Any = import_module("bitsandbytes").optim.AdamW8bit
        # Each group has a decay of its own, and bitsandbytes' default of 0.01 applies to none.
        optimizer = eight_bit(groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.0)
        return optimizer, "AdamW with 8-bit state (bitsandbytes), fp32 for tensors of fewer than 4096 values"
    if config.name == "adamw_offload":
        return HostAdamW(groups, betas=config.betas, eps=config.eps), "AdamW in host memory, fused"
    fused, reason = _resolve_fused(config.fused, device, groups)
    if config.name == "muon":
        optimizer = MuonAdamW(groups, betas=config.betas, eps=config.eps, fused=fused)
        settings = next(g for g in groups if g["muon"])
        return optimizer, f"Muon (Newton-Schulz in {settings['precision']}) and AdamW, {reason}"
    return _build_adamw(config, device, groups, reason, fused=fused, strategy=strategy)


def _build_adamw(
    config: OptimizerConfig, device: torch.device, groups: list[ParamGroup], reason: str, *, fused: bool, strategy: str
) -> tuple[torch.optim.Optimizer, str]:
    notice = f"AdamW, {reason}"
    parameters = [parameter for group in groups for parameter in group["params"]]
    # DeepSpeed recognises torch's own class by its name, and gives it one flat tensor.
    if fused and len({parameter.dtype for parameter in parameters}) == 1 and not strategy.startswith("zero"):
        obstacle = one_pass_obstacle(device, parameters)
        if obstacle is None:
            notice += ", one pass for weights and EMA"
        elif device.type == "cuda":
            notice += f", torch's kernel (not one pass: {obstacle})"
        keywords: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        return FusedAdamW(groups, **keywords, one_pass=obstacle is None), notice
    # None rather than False, with which torch would take its loop over tensors instead of foreach.
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)
    return adamw, notice


def _build_own(
    config: OptimizerConfig, device: torch.device, groups: list[ParamGroup]
) -> tuple[torch.optim.Optimizer, str]:
    own = OwnOptimizer(config.name, config.keywords(), config.lr, config.weight_decay)
    holds_frozen = try_saving(own.name, own.build, own.lr, own.weight_decay, device)
    for group in groups:
        group[OWN_KEY] = holds_frozen
    return own.build(groups), f"{own.call}; a trial has shown that its state survives a save"


def set_learning_rate(optimizer: HasParameterGroups, factor: float) -> None:
    """Set lr = base_lr * factor in every group, 0 in frozen ones. Does not wait for the device.

    Raises ``UsageError`` for an optimizer whose groups lack ``base_lr`` or ``frozen``.
    """
    for group in optimizer.param_groups:
        if "frozen" not in group or "base_lr" not in group:
            raise UsageError(
                "set_learning_rate: this optimizer's parameter groups have only "
                f"{', '.join(key for key in group if key != 'params')}: base_lr (the peak learning rate) and frozen "
                "(true or false) are required in each; build it with build_optimizer, or add them before prepare: "
                "for group in optimizer.param_groups: group.update(base_lr=group['lr'], frozen=False)"
            )
        group["lr"] = 0.0 if group["frozen"] else group["base_lr"] * factor
    note_learning_rates(optimizer, factor)


def set_frozen(optimizer: HasParameterGroups, parts: Collection[str]) -> None:
    """Freeze exactly these parts (names of `freezable`) and release all others. Once per phase, on all processes.

    A frozen part has learning rate 0 and weight decay 0, so the optimizer leaves its values as they are. A
    `GradientWindow` sets its gradient to zero, so it counts neither in the gradient norm nor in the clipping.
    Its running means see the zeros and fade. The step count is common to all parameters and continues. A released
    group keeps lr 0 until the next `set_learning_rate`.
    """
    known = {group["part"] for group in optimizer.param_groups} - {""}
    if unknown := sorted(set(parts) - known):
        raise UsageError(
            f"frozen={sorted(parts)}: {unknown} is not a freezable part of this optimizer, whose parts are "
            f"{sorted(known)}. Name one of those, or pass `freezable` to build_optimizer."
        )
    for group in optimizer.param_groups:
        if parts and group.get(OWN_KEY) is False:
            raise UsageError(
                f"frozen={sorted(parts)}: the optimizer moves parameters whose learning rate and weight decay are 0, "
                "as a trial at the start has shown, so it cannot freeze a part. Use --optimizer.name adamw, or train "
                "without phases that freeze."
            )
        group["frozen"] = group["part"] in parts
        group["weight_decay"] = group["base_weight_decay"]
        if group["frozen"]:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0


def _resolve_fused(fused: bool | Literal["auto"], device: torch.device, groups: list[ParamGroup]) -> tuple[bool, str]:
    if fused is False:
        return False, "not fused (fused=False)"
    obstacle = _fused_obstacle(device, groups)
    if obstacle is None and fused is True:
        return True, "fused (asked for)"
    if obstacle is None:
        return True, f"fused (auto: {device.type} has it)"
    if fused is True:
        raise UsageError(
            f"optimizer.fused=True: {obstacle}, it needs real floating-point parameters on one of "
            f"{', '.join(_FUSED_DEVICES)}. Set it to auto or False."
        )
    return False, f"not fused (auto: {obstacle})"


def _fused_obstacle(device: torch.device, groups: list[ParamGroup]) -> str | None:
    if device.type not in _FUSED_DEVICES:
        return f"torch has no fused AdamW on {device.type}"
    parameters = [p for group in groups for p in group["params"]]
    unsupported = {str(p.dtype) for p in parameters if not p.is_floating_point()}
    if unsupported:
        return f"torch has no fused AdamW for {', '.join(sorted(unsupported))}"
    return None
