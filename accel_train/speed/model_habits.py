"""Habits of models of transformers and diffusers in training: dropout, caches, batch norms, dtypes, recomputation.

Each is respected, switched off, or refused by name, and reported once at the start.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.precision import Precision, dtype_of, kept_in_fp32
from accel_train.wording import shortened

logger = logging.getLogger(__name__)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
RATES = ("attention_dropout", "attn_dropout", "activation_dropout", "dropout", "dropout_p", "dropout_prob")
"""Attributes of modules that call torch's dropout themselves, with their rate."""
HEADS = ("summary", "classifier")
"""First words of the config rates that belong to a head, and parts of the names of head modules."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def settle_habits(model: nn.Module, precision: Precision, strategy: str, checkpointing: str) -> list[str]:
    """Settle how the model behaves in training, in place, before it is prepared, and return notices.

    ``checkpointing`` is the mode of activation checkpointing to be applied. Warns once about dropout and about training
    batch norms: both depend on the machine. Raises ``UsageError`` for a model that recomputes by itself already, and
    for a strategy that would lower weights that the model keeps in fp32.
    """
    _refuse_lowered(model, precision, strategy)
    notices = [*freeze_statistics(model), *_own_checkpointing(model, checkpointing), *_leave_out_cache(model)]
    _warn_about_batch_norm(model)
    warning = dropout_warning(model)
    if warning:
        logger.warning(warning)
    return notices


def dropout_warning(model: nn.Module) -> str | None:
    """Return a warning about active dropout in a model: it draws from torch's generator. None without any."""
    drawing = [(name, module) for name, module in model.named_modules() if _drops(module)]
    if not drawing:
        return None
    name, module = drawing[0]
    rates = sorted({rate for part in model.modules() for rate in _rates_in_config(part) if _is_of(model, rate)})
    # A model that was loaded has no option that sets them.
    place = "in its config.json" if getattr(model, "name_or_path", "") else "of its config"
    remedy = f"set {', '.join(rates)} {place} to 0" if rates else "set their rates to 0"
    return (
        f"dropout of {len(drawing)} modules ({name} is the first, a {type(module).__name__}) is drawn from torch's "
        f"generator in each process, so the trajectory depends on the machine; {remedy} to prevent this, or draw a "
        "mask with accel_train.rng"
    )


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, DROPOUTS):
        return module.p > 0
    # Not getattr: a diffusers model would look into its config, and warn.
    return any(_is_rate(vars(module).get(name)) for name in RATES)


def _is_rate(value: object) -> bool:
    return isinstance(value, float) and 0 < value <= 1


def _rates_in_config(module: nn.Module) -> list[str]:
    """Return the names of dropout rates above 0 in the config of a transformers or diffusers model."""
    config: Any = getattr(module, "config", None)
    values: Any = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return [name for name, value in values.items() if "drop" in name and _is_rate(value)]


def _is_of(model: nn.Module, rate: str) -> bool:
    """Return False for the rate of a head that the model does not have: a config serves all models of its kind."""
    head, _, _ = rate.partition("_")
    return head not in HEADS or any(head in name for name, _ in model.named_modules())


def _own_checkpointing(model: nn.Module, mode: str) -> list[str]:
    own = sum(1 for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True)
    if not own:
        return []
    name = type(model).__name__
    if mode != "none":
        raise UsageError(
            f"activation_checkpointing.mode {mode}: {name} already recomputes by itself: gradient_checkpointing is on "
            f"in {own} of its modules. Only one of the two may be on: switch the model's off before prepare "
            "(gradient_checkpointing_disable of transformers, disable_gradient_checkpointing of diffusers), or leave "
            "the option out"
        )
    return [f"activation checkpointing: {name}'s own, gradient_checkpointing is on in {own} of its modules"]


def _leave_out_cache(model: nn.Module) -> list[str]:
    """Switch ``use_cache`` off where gradients are taken: a recomputed block would fill its cache a second time."""
    caching = [module for module in model.modules() if _fills_cache(module)]
    for module in caching:
        module.register_forward_pre_hook(_without_cache, with_kwargs=True)
    return ["use_cache is off while the model trains"] if caching else []


def _fills_cache(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    # The config of a model is also that of its layers.
    if getattr(config, "use_cache", False) is not True or not hasattr(module, "set_attn_implementation"):
        return False
    return "use_cache" in inspect.signature(module.forward).parameters


def _without_cache(
    module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not module.training or not torch.is_grad_enabled():
        return None
    if named.get("use_cache"):
        raise UsageError(
            f"use_cache=True: {type(module).__name__} is being trained, where a cache of keys is of no use; leave it "
            "out, or generate in eval mode without gradients"
        )
    return arguments, {**named, "use_cache": False}


def _refuse_lowered(model: nn.Module, precision: Precision, strategy: str) -> None:
    """Refuse strategies that cast every weight of the computation, where the model keeps some in fp32."""
    if precision == "fp32" or not (strategy == "fsdp2" or strategy.startswith("zero")):
        return
    kept = kept_in_fp32(model, dtype_of(precision))
    names = [name for name, parameter in model.named_parameters() if id(parameter) in kept]
    if names:
        raise UsageError(
            f"precision {precision} under {strategy} casts all weights of the computation, but {type(model).__name__} "
            f"keeps {len(names)} in fp32 (_keep_in_fp32_modules): {shortened(names, 2)}. Use --precision fp32, or one "
            "process or DDP, whose autocast leaves them as they are"
        )


def freeze_statistics(model: nn.Module) -> list[str]:
    """Put batch norms with frozen parameters into eval mode, and return a notice if there are any.

    Their running statistics belong to the base. ``model.train()`` undoes it, so a loop that calls that calls this after
    it.
    """
    frozen = 0
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and _is_frozen(module):
            module.eval()
            frozen += 1
    return [f"{frozen} frozen batch norm(s) keep their running statistics"] if frozen else []


def _is_frozen(module: nn.Module) -> bool:
    parameters: Sequence[nn.Parameter] = list(module.parameters(recurse=False))
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _warn_about_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            logger.warning(
                "%s is %s: in training it normalises by the samples of each micro-batch, so losses depend on "
                "micro_batch_size and the number of processes; freeze its parameters, or use a norm over each sample",
                name,
                module,
            )
            return
