"""Adapters on the text encoders of a base, only for CLIP: the choice of encoders and of their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_train.config import NonNegativeInt, PositiveFloat, UsageError
from accel_train.domains.images.pipelines.loading import FAMILIES, Base, DiffusersBase
from accel_train.domains.images.trained_text import joint
from accel_train.domains.images.trained_text.joint import DenoiserWithText
from accel_train.domains.models.adapters import is_adapter, paths_of_adapter, refuse_other_training
from accel_train.domains.models.lora import (
    Layers,
    LoraConfig,
    PartOfModel,
    apply_lora,
    count_layers,
    describe_lora,
    loading_precision,
    target_layers,
    with_effect,
)
from accel_train.precision import Precision
from accel_train.store import strict_json
from accel_train.training.optimizers import HasParameterGroups

PART = "text_encoders"
"""Name of their options, and of their groups in the optimizer."""
CLIP = ("CLIPTextModel", "CLIPTextModelWithProjection")
DECIDE_SHAPES = ("lora.rank", "lora.targets", f"{PART}.rank", f"{PART}.targets")
"""Options that decide the shapes of the weights."""
DEFAULT_TARGETS = ("attention",)
REASONS = {
    "Stable Diffusion 3": "its CLIP encoders share the prompt with a T5, whose output would have to be kept too",
    "Flux": "it reads only one vector of its CLIP encoder, and its T5 has 4.8 billion values",
    "MMDiT of recipes/mmdit.py": "it has no text encoder; its denoiser embeds captions itself (--lora.targets)",
}
OTHER_REASON = "its text encoder is a language model of billions of values"


@dataclass(frozen=True)
class TextEncoderConfig:
    """LoRA on the text encoders of a pipeline (CLIP, of Stable Diffusion 1.x, 2.x and XL), trained with the denoiser's.
    lora.variant and lora.base_precision hold for both."""

    rank: NonNegativeInt = 0
    """Rank of the adapters on the text encoders. 0: they are not trained. Otherwise captions are encoded at every step,
    and no embedding is cached."""
    alpha: PositiveFloat | None = None
    """Their output is scaled by alpha / rank. None: the rank, a scale of 1."""
    targets: tuple[str, ...] | None = None
    """Layers of the encoders' blocks with an adapter: attention, all-linear, or names such as q_proj v_proj. None:
    attention, as in diffusers' scripts. kohya's train all-linear."""
    lr_factor: PositiveFloat = 1.0
    """Their learning rate, as a multiple of optimizer.lr. 0.1 to 0.5 is usual."""

    def __post_init__(self) -> None:
        given = {
            "text_encoders.alpha": self.alpha is not None,
            "text_encoders.targets": self.targets is not None,
            "text_encoders.lr_factor": self.lr_factor != 1.0,
        }
        unread = [name for name, is_given in given.items() if is_given]
        if self.rank == 0 and unread:
            raise UsageError(
                f"{', '.join(unread)}: text_encoders.rank is 0, so no text encoder is trained; give "
                "--text_encoders.rank 4"
            )
        if self.targets == ():
            raise UsageError("text_encoders.targets: names no layer; leave it out, or give attention or all-linear")


def with_trained_text(base: Base, options: TextEncoderConfig, strategy: str = "single") -> Base:
    """Return a base with a denoiser that encodes captions itself, if the options train text encoders.

    Raises ``UsageError`` for a base with other text encoders than CLIP, for options of frozen text encoders, and under
    ZeRO-3.
    """
    if options.rank == 0:
        return base
    asked = f"text_encoders.rank {options.rank}: {base.source} is {base.family.name}"
    if not isinstance(base, DiffusersBase) or base.family.name not in joint.WAYS:
        reason = REASONS.get(base.family.name, OTHER_REASON)
        raise UsageError(f"{asked}, and {reason}; leave it out. {' and '.join(joint.WAYS)} have it")
    if base.config.encoder_precision != "fp32":
        raise UsageError(
            f"base.encoder_precision {base.config.encoder_precision}: with text_encoders.rank {options.rank} the text "
            "encoders are trained, and lora.base_precision is their dtype as well; leave it out, or give fp32 "
            "instead of a preset's"
        )
    if base.config.offload_encoders:
        raise UsageError(
            f"base.offload_encoders: with text_encoders.rank {options.rank} the text encoders are trained, and "
            "--offload_frozen also covers their blocks; leave it out"
        )
    if strategy == "zero3":
        # There, transformers gathers parameters even of a model on the meta device, built only to be counted.
        raise UsageError(
            f"text_encoders.rank {options.rank} under zero3: transformers cannot build CLIP there; use FSDP2, which "
            "shards as much, DDP, ZeRO-1 or ZeRO-2"
        )
    # Those of the pipeline: XL's refiner has only the second one.
    names = tuple(base.text_encoders())
    for name in names:
        found = strict_json.read_object(base.directory / name / "config.json")
        kinds = found.get("architectures") or ["no architecture"]
        if kinds[0] not in CLIP or found.get("use_attention_mask"):
            raise UsageError(
                f"{asked}, and its {name} is {kinds[0]} (use_attention_mask: {found.get('use_attention_mask')}); "
                f"one of {' and '.join(CLIP)}, without a mask, is required. Leave text_encoders.rank out"
            )
    # The same family with tokens as its conditioning: caches, loader and dropout need no change.
    family = replace(base.family, encode=joint.tokenise, predict=joint.predict, embed=_embed)
    return replace(base, family=family, trained_text=names)


def with_frozen_text(base: Base) -> Base:
    """Return the base as it was found, with frozen text encoders that belong to the pipeline."""
    if not isinstance(base, DiffusersBase):
        return base
    (family,) = [family for family in FAMILIES if family.name == base.family.name]
    return replace(base, family=family, trained_text=())


@torch.no_grad()
def _embed(pipeline: Any, tokens: joint.Conditioning) -> dict[str, torch.Tensor]:
    """Encode tokens with the ``DenoiserWithText`` in the denoiser's place."""
    # The families with CLIP alone all have a UNet.
    return pipeline.unet(tokens=tokens)


