"""Folders of pipelines to simulate: the denoiser has the published config, everything else is tiny.

The simulator builds a denoiser from its config alone. Text encoders and VAE do encode captions and pictures, so they
are the tiny ones of the tests, with a few thousand values and the output shapes of the real ones: width, number of
tokens, channels, and pixels per latent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.domains.images import drawn
from tests.domains.images import tiny_pipelines as tiny

CLIP_TOKENS = 77
SIDE = 1024
PICTURES = 4


@dataclass(frozen=True)
class Published:
    """A published model, by the values of its config that differ from diffusers' defaults."""

    pipeline: str
    """Name in `tests/domains/images/tiny_pipelines.py`."""
    sizes: dict[str, Any]
    """Config values of the denoiser."""
    text: dict[str, int] = field(default_factory=dict)
    """Width of each text encoder."""
    channels: int = 16
    """Channels of the latents."""


def _sd3(depth: int, heads: int, positions: int, dual: int = 0, norm: str | None = None) -> Published:
    sizes = {"num_layers": depth, "num_attention_heads": heads, "caption_projection_dim": 64 * heads}
    sizes |= {"pos_embed_max_size": positions, "dual_attention_layers": list(range(dual)), "qk_norm": norm}
    return Published("sd3", sizes, {"text_encoder": 768, "text_encoder_2": 1280, "text_encoder_3": 4096})


def _klein(double: int, single: int, heads: int, text: int) -> Published:
    sizes = {"num_layers": double, "num_single_layers": single, "num_attention_heads": heads}
    # The conditioning concatenates three layers of the text encoder.
    sizes |= {"joint_attention_dim": 3 * text, "guidance_embeds": False}
    return Published("flux2", sizes, {"text_encoder": text}, channels=32)


XL = {
    "sample_size": 128,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
MODELS: dict[str, Published] = {
    "Stable Diffusion 1.5": Published(
        "sd1", {"sample_size": 64, "cross_attention_dim": 768}, {"text_encoder": 768}, channels=4
    ),
    "Stable Diffusion XL": Published("sdxl", XL, {"text_encoder": 768, "text_encoder_2": 1280}, channels=4),
    "Stable Diffusion 3 medium": _sd3(24, 24, 192),
    "Stable Diffusion 3.5 medium": _sd3(24, 24, 384, dual=13, norm="rms_norm"),
    "Stable Diffusion 3.5 large": _sd3(38, 38, 192, norm="rms_norm"),
    "FLUX.1-dev": Published("flux", {"guidance_embeds": True}, {"text_encoder": 768, "text_encoder_2": 4096}),
    # In the pipeline of klein: the two differ in their text encoders, and their denoisers share one class.
    "FLUX.2-dev": Published("flux2", {}, {"text_encoder": 5120}, channels=32),
    "FLUX.2-klein-4B": _klein(5, 20, 24, 2560),
    "FLUX.2-klein-9B": _klein(8, 24, 32, 4096),
    "Sana 1.6B": Published("sana", {}, {"text_encoder": 2304}, channels=32),
    "Qwen-Image": Published("qwen_image", {}, {"text_encoder": 3584}),
    "Z-Image": Published("z_image", {}, {"text_encoder": 2560}),
}
"""Models by name. Sizes not given are the defaults of diffusers' classes."""


def save(model: Published, folder: Path) -> Path:
    """Write the pipeline into `folder` and return `folder`."""
    pipeline = tiny.make(model.pipeline)
    torch.manual_seed(0)
    changed = {name: _text(getattr(pipeline, name), width) for name, width in model.text.items()}
    pipeline.register_modules(**changed, vae=VAES[model.pipeline](model.channels))
    for name in ("tokenizer", "tokenizer_2"):
        tokenizer = getattr(pipeline, name, None)
        if type(tokenizer).__name__ == "CLIPTokenizer":
            tokenizer.model_max_length = CLIP_TOKENS
    pipeline.save_pretrained(folder)
    part = "unet" if hasattr(pipeline, "unet") else "transformer"
    kind = type(getattr(pipeline, part))
    config = {"_class_name": kind.__name__, **model.sizes}
    # The weights stay the tiny ones: a simulation names the files but does not read them.
    (folder / part / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _text(encoder: Any, width: int) -> Any:
    """Return a text encoder like ``encoder`` with outputs of this width."""
    sizes = encoder.config.to_dict()
    kind = type(encoder)
    name = kind.__name__
    if name.startswith("CLIP"):
        # In all of these models the projection is as wide as the hidden states.
        sizes |= {"hidden_size": width, "projection_dim": width, "max_position_embeddings": CLIP_TOKENS}
    elif name.startswith("T5"):
        sizes["d_model"] = width
    elif name.startswith("Qwen2_5_VL"):
        half = width // sizes["text_config"]["num_attention_heads"] // 2
        parts = [half // 4, half // 4, half - 2 * (half // 4)]
        sizes["text_config"] |= {"hidden_size": width}
        sizes["text_config"]["rope_parameters"]["mrope_section"] = parts
        sizes["vision_config"] |= {"out_hidden_size": width}
    else:
        sizes["hidden_size"] = width
    return kind(type(encoder.config)(**sizes)).eval()


# ---------------------------------------------------------------------------------------------------------------- VAEs
LEVELS = 4
"""Levels of a VAE with 8 x 8 pixels per latent."""
DEEP_LEVELS = 6
"""Levels of Sana's VAE, with 32 x 32 pixels per latent."""


def _kl(channels: int) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(**_levels(), latent_channels=channels, shift_factor=0.1).eval()


def _kl_flux2(channels: int) -> Any:
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2(**_levels(), latent_channels=channels).eval()


def _levels() -> dict[str, Any]:
    return {
        "block_out_channels": (8,) * LEVELS,
        "down_block_types": ("DownEncoderBlock2D",) * LEVELS,
        "up_block_types": ("UpDecoderBlock2D",) * LEVELS,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }


def _dc(channels: int) -> Any:
    from diffusers import AutoencoderDC

    blocks: dict[str, Any] = {f"{part}_block_types": "ResBlock" for part in ("encoder", "decoder")}
    # The last level must be at least as wide as a latent.
    widths = (8,) * (DEEP_LEVELS - 1) + (channels,)
    blocks |= {f"{part}_block_out_channels": widths for part in ("encoder", "decoder")}
    blocks |= {f"{part}_layers_per_block": (1,) * DEEP_LEVELS for part in ("encoder", "decoder")}
    blocks |= {f"{part}_qkv_multiscales": ((),) * DEEP_LEVELS for part in ("encoder", "decoder")}
    return AutoencoderDC(latent_channels=channels, **blocks).eval()


def _qwen(channels: int) -> Any:
    from diffusers import AutoencoderKLQwenImage

    ones = [1.0] * channels
    return AutoencoderKLQwenImage(
        base_dim=8, z_dim=channels, num_res_blocks=1, latents_mean=ones, latents_std=ones
    ).eval()


VAES: dict[str, Callable[[int], Any]] = {
    **dict.fromkeys(("sd1", "sdxl", "sd3", "flux", "z_image"), _kl),
    "flux2": _kl_flux2,
    "sana": _dc,
    "qwen_image": _qwen,
}


def save_pictures(folder: Path) -> Path:
    """Write pictures with captions into `folder` and return the folder."""
    return drawn.folder_of(folder, *PICTURES * [(SIDE, SIDE)])
