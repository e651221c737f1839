"""Differences between families of diffusers pipelines, as values of a ``Family``, and the files that define one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Conditioning = Mapping[str, Tensor]
"""Outputs of text encoders by name, with the captions as first dimension."""
INDEX = "model_index.json"
UNUSED = ("safety_checker", "feature_extractor", "image_encoder")
"""Components that are not loaded."""
UNREAD = (
    *(*UNUSED, "requires_safety_checker"),
    *("architectures", "dtype", "torch_dtype", "is_local", "local_files_only", "name_or_path"),
)
"""Keys of JSON files without effect on the components in use: here the index gives a component's class, options its
dtype, and the folder its place."""
CONFIGS = ("config.json", "scheduler_config.json")
WITH_VOCABULARY = ("tokenizer", "processor")
"""Prefixes of the names of components that are defined by the files of ``VOCABULARY``."""
VOCABULARY = ("*.json", "merges.txt", "vocab.txt", "*.model", "*.jinja")


class Predicting(NamedTuple):
    """Inputs of a denoiser for one micro-batch."""

    noisy: Tensor
    """Noisy latents, normalised for the denoiser, (B, C, H, W)."""
    timestep: Tensor
    """Times in the scheduler's units, (B,) fp32."""
    conditioning: Conditioning
    sizes: Tensor
    """Height and width of the original, top and left of the crop, height and width of the result, (B, 6)."""
    config: Any
    """Config of the denoiser, taken before it was wrapped."""
    guidance: float
    """Guidance scale, an input of denoisers distilled from guidance."""


def scale(vae: Any, latents: Tensor) -> Tensor:
    """Shift and scale latents (B, C, H, W) by two numbers of the VAE's config."""
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    return (latents - shift) * vae.config.scaling_factor


def per_channel(values: Sequence[float], latents: Tensor) -> Tensor:
    """Return a value for each channel in the shape of latents (B, C, H, W)."""
    return torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1)


def _all_empty(given: Conditioning, empty: Conditioning) -> dict[str, Tensor]:
    return {name: value.to(given[name]).expand_as(given[name]) for name, value in empty.items()}


def _keep_empty(pipeline: Any, empty: Conditioning) -> dict[str, Tensor]:
    return dict(empty)


def _as_they_are(pipeline: Any, given: Conditioning) -> dict[str, Tensor]:
    return dict(given)


def _no_layers(model: nn.Module) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True, eq=False)
class Family:
    """One family of text-to-image pipelines."""

    name: str
    pipelines: tuple[str, ...]
    """Class names in model_index.json."""
    denoiser: Literal["unet", "transformer"]
    targets: tuple[str, ...]
    """Default of lora.targets: the layers with an adapter."""
    encode: Callable[[Any, Sequence[str], int | None], dict[str, Tensor]]
    """(pipeline, captions, longest prompt in tokens) -> conditioning, by the pipeline's own encode_prompt."""
    predict: Callable[[nn.Module, Predicting], Tensor]
    """Prediction of the denoiser from its inputs, in the shape of ``noisy``."""
    sample: Callable[[Conditioning, Conditioning], dict[str, Any]]
    """(conditioning of a prompt, of the empty prompt) -> arguments of the pipeline's call."""
    guidance_scale: float
    """Default of the pipeline."""
    guidance_argument: str = "guidance_scale"
    unguided: float = 1.0
    """Scale up to which the pipeline draws without guidance, and so without a negative prompt."""
    prompt_tokens: int | None = None
    """Default of the longest prompt. None: the text encoders have a fixed length."""
    patch: int = 2
    """Latents along a side must be a multiple of it."""
    drawn_step: int = 1
    """Sides of a drawn picture must be a multiple of this many pixels, whatever the VAE."""
    normalise: Callable[[Any, Tensor], Tensor] = scale
    """(vae, latents that it has encoded) -> latents normalised for the denoiser."""
    empty: Callable[[Any, Conditioning], dict[str, Tensor]] = _keep_empty
    """(pipeline, embeddings of an empty prompt) -> their replacement in guidance."""
    embed: Callable[[Any, Conditioning], dict[str, Tensor]] = _as_they_are
    """(pipeline, result of ``encode``) -> embeddings. With trained text encoders the argument holds tokens."""
    left_out: Callable[[Conditioning, Conditioning], dict[str, Tensor]] = _all_empty
    """(conditioning of captions, of an empty caption) -> conditioning in place of dropped captions."""
    draws_at_once: int = 1
    """Prompts in one call of the pipeline when many are drawn."""
    call: Mapping[str, Any] | None = None
    """Further arguments of the pipeline's call."""
    idle: Callable[[nn.Module], frozenset[str]] = _no_layers
    """Paths of denoiser layers without influence on a picture."""


def text_encoders(pipeline: Any) -> dict[str, nn.Module]:
    """Return the text encoders of a pipeline by name."""
    found = {name: getattr(pipeline, name) for name in pipeline.components if name.startswith("text_encoder")}
    return {name: encoder for name, encoder in found.items() if encoder is not None}


def defining_files(
    directory: Path,
    index: Mapping[str, Sequence[Any]],
    trained: Sequence[str],
    weight_files: Callable[[str], Sequence[str]],
) -> tuple[str, ...]:
    """Return the names in ``directory`` of the pipeline's files in use, without the weights of ``trained`` components.

    ``index`` has library and class of each component.
    """
    names = [INDEX]
    for component in sorted(index.keys() - set(UNUSED)):
        patterns = VOCABULARY if component.startswith(WITH_VOCABULARY) else CONFIGS
        found = {path.name for pattern in patterns for path in (directory / component).glob(pattern)}
        if component not in trained:
            found.update(weight_files(component))
        if index[component][0] is not None:
            names += [f"{component}/{name}" for name in sorted(found)]
    return tuple(names)
