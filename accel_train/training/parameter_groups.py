"""Parameter groups of an optimizer: by module type, by part of the model, and by factor of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from torch import nn

from accel_train.config import UsageError
from accel_train.training.parameters import Kind, ParamGroup, kinds, mark_part, unmark_parts
from accel_train.wording import shortened

if TYPE_CHECKING:
    from accel_train.training.optimizers import OptimizerConfig

KINDS: tuple[Kind, ...] = ("decay", "no_decay", "muon")


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, freezable: Mapping[str, Sequence[str]]
) -> list[ParamGroup]:
    """Return the groups of ``build_optimizer``, in each part those without a factor first. Raises ``UsageError``."""
    trainable = _trainable(model)
    part_of = _part_of_each(trainable, freezable)
    factor_of = _factor_of_each(trainable, config.lr_factors)
    kind_of_id = kinds(model, muon=config.name == "muon")
    kind_of: dict[str, Kind] = {name: kind_of_id[id(parameter)] for name, parameter in trainable.items()}
    spared = _spared(kind_of, config)
    members: dict[_Key, list[nn.Parameter]] = {}
    unmark_parts(model)
    for name, parameter in trainable.items():
        kind: Kind = kind_of[name]
        # Muon updates a matrix without decay as well.
        if name in spared and kind == "decay":
            kind = "no_decay"
        key = _Key(part_of.get(name, ""), factor_of.get(name, 1.0), kind, name in spared and kind == "muon")
        members.setdefault(key, []).append(parameter)
        # The gradient window has to know what is trained, and which gradients to set to zero.
        mark_part([parameter], key.part)
    parts = ["", *freezable]
    order = sorted(
        members, key=lambda key: (parts.index(key.part), key.factor != 1, key.factor, KINDS.index(key.kind), key.spared)
    )
    # Without a matrix it would be AdamW under another name.
    if config.name == "muon" and not any(key.kind == "muon" for key in members):
        _refuse_without_matrices(model)
    return [_group(members[key], key, config) for key in order]


class _Key(NamedTuple):
    """Properties that the parameters of a group share."""

    part: str
    factor: float
    kind: Kind
    spared: bool
    """Muon without weight decay."""


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise UsageError(
            "model: has no trainable parameter, but at least 1 is needed. Set requires_grad on what to train."
        )
    return trainable


def _refuse_without_matrices(model: nn.Module) -> NoReturn:
    raise UsageError(
        f"optimizer.name: muon: {type(model).__name__} has no trainable 2-D matrix inside its blocks, but at least 1 "
        "is needed. Blocks are the classes in _no_split_modules, else the elements of each nn.ModuleList. Use "
        "--optimizer.name adamw."
    )


def _group(members: list[nn.Parameter], key: _Key, config: OptimizerConfig) -> ParamGroup:
    part, factor, kind, spared = key
    lr = config.lr
    weight_decay = 0.0 if kind == "no_decay" else config.weight_decay
    if kind == "muon":
        # The size of Muon's updates follows from the shape of the matrix, not from its gradient: hence an own rate.
        lr = _default(config.muon_lr, config.lr)
        weight_decay = 0.0 if spared else config.decay_of_muon
    lr *= factor
    name = f"{part}/{kind}" if part else kind
    if spared:
        name += " no_decay"
    if factor != 1:
        name += f" x{factor:g}"
    group: ParamGroup = {
        "params": members,
        "name": name,
        "part": part,
        "frozen": False,
        "lr": lr,
        "base_lr": lr,
        "weight_decay": weight_decay,
        "base_weight_decay": weight_decay,
        "muon": kind == "muon",
    }
    if kind == "muon":
        group |= {
            "momentum": _default(config.muon_momentum, 0.95),
            "nesterov": config.muon_nesterov is not False,
            "adjust_lr_fn": config.muon_adjust_lr_fn or "match_rms_adamw",
            "precision": config.muon_precision or "fp32",
        }
    return group


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _part_of_each(names: Collection[str], freezable: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Map parameter names to parts. Refuses prefixes without a parameter and prefixes that overlap, because a part
    frozen by mistake would go unnoticed."""
    part_of: dict[str, str] = {}
    for part, prefixes in freezable.items():
        for prefix in prefixes:
            matched = [name for name in names if _is_below(name, prefix)]
            if not matched:
                raise ValueError(f"freezable[{part!r}]: no trainable parameter is under {prefix!r}")
            for name in matched:
                if part_of.setdefault(name, part) != part:
                    raise ValueError(f"freezable: {name!r} is in both {part_of[name]!r} and {part!r}")
    return part_of


def _spared(kind_of: Mapping[str, Kind], config: OptimizerConfig) -> set[str]:
    """Return the parameters that ``optimizer.no_decay`` exempts. Refuses an entry that exempts none."""
    decay_of: dict[Kind, float] = {"decay": config.weight_decay, "muon": config.decay_of_muon, "no_decay": 0.0}
    decayed = [name for name, kind in kind_of.items() if decay_of[kind]]
    spared: set[str] = set()
    for module in config.no_decay:
        taken = {name for name in decayed if _fits(name, module)}
        if not taken:
            raise UsageError(
                f"optimizer.no_decay: {module} removes weight decay from no parameter: none with decay is in a module "
                f"of that name or matches the pattern. Parameters with decay: {shortened(decayed, 8)}"
            )
        spared |= taken
    return spared


def _fits(name: str, module: str) -> bool:
    return _is_below(name, module) or fnmatchcase(name, module)


def _is_below(name: str, prefix: str) -> bool:
    # With the dot, so that blocks.1 does not take blocks.10 as well.
    return name == prefix or name.startswith(f"{prefix}.")


def read_factors(texts: Sequence[str]) -> dict[str, float]:
    """Parse the ``MODULE=FACTOR`` texts of ``optimizer.lr_factors``. Raises ``UsageError``."""
    factors: dict[str, float] = {}
    for text in texts:
        module, _, value = text.rpartition("=")
        try:
            factor = float(value)
        except ValueError:
            factor = math.nan
        problem = None
        if not module or not 0 <= factor < math.inf:
            problem = "must be MODULE=FACTOR with a finite factor of at least 0, such as head=10"
        elif module in factors:
            problem = "is given twice: leave one out"
        if problem:
            raise UsageError(f"optimizer.lr_factors: {text!r} {problem}")
        factors[module] = factor
    return factors


def _factor_of_each(names: Collection[str], texts: Sequence[str]) -> dict[str, float]:
    """Map parameter names to factors of their learning rates. Refuses a factor that no parameter ends up with."""
    chosen: dict[str, str] = {}
    factors = read_factors(texts)
    for module in factors:
        for name in names:
            if _fits(name, module):
                chosen[name] = module
    for module, factor in factors.items():
        if module not in chosen.values():
            raise UsageError(
                f"optimizer.lr_factors: {module}={factor:g} changes no trainable parameter: none is in a module of "
                "that name or matches the pattern, or a later entry takes all of them. Trainable parameters: "
                f"{shortened(list(names), 8)}"
            )
    return {name: factors[module] for name, module in chosen.items()}