def refuse_unknown_targets(base: Base, adapters: LoraConfig) -> None:
    """Raise ``UsageError`` for ``lora.targets`` missing from the denoiser, before anything is encoded.

    Reads no weights.
    """
    if adapters.targets is None:
        return
    with torch.device("meta"):
        target_layers(joint.denoiser_of(base.denoiser("fp32")), adapters.targets)


def build(
    base: Base,
    adapters: LoraConfig,
    text: TextEncoderConfig,
    precision: Precision,
    device: torch.device,
    initial_weights: Path | None = None,
) -> nn.Module:
    """Load the denoiser of the base, with its text encoders if they are trained, freeze it, and give it adapters.

    With ``lora.base_precision`` of 8 or 4 bits its linear layers go to ``device``. Raises ``UsageError`` if the
    adapters of the checkpoint ``initial_weights``, which are loaded later, were trained with another scale or on other
    layers. This is checked first.
    """
    _refuse_other_training(initial_weights, base, adapters, text)
    model = base.denoiser(loading_precision(adapters, precision))
    apply_adapters(model, base, adapters, text, precision, device)
    return model


def _refuse_other_training(
    initial_weights: Path | None, base: Base, adapters: LoraConfig, text: TextEncoderConfig
) -> None:
    if initial_weights is None or not is_adapter(initial_weights):
        return
    # If none is trained here, those that may have been trained in the checkpoint.
    parts = [_part(name, text) for name in base.trained_text or joint.TOKENIZERS]
    beginnings = tuple(f"{part.name}." for part in parts)
    with_text = any(path.startswith(beginnings) for path in paths_of_adapter(initial_weights))
    compared = with_encoders(base) if with_text else with_frozen_text(base)
    layers = layers_of(compared, adapters.targets, text.targets)
    beside_text = ""
    # A preset for a small device has these, and ``with_trained_text`` refuses them.
    if base.config.encoder_precision != "fp32":
        beside_text += " --base.encoder_precision fp32"
    if base.config.offload_encoders:
        beside_text += " --base.offload_encoders false"
    refuse_other_training(initial_weights, adapters, parts, layers, beside_text)


def layers_of(
    base: Base, targets: Sequence[str] | None = None, of_text: Sequence[str] | None = None
) -> dict[str, Layers]:
    """Return the layers of the denoiser, and those of text encoders if the base trains them, by option group.

    Reads no weights.
    """
    with torch.device("meta"):
        model = base.denoiser("fp32")
    denoiser = joint.denoiser_of(model)
    idle = base.family.idle(denoiser)
    root = f"{model.component}." if isinstance(model, DenoiserWithText) else ""

    def of_denoiser(names: Sequence[str]) -> set[str]:
        return {f"{root}{path}" for path in target_layers(denoiser, names).difference(idle)}

    found = {"lora": Layers(targets, base.family.targets, of_denoiser, (root,))}
    if isinstance(model, DenoiserWithText):
        encoders = model.encoders

        def of_encoders(names: Sequence[str]) -> set[str]:
            return {f"{name}.{path}" for name in encoders for path in _layers_of_encoder(model, name, names)}

        roots = [f"{name}.{blocks_of(encoder)}." for name, encoder in encoders.items()]
        found[PART] = Layers(of_text, DEFAULT_TARGETS, of_encoders, roots)
    return found


