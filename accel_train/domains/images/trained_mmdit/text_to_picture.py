"""Our own MMDiT as a text-to-image pipeline: its captions, its patches, its sampler.

To recipes/lora.py it looks like a diffusers pipeline, with parts of the same names: text encoder, VAE and
transformer. An absent caption is one with all its tokens masked, at time 1, as in recipes/mmdit.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.sampling import LatentSamplingConfig, Predict, sample_latents
from accel_train.domains.images.pipelines.family import Conditioning, Family, Predicting
from accel_train.domains.models.patches import as_grid, as_tokens, cut, joined
from accel_train.domains.models.vae import PictureVae

NAME = "MMDiT of recipes/mmdit.py"
TARGETS = (
    *("streams.1.qkv", "streams.1.out", "streams.1.ffn.expand", "streams.1.ffn.project"),
    "streams.0.qkv",
)
"""All layers of the picture stream, and queries, keys and values of the caption stream. The caption stream's other
layers in the last block have no influence on a picture, so an adapter there would have no gradient."""


class Encoded(NamedTuple):
    """Output of an encoder without a distribution, as diffusers names it."""

    latent: Tensor


class Drawn(NamedTuple):
    """Pictures (B, H, W, 3) fp32 from 0 to 1, as diffusers returns them."""

    images: Any


class CaptionTokens(nn.Module):
    """Tokenizer of the base's training, in place of a text encoder.

    Its file is a buffer, so that it identifies cached tokens like the weights of a text encoder identify embeddings.
    """

    def __init__(self, file: Path, max_length: int, mask_id: int, pad_id: int, special_ids: Sequence[int]) -> None:
        from tokenizers import Tokenizer

        super().__init__()
        content = file.read_bytes()
        self.mask_id = mask_id
        self.register_buffer("file", torch.frombuffer(bytearray(content), dtype=torch.uint8))
        # Sorted, because the content hash of the encoder must not depend on the order of a set.
        self.register_buffer("special_ids", torch.tensor(sorted({pad_id, mask_id, *special_ids})))
        self.tokenizer: Any = Tokenizer.from_str(content.decode())
        # Special tokens spelled out in a caption are ordinary characters, as in training.
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.enable_truncation(max_length)
        # Always to the maximum, so that cached rows have one shape, whatever the batch.
        self.tokenizer.enable_padding(length=max_length, pad_id=pad_id)
        self.config: dict[str, Any] = {"max_length": max_length, "mask_id": mask_id, "pad_id": pad_id}

    def forward(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditioning of captions. All but ``text_time`` (B,) are (B, S), and padded."""
        encodings = self.tokenizer.encode_batch(list(captions))
        tokens = torch.tensor([encoding.ids for encoding in encodings])
        mask = torch.tensor([encoding.attention_mask for encoding in encodings], dtype=torch.bool)
        special: Any = self.special_ids
        maskable = mask & ~torch.isin(tokens, special.cpu())
        return {
            "tokens": tokens,
            "absent": tokens.masked_fill(maskable, self.mask_id),
            "text_mask": mask,
            # A caption without ordinary tokens is absent, which is time 1.
            "text_time": (~maskable.any(1)).float(),
        }


