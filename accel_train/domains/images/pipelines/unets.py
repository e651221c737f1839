"""Stable Diffusion 1.x, 2.x and XL: how their UNets are conditioned and called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.domains.images.pipelines.family import Family, Predicting, per_channel, scale

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


def _encode(pipeline: Any, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    prompt, _ = pipeline.encode_prompt(
        list(captions), device=pipeline.device, num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    return {"prompt": prompt}


def _encode_xl(pipeline: Any, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    prompt, _, pooled, _ = pipeline.encode_prompt(
        list(captions), device=pipeline.device, do_classifier_free_guidance=False
    )
    return {"prompt": prompt, "pooled": pooled}


def _scale_xl(vae: Any, latents: Tensor) -> Tensor:
    """Scale as diffusers' XL pipelines do: some VAEs, such as Playground's, have a mean and a deviation per channel."""
    mean, deviation = (getattr(vae.config, name, None) for name in ("latents_mean", "latents_std"))
    if mean is None or deviation is None:
        return scale(vae, latents)
    return scale(vae, latents - per_channel(mean, latents)) / per_channel(deviation, latents)


def _predict(model: nn.Module, inputs: Predicting) -> Tensor:
    return model(inputs.noisy, inputs.timestep, encoder_hidden_states=inputs.conditioning["prompt"], return_dict=False)[
        0
    ]


def _predict_xl(model: nn.Module, inputs: Predicting) -> Tensor:
    # (B, 6): height and width of the original, top and left of the crop, height and width of the result
    added = {"text_embeds": inputs.conditioning["pooled"], "time_ids": inputs.sizes}
    return model(
        inputs.noisy,
        inputs.timestep,
        encoder_hidden_states=inputs.conditioning["prompt"],
        added_cond_kwargs=added,
        return_dict=False,
    )[0]


def _sample(prompt: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"prompt_embeds": prompt["prompt"], "negative_prompt_embeds": empty["prompt"]}


def sample_pooled(prompt: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments that replace the prompt in a call of XL's or SD3's pipeline."""
    return {
        **_sample(prompt, empty),
        "pooled_prompt_embeds": prompt["pooled"],
        "negative_pooled_prompt_embeds": empty["pooled"],
    }


def empty_as_zeros(pipeline: Any, empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace the embeddings of an empty prompt by zeros if the pipeline guides away from zeros, as XL's does."""
    if not pipeline.config.force_zeros_for_empty_prompt:
        return dict(empty)
    return {name: torch.zeros_like(value) for name, value in empty.items()}


STABLE_DIFFUSION = Family(
    name="Stable Diffusion 1.x and 2.x",
    pipelines=("StableDiffusionPipeline",),
    denoiser="unet",
    targets=ATTENTION,
    encode=_encode,
    predict=_predict,
    sample=_sample,
    guidance_scale=7.5,
    patch=1,
    drawn_step=8,
)
STABLE_DIFFUSION_XL = Family(
    name="Stable Diffusion XL",
    pipelines=("StableDiffusionXLPipeline",),
    denoiser="unet",
    targets=ATTENTION,
    encode=_encode_xl,
    predict=_predict_xl,
    sample=sample_pooled,
    guidance_scale=5.0,
    patch=1,
    drawn_step=8,
    normalise=_scale_xl,
    empty=empty_as_zeros,
)
