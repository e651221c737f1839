"""Low-rank adapters (LoRA, arXiv:2106.09685) on the linear layers of any model, with peft and in its file format."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from accel_train.config import NonNegativeInt, PositiveFloat, UsageError, refuse_without_effect
from accel_train.domains.models import quantised
from accel_train.domains.models.pretrained import without_notices_of_imports
from accel_train.precision import Precision, dtype_of, kept_in_fp32
from accel_train.store.exports.peft_layout import ADAPTER
from accel_train.wording import did_you_mean, nearest, shortened

logger = logging.getLogger(__name__)
Variant = Literal["lora", "dora", "rslora"]
BasePrecision = Literal["fp32", "bf16", "fp16", "int8", "fp8", "nf4"]
CPU = torch.device("cpu")
LINEAR = ("Linear", "Conv1D")  # the second is GPT-2's name for a linear layer
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
HEAD = re.compile(r"(^|[._])(head|lm_head|classifier|score)$|^proj_out$")
"""Only a model's own proj_out is a head: blocks of diffusers have layers of that name too."""
GROUPS = ("all-linear", "attention")


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: freeze the model and train a low-rank adapter on each linear layer."""

    rank: NonNegativeInt = 0
    """Rank of the adapters. 0: no adapters; causal_lm.py then trains the model itself, lora.py refuses it."""
    alpha: PositiveFloat | None = None
    """The adapter's output is scaled by alpha / rank. None: the rank, a scale of 1, with rslora of sqrt(rank)."""
    variant: Variant = "lora"
    """dora: column norms are learned separately (arXiv:2402.09353). rslora: scale alpha / sqrt(rank)."""
    base_precision: BasePrecision = "fp32"
    """Precision of the frozen weights. bf16 and fp16 halve their memory and need a precision other than fp32. int8 and
    nf4 (QLoRA) keep linear layers but the head in 8 or 4 bits, by bitsandbytes, fp8 stores them as float8 (e4m3, a
    scale for each output), and the rest is in `precision`; they are not sharded, so one process or DDP or ZeRO-1 and
    2."""
    targets: tuple[str, ...] | None = None
    """Layers with an adapter: all-linear (all but the head, and experts in 3-D parameters), attention, or names such as
    q_proj v_proj, the last parts of a module's path. None: all-linear of a language model, the projections of attention
    of a pipeline."""

    def __post_init__(self) -> None:
        if self.rank == 0:
            names = ("alpha", "variant", "base_precision", "targets")
            because = "with lora.rank: 0, without any adapters"
            refuse_without_effect(self, "lora", names, because, "give --lora.rank 16")
        if self.base_precision == "fp8" and self.variant == "dora":
            raise UsageError(
                "lora.variant dora: it needs the norms of the weights, which peft cannot read from "
                "lora.base_precision fp8; use nf4"
            )
        if self.targets == ():
            raise UsageError("lora.targets: names no layer; leave it out, or give all-linear, attention or names")


class PartOfModel(NamedTuple):
    """A part of the model with its own rank of adapters."""

    name: str
    """Path of its module."""
    rank: int
    alpha: float | None
    """None takes the rank."""
    options: str = "lora"
    """Option group that rank and alpha come from."""

    @property
    def pattern(self) -> str:
        """The part's layers, as a key of peft's ``rank_pattern`` and ``alpha_pattern``."""
        return part_pattern(self.name)


def part_pattern(name: str) -> str:
    return rf"{re.escape(name)}\..*"


def apply_lora(
    model: nn.Module,
    config: LoraConfig,
    precision: Precision = "fp32",
    device: torch.device = CPU,
    parts: Sequence[PartOfModel] = (),
) -> None:
    """Freeze the model and give its target layers adapters, in place. Does nothing with rank 0.

    The frozen parameters take ``base_precision``, except those kept in fp32 by the model; the adapters are fp32. With
    int8, fp8 or nf4 the linear layers go to ``device``, and the other frozen parameters take the compute ``precision``.
    Layers of ``parts`` have the rank and alpha of their part.

    Draws the first matrices from torch's global generator; the second are zero, so the output is unchanged. Raises
    ``UsageError`` for targets missing from the model, without peft, and without bitsandbytes where it is needed.
    """
    if config.rank == 0:
        return
    peft = import_peft()
    targets = resolve_targets(model, config.targets or ("all-linear",))
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.rank if config.alpha is None else config.alpha,
        target_modules=targets,
        use_dora=config.variant == "dora",
        use_rslora=config.variant == "rslora",
        rank_pattern={part.pattern: part.rank for part in parts},
        alpha_pattern={part.pattern: part.rank if part.alpha is None else part.alpha for part in parts},
    )
    freeze_base(model, config.base_precision, precision, device)
    inject(model, settings, ADAPTER)