class Patches(nn.Module):
    """Patches of pixels in place of a VAE: (B, 3, H, W) to (B, 3 P^2, H / P, W / P), in units of pixels.

    With an autoencoder, patches of its latents.
    """

    def __init__(self, patch: int, mean: Tensor, std: float, vae: PictureVae | None = None) -> None:
        super().__init__()
        self.patch = patch
        self.vae = vae
        self.config: dict[str, Any] = {"patch": patch, "vae": None if vae is None else vae.reference.config}
        self.register_buffer("mean", mean)  # (C P^2,)
        self.register_buffer("std", torch.tensor(std))

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    @property
    def side(self) -> int:
        """Pixels along a side of a patch."""
        return self.patch if self.vae is None else self.patch * self.vae.reference.reduction

    @property
    def channels(self) -> int:
        """Values of a patch."""
        return dict(self.named_buffers())["mean"].numel()

    def encode(self, pixels: Tensor) -> Encoded:
        values = pixels if self.vae is None else self.vae.encode(pixels)
        return Encoded(cut(values, self.patch))

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pixels (B, 3, H, W) of latents as ``encode`` returns them."""
        values = joined(latents, self.patch)
        return values if self.vae is None else self.vae.decode(values)

    def normalise(self, latents: Tensor) -> Tensor:
        """Normalise latents for the denoiser."""
        mean, std = self._scale()
        return (latents - mean) / std

    def denormalise(self, latents: Tensor) -> Tensor:
        """Undo ``normalise``."""
        mean, std = self._scale()
        return latents * std + mean

    def _scale(self) -> tuple[Tensor, Tensor]:
        # By name, because attributes of a module have the type of any module for the type checker.
        buffers = dict(self.named_buffers())
        return buffers["mean"][:, None, None], buffers["std"]


class MMDiTPipeline:
    """The parts of a base, with its sampler. ``transformer`` is None until a denoiser is set."""

    def __init__(
        self,
        text_encoder: CaptionTokens,
        vae: Patches,
        transformer: nn.Module | None,
        diffusion: LatentDiffusionConfig,
        sampler: LatentSamplingConfig,
    ) -> None:
        self.text_encoder: CaptionTokens | None = text_encoder
        self.vae = vae
        self.transformer = transformer
        self.diffusion = diffusion
        self.sampler = sampler

    @property
    def components(self) -> dict[str, nn.Module | None]:
        """The modules by name, as diffusers has them."""
        return {"text_encoder": self.text_encoder, "vae": self.vae, "transformer": self.transformer}

    @property
    def vae_scale_factor(self) -> int:
        """Pixels along a side of one latent."""
        return self.vae.side

    def register_modules(self, **modules: Any) -> None:
        """Replace components by name."""
        for name, module in modules.items():
            setattr(self, name, module)

    @torch.no_grad()
    def __call__(
        self,
        *,
        conditioning: Conditioning,
        height: int,
        width: int,
        num_inference_steps: int,
        guidance_scale: float,
        generator: torch.Generator | Sequence[torch.Generator],
        output_type: str,
    ) -> Drawn:
        """Draw a picture for each row of ``conditioning``, from the noise of the seed of its generator."""
        assert output_type == "np", "other forms have no use here"
        grid = (height // self.vae.side, width // self.vae.side)
        given = {name: value.to(self.vae.device) for name, value in conditioning.items()}
        generators = [generator] if isinstance(generator, torch.Generator) else generator
        # Only the seeds of the generators in diffusers' interface are used: noise here is keyed, not drawn in sequence.
        seeds = torch.tensor([each.initial_seed() for each in generators], device=self.vae.device)
        options = LatentSamplingConfig(num_inference_steps, guidance_scale, self.sampler.shift)
        drawn = sample_latents(
            self._predictor(given, grid),
            (grid[0] * grid[1], self.vae.channels),
            self.diffusion,
            options,
            0,
            seeds,
            # Always given, and called only with a guidance other than 1.
            unconditional=self._predictor(left_out(given, given), grid),
        )
        pixels = self.vae.decode(self.vae.denormalise(as_grid(drawn, grid)))  # (B, 3, H, W)
        images = (pixels.clamp(-1, 1) + 1) / 2
        return Drawn(images.permute(0, 2, 3, 1).cpu().numpy())

    def _predictor(self, conditioning: Conditioning, grid: tuple[int, int]) -> Predict:
        def predict(tokens: Tensor, time: Tensor) -> Tensor:
            assert self.transformer is not None
            return _forward(self.transformer, tokens, time, conditioning, grid)

        return predict


def _forward(
    model: nn.Module, latents: Tensor, time: Tensor, conditioning: Conditioning, grid: tuple[int, int]
) -> Tensor:
    """Return the prediction for latents (B, L, D) at ``time`` (B,)."""
    return model(
        conditioning["tokens"], latents, conditioning["text_time"], time, conditioning["text_mask"], grid=grid
    ).latents


def _encode(pipeline: MMDiTPipeline, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    assert pipeline.text_encoder is not None, "captions are encoded before it is dropped"
    return pipeline.text_encoder(captions)


def _predict(model: nn.Module, inputs: Predicting) -> Tensor:
    rows, columns = inputs.noisy.shape[2:]
    grid = (rows, columns)
    predicted = _forward(model, as_tokens(inputs.noisy), inputs.timestep, inputs.conditioning, grid)
    return as_grid(predicted, grid)


def _sample(prompt: Conditioning, empty: Conditioning) -> dict[str, Any]:
    return {"conditioning": prompt}


def _normalise(vae: Patches, latents: Tensor) -> Tensor:
    return vae.normalise(latents)


def left_out(given: Conditioning, empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the conditioning of absent captions in place of the given ones: tokens masked, at time 1."""
    return {**given, "tokens": given["absent"], "text_time": torch.ones_like(given["text_time"])}


def _idle(model: nn.Module) -> frozenset[str]:
    """Return the layers after attention in the last block of the caption stream, and the captions' head."""
    denoiser: Any = model
    last = f"transformer.blocks.{len(denoiser.transformer.blocks) - 1}.streams.0"
    names = ("out", "ffn.expand", "ffn.project")
    return frozenset(["text_head", *(f"{last}.{name}" for name in names)])


MMDIT = Family(
    name=NAME,
    pipelines=("MultimodalMMDiT",),
    denoiser="transformer",
    targets=TARGETS,
    encode=_encode,
    predict=_predict,
    sample=_sample,
    guidance_scale=1.0,
    patch=1,
    normalise=_normalise,
    left_out=left_out,
    draws_at_once=16,
    idle=_idle,
)
"""A base replaces ``guidance_scale`` by that of its own evaluation."""
