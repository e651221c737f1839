"""Transformers of rectified flow: SD3, Flux, Flux.2, Sana, Qwen-Image and Z-Image, how they are conditioned and called.

Latents keep the shape (B, C, H, W) here. Models that work on patches get them packed, and their output is unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.domains.images.pipelines.family import Family, Predicting, per_channel
from accel_train.domains.images.pipelines.unets import ATTENTION, sample_pooled

TIMES = 1000
"""Timesteps of diffusers' flow schedulers; these transformers take times from 0 to 1."""
JOINT_ATTENTION = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Layers of attention, including the projections of the text."""


# ------------------------------------------------------------------------------------------------------------- patches
def patchify(latents: Tensor) -> Tensor:
    """Return 2 x 2 patches as channels, (B, 4 C, H / 2, W / 2)."""
    return F.pixel_unshuffle(latents, 2)


def pack(latents: Tensor) -> Tensor:
    """Return patches as a sequence, (B, H W / 4, 4 C)."""
    return patchify(latents).flatten(2).transpose(1, 2)


def unpack(sequence: Tensor, like: Tensor) -> Tensor:
    """Undo ``pack``: return the latents in the shape of ``like``."""
    height, width = like.shape[-2:]
    patches = sequence.transpose(1, 2).unflatten(2, (height // 2, width // 2))  # (B, 4 C, H / 2, W / 2)
    return F.pixel_shuffle(patches, 2)


def _positions(rows: int, columns: int, names: int, device: torch.device) -> Tensor:
    """Return the ids of each place of a picture, (rows * columns, names): the second the row, the third the column."""
    ids = torch.zeros(rows, columns, names, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)[None, :]
    return ids.flatten(0, 1)


def _guidance(inputs: Predicting) -> Tensor | None:
    if not inputs.config.guidance_embeds:
        return None
    return torch.full_like(inputs.timestep, inputs.guidance)


# ------------------------------------------------------------------------------------------------------------------ SD3
def _encode_sd3(pipeline: Any, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    # One caption for each of SD3's three text encoders.
    texts = list(captions)
    prompt, _, pooled, _ = pipeline.encode_prompt(
        texts, texts, texts, device=pipeline.device, do_classifier_free_guidance=False, max_sequence_length=length
    )
    return {"prompt": prompt, "pooled": pooled}


def _predict_sd3(model: nn.Module, inputs: Predicting) -> Tensor:
    return model(
        hidden_states=inputs.noisy,
        timestep=inputs.timestep,
        encoder_hidden_states=inputs.conditioning["prompt"],
        pooled_projections=inputs.conditioning["pooled"],
        return_dict=False,
    )[0]


SD3 = Family(
    name="Stable Diffusion 3",
    pipelines=("StableDiffusion3Pipeline",),
    denoiser="transformer",
    targets=JOINT_ATTENTION,
    encode=_encode_sd3,
    predict=_predict_sd3,
    sample=sample_pooled,
    guidance_scale=7.0,
    prompt_tokens=256,
)


# ----------------------------------------------------------------------------------------------------------------- Flux
def _encode_flux(pipeline: Any, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    prompt, pooled, _ = pipeline.encode_prompt(list(captions), device=pipeline.device, max_sequence_length=length)
    return {"prompt": prompt, "pooled": pooled}


def _predict_flux(model: nn.Module, inputs: Predicting) -> Tensor:
    prompt = inputs.conditioning["prompt"]
    rows, columns = (side // 2 for side in inputs.noisy.shape[-2:])
    sequence = model(
        hidden_states=pack(inputs.noisy),
        timestep=inputs.timestep / TIMES,
        guidance=_guidance(inputs),
        pooled_projections=inputs.conditioning["pooled"],
        encoder_hidden_states=prompt,
        # Tokens of the text have no position in the picture.
        txt_ids=torch.zeros(prompt.shape[1], 3, device=prompt.device),
        img_ids=_positions(rows, columns, 3, prompt.device),
        return_dict=False,
    )[0]
    return unpack(sequence, inputs.noisy)


def _sample_flux(prompt: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Any]:
    # No empty prompt: Flux is distilled, and has the scale of guidance as an input or none.
    return {"prompt_embeds": prompt["prompt"], "pooled_prompt_embeds": prompt["pooled"]}


FLUX = Family(
    name="Flux",
    pipelines=("FluxPipeline",),
    denoiser="transformer",
    targets=JOINT_ATTENTION,
    encode=_encode_flux,
    predict=_predict_flux,
    sample=_sample_flux,
    guidance_scale=3.5,
    prompt_tokens=512,
)


# --------------------------------------------------------------------------------------------------------------- Flux.2
def _encode_flux2(pipeline: Any, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    prompt, _ = pipeline.encode_prompt(list(captions), device=pipeline.device, max_sequence_length=length)
    return {"prompt": prompt}


def _normalise_flux2(vae: Any, latents: Tensor) -> Tensor:
    patches = patchify(latents)  # (B, 4 C, H / 2, W / 2)
    # Flux.2 has no scaling factor: the statistics of a batch norm over patches take its place.
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    variance = vae.bn.running_var.view(1, -1, 1, 1)
    deviation = (variance + vae.config.batch_norm_eps).sqrt()
    return (patches - mean) / deviation


def _predict_flux2(model: nn.Module, inputs: Predicting) -> Tensor:
    prompt = inputs.conditioning["prompt"]
    rows, columns = inputs.noisy.shape[-2:]
    tokens = prompt.shape[1]
    text_ids = torch.zeros(tokens, 4, device=prompt.device)
    # The fourth axis of its rotary embedding counts the tokens of the text.
    text_ids[:, 3] = torch.arange(tokens, device=prompt.device)
    sequence = model(
        hidden_states=inputs.noisy.flatten(2).transpose(1, 2),
        timestep=inputs.timestep / TIMES,
        guidance=_guidance(inputs),
        encoder_hidden_states=prompt,
        txt_ids=text_ids,
        img_ids=_positions(rows, columns, 4, prompt.device),
        return_dict=False,
    )[0]
    return sequence.transpose(1, 2).unflatten(2, (rows, columns))


def _sample_flux2(prompt: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"prompt_embeds": prompt["prompt"]}


def _sample_klein(prompt: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"prompt_embeds": prompt["prompt"], "negative_prompt_embeds": empty["prompt"]}


FLUX2 = Family(
    name="Flux.2",
    pipelines=("Flux2Pipeline",),
    denoiser="transformer",
    targets=(*JOINT_ATTENTION, "to_qkv_mlp_proj"),
    encode=_encode_flux2,
    predict=_predict_flux2,
    sample=_sample_flux2,
    guidance_scale=4.0,
    prompt_tokens=512,
    normalise=_normalise_flux2,
)
FLUX2_KLEIN = Family(
    name="Flux.2 klein",
    pipelines=("Flux2KleinPipeline",),
    denoiser="transformer",
    targets=(*JOINT_ATTENTION, "to_qkv_mlp_proj"),
    encode=_encode_flux2,
    predict=_predict_flux2,
    sample=_sample_klein,
    guidance_scale=4.0,
    prompt_tokens=512,
    normalise=_normalise_flux2,
)


# ----------------------------------------------------------------------------------------------------------------- Sana
def _encode_sana(pipeline: Any, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    prompt, mask, _, _ = pipeline.encode_prompt(
        list(captions), do_classifier_free_guidance=False, device=pipeline.device, max_sequence_length=length
    )
    return {"prompt": prompt, "prompt_mask": mask}


def _predict_sana(model: nn.Module, inputs: Predicting) -> Tensor:
    output = model(
        inputs.noisy,
        encoder_hidden_states=inputs.conditioning["prompt"],
        encoder_attention_mask=inputs.conditioning["prompt_mask"],
        timestep=inputs.timestep * inputs.config.timestep_scale,
        return_dict=False,
    )[0]
    # A second half of the channels, if there is one, is a learned variance.
    return output[:, : inputs.noisy.shape[1]]


def _sample_sana(prompt: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "prompt_embeds": prompt["prompt"],
        "prompt_attention_mask": prompt["prompt_mask"],
        "negative_prompt": None,
        "negative_prompt_embeds": empty["prompt"],
        "negative_prompt_attention_mask": empty["prompt_mask"],
    }


SANA = Family(
    name="Sana",
    pipelines=("SanaPipeline",),
    denoiser="transformer",
    targets=ATTENTION,
    encode=_encode_sana,
    predict=_predict_sana,
    sample=_sample_sana,
    guidance_scale=4.5,
    prompt_tokens=300,
    patch=1,
    drawn_step=32,
    # Binning would draw another size than the one asked for and resize it.
    call={"use_resolution_binning": False},
)


# ----------------------------------------------------------------------------------------------------------- Qwen-Image
def _encode_qwen(pipeline: Any, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    prompt, mask = pipeline.encode_prompt(list(captions), device=pipeline.device, max_sequence_length=length)
    if mask is None:
        # diffusers returns None if no prompt is padded, but a batch always needs a tensor.
        mask = torch.ones(prompt.shape[:2], dtype=torch.long, device=prompt.device)
    return {"prompt": prompt, "prompt_mask": mask}


def _normalise_qwen(vae: Any, latents: Tensor) -> Tensor:
    return (latents - per_channel(vae.config.latents_mean, latents)) / per_channel(vae.config.latents_std, latents)


def _predict_qwen(model: nn.Module, inputs: Predicting) -> Tensor:
    rows, columns = (side // 2 for side in inputs.noisy.shape[-2:])
    sequence = model(
        hidden_states=pack(inputs.noisy),
        timestep=inputs.timestep / TIMES,
        guidance=_guidance(inputs),
        encoder_hidden_states=inputs.conditioning["prompt"],
        encoder_hidden_states_mask=inputs.conditioning["prompt_mask"],
        # Frames, rows and columns: the model has a layout of videos, like its VAE.
        img_shapes=[[(1, rows, columns)]] * len(inputs.noisy),
        return_dict=False,
    )[0]
    return unpack(sequence, inputs.noisy)


def _sample_qwen(prompt: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "prompt_embeds": prompt["prompt"],
        "prompt_embeds_mask": prompt["prompt_mask"],
        "negative_prompt_embeds": empty["prompt"],
        "negative_prompt_embeds_mask": empty["prompt_mask"],
    }


QWEN_IMAGE = Family(
    name="Qwen-Image",
    pipelines=("QwenImagePipeline",),
    denoiser="transformer",
    # As in diffusers' script: the last block's outputs for the prompt are unused, and DDP would wait for gradients.
    targets=ATTENTION,
    encode=_encode_qwen,
    predict=_predict_qwen,
    sample=_sample_qwen,
    guidance_scale=4.0,
    guidance_argument="true_cfg_scale",
    prompt_tokens=512,
    normalise=_normalise_qwen,
)


# -------------------------------------------------------------------------------------------------------------- Z-Image
def _encode_z_image(pipeline: Any, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    found, _ = pipeline.encode_prompt(
        list(captions), device=pipeline.device, do_classifier_free_guidance=False, max_sequence_length=length
    )
    prompt = nn.utils.rnn.pad_sequence(list(found), batch_first=True)  # (B, S, D)
    lengths = [len(each) for each in found]
    tokens = torch.tensor(lengths, device=prompt.device)
    places = torch.arange(prompt.shape[1], device=prompt.device)
    mask = places < tokens[:, None]  # (B, S)
    return {"prompt": prompt, "prompt_mask": mask.long()}


def _as_list(conditioning: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tokens of each prompt without its padding. Waits for the device."""
    lengths: list[int] = conditioning["prompt_mask"].sum(1).tolist()
    return [row[:length] for row, length in zip(conditioning["prompt"], lengths, strict=True)]


def _predict_z_image(model: nn.Module, inputs: Predicting) -> Tensor:
    # Z-Image takes a list of (C, frames, H, W), whose time runs from 0 at noise to 1 at the picture.
    pictures = list(inputs.noisy.unsqueeze(2).unbind(0))
    progress = (TIMES - inputs.timestep) / TIMES
    prompts = _as_list(inputs.conditioning)
    output = model(pictures, progress, prompts, return_dict=False)[0]
    # It predicts the velocity towards the picture.
    return -torch.stack(list(output)).squeeze(2)


def _sample_z_image(prompt: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"prompt_embeds": _as_list(prompt), "negative_prompt_embeds": _as_list(empty)}


Z_IMAGE = Family(
    name="Z-Image",
    pipelines=("ZImagePipeline",),
    denoiser="transformer",
    targets=ATTENTION,
    encode=_encode_z_image,
    predict=_predict_z_image,
    sample=_sample_z_image,
    guidance_scale=5.0,
    unguided=0.0,
    prompt_tokens=512,
)
