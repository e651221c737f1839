"""AdamW with parameter groups by module type, and the two things that move during a run: the learning rate
and which parts are frozen. Both are written into `param_groups`, which Accelerate's wrapper, FSDP2 and
DeepSpeed all keep (DeepSpeed replaces the tensors of a group, never its other keys).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from accel_train.config import FractionBelowOne, NonNegativeFloat, PositiveFloat, UsageError

_FUSED_DEVICES = ("cuda", "xpu", "mps", "cpu")
_MATRICES = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,  # pyright: ignore[reportPrivateUsage]
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. Weight decay acts on matrices and convolutions only, never on norms, biases and embeddings."""

    lr: PositiveFloat = 1e-4
    """Peak learning rate, per optimizer step; the schedule multiplies it by a factor from 0 to 1. Never
    scaled by the number of processes or the batch."""

    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95)
    """Decay per optimizer step of the running mean of the gradient and of its square. 0.95 forgets within
    about 20 steps, 0.999 within 1000."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the running square; larger values damp the step where gradients are tiny."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled decay: a decayed weight loses lr * weight_decay of its value each step. 0 = off."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Upper limit of the L2 norm of the gradient over all parameters and processes; a larger gradient is
    scaled down to it. 0 = no clipping."""

    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole update instead of several per tensor; auto = where the device has it."""


class HasParameterGroups(Protocol):
    """A torch optimizer, Accelerate's wrapper around one, or DeepSpeed's own."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    device: torch.device,
    freezable: Mapping[str, Sequence[str]] | None = None,
) -> tuple[torch.optim.AdamW, str]:
    """AdamW over the trainable parameters, in the order of `named_parameters()`, and a line for the log.

    Call it before `prepare`, with the device that the parameters will be on when they are updated.
    `freezable` names parts of the model by module prefixes (`{"text": ["text_blocks", "text_head"]}`):
    each gets groups of its own, which `set_frozen` can switch later without building anything again.

    Each group has `name` ("decay", "no_decay", "text/decay", ...), `part`, `base_lr` and
    `base_weight_decay`.
    """
    groups = _parameter_groups(model, config, freezable or {})
    fused, reason = _resolve_fused(config.fused, device, groups)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)
    sizes = ", ".join(
        f"{g['name']} {len(g['params'])} tensors ({sum(p.numel() for p in g['params']):,} values)" for g in groups
    )
    return optimizer, f"AdamW, {reason}; {sizes}"


def set_learning_rate(optimizer: HasParameterGroups, factor: float) -> None:
    """Set lr = base_lr * factor in every group, 0 in those that are frozen. Does not wait for the device."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if group["frozen"] else group["base_lr"] * factor


def set_frozen(optimizer: HasParameterGroups, parts: Collection[str]) -> None:
    """Freeze exactly the parts named (of `freezable`), release all others; once per phase, on all processes.

    A frozen part has learning rate 0 and weight decay 0, so AdamW leaves its values as they are. Its
    parameters keep `requires_grad`: switched off after wrapping, DDP raises, FSDP2 leaves the gradient
    None and ZeRO fills zeros, three different trainings. So its gradients still come, take part in the
    gradient norm, and update the running means and the step count of AdamW: when it is released it moves
    at once by current gradients, and all parameters have one common step count. A released group keeps lr
    0 until the next `set_learning_rate`.
    """
    known = {group["part"] for group in optimizer.param_groups} - {""}
    if unknown := sorted(set(parts) - known):
        raise UsageError(
            f"frozen={sorted(parts)}: {unknown} is no freezable part of this optimizer, "
            f"the parts are {sorted(known)}. Name one of those, or pass `freezable` to build_optimizer."
        )
    for group in optimizer.param_groups:
        group["frozen"] = group["part"] in parts
        group["weight_decay"] = 0.0 if group["frozen"] else group["base_weight_decay"]
        if group["frozen"]:
            group["lr"] = 0.0


def _parameter_groups(
    model: nn.Module, config: OptimizerConfig, freezable: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise UsageError("model: has no trainable parameter, at least 1 is needed. Set requires_grad on what to train.")
    part_of = _parts(trainable, freezable)
    decaying = _decaying(model)
    groups: list[dict[str, Any]] = []
    for part in ("", *freezable):
        for decays in (True, False):
            members = [p for n, p in trainable.items() if part_of.get(n, "") == part and (id(p) in decaying) == decays]
            if members:  # DeepSpeed cannot flatten an empty group
                groups.append(_group(members, part, decays, config))
    in_groups = [id(p) for group in groups for p in group["params"]]
    assert sorted(in_groups) == sorted(id(p) for p in trainable.values()), "a parameter is in no group or in two"
    return groups


def _group(members: list[nn.Parameter], part: str, decays: bool, config: OptimizerConfig) -> dict[str, Any]:
    weight_decay = config.weight_decay if decays else 0.0
    return {
        "params": members,
        "name": (f"{part}/" if part else "") + ("decay" if decays else "no_decay"),
        "part": part,
        "frozen": False,
        "base_lr": config.lr,
        "weight_decay": weight_decay,
        "base_weight_decay": weight_decay,
    }


def _parts(names: Collection[str], freezable: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Parameter name -> part. Refuses prefixes that name nothing or overlap: a part frozen in error is
    silent."""
    part_of: dict[str, str] = {}
    for part, prefixes in freezable.items():
        for prefix in prefixes:
            matched = [name for name in names if name == prefix or name.startswith(f"{prefix}.")]
            if not matched:
                raise ValueError(f"freezable[{part!r}]: no trainable parameter is under {prefix!r}")
            for name in matched:
                if part_of.setdefault(name, part) != part:
                    raise ValueError(f"freezable: {name!r} is in both {part_of[name]!r} and {part!r}")
    return part_of


def _decaying(model: nn.Module) -> set[int]:
    """Ids of the parameters with weight decay. One that is shared with an embedding or a norm has none."""
    yes: set[int] = set()
    no: set[int] = set()
    for owner, parameter in _owned_parameters(model):
        (yes if _decays(owner, parameter) else no).add(id(parameter))
    return yes - no


def _owned_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            yield module, parameter


def _decays(owner: nn.Module, parameter: nn.Parameter) -> bool:
    if parameter.ndim < 2:
        return False
    if isinstance(owner, _MATRICES):
        return True
    if any("Norm" in base.__name__ or "Embedding" in base.__name__ for base in type(owner).__mro__):
        return False
    # A bare tensor on a module that has children is a position table, a gate or a modulation bias; on a
    # module without any it is the module's own operator (GPT-2's Conv1D, a spectral convolution).
    return next(owner.children(), None) is None


def _resolve_fused(
    fused: bool | Literal["auto"], device: torch.device, groups: list[dict[str, Any]]
) -> tuple[bool, str]:
    if fused is False:
        return False, "not fused (fused=False)"
    obstacle = _fused_obstacle(device, groups)
    if obstacle is None:
        return True, f"fused ({'asked for' if fused is True else f'auto: {device.type} has it'})"
    if fused is True:
        raise UsageError(
            f"fused=True: {obstacle}, it needs real floating-point parameters on one of "
            f"{', '.join(_FUSED_DEVICES)}. Set fused to auto or False."
        )
    return False, f"not fused (auto: {obstacle})"


def _fused_obstacle(device: torch.device, groups: list[dict[str, Any]]) -> str | None:
    if device.type not in _FUSED_DEVICES:
        return f"torch has no fused AdamW on {device.type}"
    others = {str(p.dtype) for group in groups for p in group["params"] if not p.is_floating_point()}
    return f"torch has no fused AdamW for {', '.join(sorted(others))}" if others else None