def loading_precision(config: LoraConfig, precision: Precision) -> Precision:
    """Return the dtype to load the base in: ``base_precision``, or the compute dtype if it is quantised afterwards."""
    base = config.base_precision
    if base == "int8" or base == "fp8" or base == "nf4":
        return precision
    return base


def freeze_base(model: nn.Module, base: BasePrecision, precision: Precision, device: torch.device) -> None:
    """Freeze all parameters and give them the precision ``base``, in place, as ``apply_lora`` describes."""
    # Everything, including layers without an adapter: norms and embeddings belong to the base.
    model.requires_grad_(False)
    if base == "int8" or base == "fp8" or base == "nf4":
        head = _head_of(model)
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        # The head decides between tokens by small differences, which 4 bits would lose.
        layers = [name for name in names if not HEAD.search(name) and name != head]
        if not layers:
            raise UsageError(
                f"lora.base_precision {base}: {type(model).__name__} has no nn.Linear except its head, and other "
                "layers cannot be stored in 8 or 4 bits; use bf16"
            )
        # Before the adapters, which are then made for the quantised layers.
        quantised.quantise(model, layers, base, compute=dtype_of(precision), device=device)
        base = precision
    dtype = dtype_of(base)
    kept = kept_in_fp32(model, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


@without_notices_of_imports()
def inject(model: nn.Module, settings: Any, name: str) -> None:
    """Give the target layers of peft's ``settings`` an adapter, in place. A model may have several, by name."""
    adapted: Any = model
    # With these attributes peft picks its own layers for bitsandbytes.
    adapted.is_loaded_in_8bit = any(type(module).__name__ == "Linear8bitLt" for module in model.modules())
    adapted.is_loaded_in_4bit = any(type(module).__name__ == "Linear4bit" for module in model.modules())
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # It also warns of every further adapter, and a model may have several here.
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute", UserWarning)
        # Training computes the right thing with a tied head, and a merge unties it (`merge_adapter`).
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        # peft finds out by itself which layers have their weight transposed, such as GPT-2's Conv1D.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
        import_peft().inject_adapter_in_model(settings, model, name)
    # peft gives an adapter the dtype of its layer, but trained parameters are fp32.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def describe_lora(model: nn.Module, config: LoraConfig) -> list[str]:
    """Return notices of the adapters, their size and their limits. Returns none with rank 0."""
    if config.rank == 0:
        return []
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(quantised.count_values(parameter) for parameter in model.parameters())
    layers = count_layers(model)
    share = 100 * trained / total
    base = f", on a base in {config.base_precision}" if config.base_precision in quantised.BITS else ""
    values = f"{trained:,} values trained, {share:.2f} %"
    line = f"{config.variant} of rank {config.rank} on {layers} layers: {values}{base}"
    return [line, *_describe_experts(model, config), *_describe_tied_head(model)]


def _describe_experts(model: nn.Module, config: LoraConfig) -> list[str]:
    """Return a notice of experts without adapters, if every linear layer was to have one."""
    experts = _stacked_experts(model)
    if not experts or not (config.targets is None or "all-linear" in config.targets):
        return []
    count = sum(parameter.numel() for parameter in experts.values())
    frozen = sum(quantised.count_values(p) for p in model.parameters() if not p.requires_grad)
    endings = shortened(sorted({last_part(name) for name in experts}), 3)
    base = f", and are not in {config.base_precision}" if config.base_precision in quantised.BITS else ""
    return [
        f"{count:,} of {frozen:,} weights are in 3-D parameters of experts ({endings}) and have no adapter, because "
        f"they are not linear layers{base}"
    ]


def _stacked_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that hold the weights of several experts, by name."""
    experts: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        # Kernels of convolutions and positions of pictures have three dimensions too.
        if "expert" not in path.lower():
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3:
                experts[f"{path}.{name}"] = parameter
    return experts


def _describe_tied_head(model: nn.Module) -> list[str]:
    """Return a notice of an adapter on a head that shares its weight with the input embeddings."""
    if not hasattr(model, "get_output_embeddings"):
        return []
    plain: Any = model
    head = plain.get_output_embeddings()
    # peft's layer exposes the weight of the layer inside.
    if not hasattr(head, "get_base_layer") or head.weight is not plain.get_input_embeddings().weight:
        return []
    return [
        "the adapter on the head changes only the output, not the input embeddings tied to it; export --merged "
        "writes the two as separate weights (tie_word_embeddings: false)"
    ]


def count_layers(model: nn.Module) -> int:
    """Return the number of layers with an adapter."""
    return sum(1 for name, _ in model.named_modules() if name.endswith(f"lora_A.{ADAPTER}"))


@without_notices_of_imports()
def import_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UsageError("adapters (lora.rank) need peft; run pip install 'accel-train[lora]'") from None
    return peft


def resolve_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the names of the target layers as peft takes them: the last parts of their paths if those are unambiguous.

    Raises ``UsageError`` for a name without a layer.
    """
    chosen = target_layers(model, targets)
    endings = sorted({last_part(name) for name in chosen})
    # Short names are what people expect in adapter_config.json, but they must not mean more layers than chosen.
    if {name for name, _ in model.named_modules() if last_part(name) in endings} == chosen:
        return endings
    return sorted(chosen)


def with_effect(model: nn.Module, targets: Sequence[str], idle: Collection[str]) -> tuple[str, ...]:
    """Return targets without the ``idle`` layers, which do not influence the loss, and log their omission.

    They would have no gradient, and DDP refuses those. Raises ``UsageError`` if no layer is left.
    """
    chosen = target_layers(model, targets)
    left_out = sorted(chosen.intersection(idle))
    if not left_out:
        return tuple(targets)
    if len(left_out) == len(chosen):
        raise UsageError(
            f"lora.targets {' '.join(targets)}: {', '.join(left_out)} have no influence on what is learned; name others"
        )
    logger.info("no adapter on %s, which have no influence on what is learned", ", ".join(left_out))
    return tuple(sorted(chosen.difference(left_out)))


def target_layers(model: nn.Module, targets: Sequence[str], option: str = "lora.targets") -> set[str]:
    """Return the paths of the target layers. Raises ``UsageError`` for a name without a layer."""
    # By class name, because comparing with transformers' Conv1D would need an import.
    linear = [name for name, module in model.named_modules() if type(module).__name__ in LINEAR]
    head = _head_of(model)
    chosen: set[str] = set()
    for target in targets:
        matching = [name for name in linear if _is_meant(name, target, head)]
        if not matching:
            endings = sorted({last_part(name) for name in linear})
            hint = did_you_mean(nearest(target, [*GROUPS, *endings]))
            if any(name.endswith(f".{target}") for name in _stacked_experts(model)):
                hint = ", but a 3-D parameter of experts, which takes no adapter here"
            raise UsageError(
                f"{option}: {target!r} is not a linear layer of {type(model).__name__}{hint}; it has "
                f"{shortened(endings, 12)}; or give all-linear or attention"
            )
        chosen.update(matching)
    return chosen


class Layers(NamedTuple):
    """Layers with adapters by the targets of an option group."""

    targets: Sequence[str] | None
    """As given to this run. None: ``default``."""
    default: Sequence[str]
    of: Callable[[Sequence[str]], Collection[str]]
    """Returns the paths of the layers of targets. Raises ``UsageError`` for a name without a layer."""
    roots: Sequence[str] = ("",)
    """Beginnings of these paths, which targets leave out."""


def names_of_layers(paths: Collection[str], layers: Layers) -> Sequence[str]:
    """Return targets that mean exactly the layers with these paths: a group of layers, the default, or names.

    Names are the last parts of paths, or else whole paths. Returns nothing if no targets mean these layers.
    """
    whole = {path.removeprefix(root) for path in paths for root in layers.roots if path.startswith(root)}
    groups = [[group] for group in GROUPS]
    for names in (*groups, layers.default, sorted({last_part(path) for path in paths}), sorted(whole)):
        with suppress(UsageError):
            if set(layers.of(names)) == set(paths):
                return names
    return []


def _head_of(model: nn.Module) -> str | None:
    """Return the path of a transformers model's output layer, which may have any name. None if there is none."""
    if not hasattr(model, "get_output_embeddings"):
        return None
    plain: Any = model
    head = plain.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def last_part(name: str) -> str:
    """Return the last part of a path, with the one before if it is a number: ``to_out.0``."""
    front, _, last = name.rpartition(".")
    return f"{front.rpartition('.')[2]}.{last}" if last.isdigit() and front else last


def _is_meant(name: str, target: str, head: str | None) -> bool:
    if target == "all-linear":
        return not HEAD.search(name) and name != head
    if target == "attention":
        return ATTENTION.search(name) is not None
    return name == target or name.endswith(f".{target}")


def adapter_config(model: nn.Module, base: str | None, revision: str | None = None) -> dict[str, Any]:
    """Return the content of peft's ``adapter_config.json``. ``base`` is the Hub id or path of the base model.

    ``revision`` is its commit on the Hub, with which peft and transformers load it again.
    """
    adapted: Any = model
    settings = adapted.peft_config[ADAPTER]
    values = {name: sorted(v) if isinstance(v, set) else v for name, v in settings.to_dict().items()}
    # As peft's save_pretrained writes it: whoever loads the file wants to use the adapter, not to train it.
    return values | {"base_model_name_or_path": base, "revision": revision, "inference_mode": True}