def with_encoders(base: Base) -> Base:
    """Return the base with trained text encoders even if this run trains none. The base itself if it cannot."""
    if base.trained_text or not isinstance(base, DiffusersBase):
        return base
    free = replace(base.config, encoder_precision="fp32", offload_encoders=False)
    with suppress(UsageError):
        return with_trained_text(replace(base, config=free), TextEncoderConfig(rank=1))
    return base


def apply_adapters(
    model: nn.Module,
    base: Base,
    adapters: LoraConfig,
    text: TextEncoderConfig,
    precision: Precision,
    device: torch.device,
) -> None:
    """Freeze the model, and give denoiser and text encoders their adapters, in place, as ``apply_lora`` does."""
    denoiser = joint.denoiser_of(model)
    wanted = adapters.targets or base.family.targets
    targets = with_effect(denoiser, wanted, base.family.idle(denoiser))
    if not isinstance(model, DenoiserWithText):
        apply_lora(model, replace(adapters, targets=targets), precision, device)
        return
    # Whole paths, because denoiser and encoders have layers of the same names.
    paths = [f"{model.component}.{path}" for path in sorted(target_layers(denoiser, targets))]
    parts: list[PartOfModel] = []
    for name in model.encoders:
        layers = _layers_of_encoder(model, name, text.targets or DEFAULT_TARGETS)
        paths += [f"{name}.{path}" for path in layers]
        parts.append(_part(name, text))
    apply_lora(model, replace(adapters, targets=tuple(paths)), precision, device, parts)


def _part(name: str, text: TextEncoderConfig) -> PartOfModel:
    return PartOfModel(name, text.rank, text.alpha, options=PART)


def _layers_of_encoder(model: DenoiserWithText, name: str, targets: Sequence[str]) -> list[str]:
    """Return the paths of an encoder's target layers. Layers without influence are left out: DDP needs their gradient.

    The last block of the first of XL's two encoders has none, because the pooled output is that of the second.
    """
    encoder = model.encoders[name]
    where = blocks_of(encoder)
    found = target_layers(encoder.get_submodule(where), targets, "text_encoders.targets")
    paths = [f"{where}.{path}" for path in sorted(found)]
    idle = idle_block(encoder) if model.way.skips_last and name == model.encoder_names[0] else None
    return [path for path in paths if idle is None or not path.startswith(idle)]


def blocks_of(encoder: nn.Module) -> str:
    """Return the path of the blocks of CLIP's text encoder."""
    # transformers 5 has no text_model in CLIPTextModel.
    return "text_model.encoder" if hasattr(encoder, "text_model") else "encoder"


def idle_block(encoder: nn.Module) -> str | None:
    """Return the beginning of the paths in the last block of an encoder whose last layer is not read.

    None if its pooled output is read, which passes through that block.
    """
    if hasattr(encoder, "text_projection"):
        return None
    layers: Any = encoder.get_submodule(f"{blocks_of(encoder)}.layers")
    return f"{blocks_of(encoder)}.layers.{len(layers) - 1}."


def groups(base: Base) -> Mapping[str, tuple[str, ...]]:
    """Return the parts of the model with groups of their own in the optimizer, for their learning rate."""
    return {PART: base.trained_text} if base.trained_text else {}


def scale_learning_rate(optimizer: HasParameterGroups, options: TextEncoderConfig) -> None:
    """Multiply the peak learning rate of the text encoders by ``lr_factor``. Call it once, after ``prepare``."""
    for group in optimizer.param_groups:
        if group["part"] == PART:
            group["base_lr"] *= options.lr_factor


def describe_adapters(model: nn.Module, adapters: LoraConfig, text: TextEncoderConfig) -> list[str]:
    """Return notices of the adapters and their size."""
    lines = describe_lora(joint.denoiser_of(model), adapters)
    if isinstance(model, DenoiserWithText):
        layers = sum(count_layers(encoder) for encoder in model.encoders.values())
        names = " and ".join(model.encoder_names)
        lines.append(
            f"{adapters.variant} of rank {text.rank} on {layers} layers of {names}, with {text.lr_factor:g} times the "
            "learning rate; captions are encoded at every step"
        )
    return lines
