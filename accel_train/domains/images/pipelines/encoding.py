"""Captions and pictures as the denoiser is given them: embeddings made once, latents of a micro-batch."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.data.progress import Progress
from accel_train.domains.images.dataset import PictureDataset
from accel_train.domains.images.pipelines.loading import Base

logger = logging.getLogger(__name__)
CAPTIONS_AT_ONCE = 8


@dataclass(frozen=True, eq=False)
class Prompts:
    """Embeddings of captions, each once, in host memory."""

    rows: Mapping[str, int]
    """Caption -> its row."""
    table: Mapping[str, Tensor]
    """Name -> (captions, ...)."""

    def __len__(self) -> int:
        return len(self.rows)

    def alone(self, caption: str, device: torch.device) -> dict[str, Tensor]:
        """Return the embeddings of one caption, with a first dimension of 1."""
        return {name: values[None].to(device) for name, values in self.row(caption).items()}

    def row(self, caption: str) -> dict[str, Tensor]:
        """Return the embeddings of one caption."""
        number = self.rows[caption]
        return {name: values[number] for name, values in self.table.items()}


@dataclass(frozen=True, eq=False)
class CaptionedPictures:
    """Pictures with the embeddings of their captions, for the loader."""

    pictures: PictureDataset
    prompts: Prompts

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the sample of the pictures, its caption's embeddings, and sizes (6,) int64 as XL counts them."""
        sample = self.pictures[index]
        named = [sample.pop(name) for name in ("original_size", "crop_top_left", "target_size")]
        return {**sample, "sizes": torch.cat(named), **self.prompts.row(self.pictures.samples[index].caption)}

    def sample_shape(self, index: int) -> tuple[int, ...]:
        """Return (height, width) of a sample's bucket. A micro-batch has one shape."""
        return self.pictures.sample_shape(index)


@torch.no_grad()
def encode_captions(pipeline: Any, base: Base, captions: Sequence[str], *, show: bool) -> Prompts:
    """Encode each caption once, by the pipeline's own ``encode_prompt``. ``show`` draws a progress bar.

    Every process does it alike. Prompts with a mask are padded to the longest one.
    """
    unique = list(dict.fromkeys(captions))
    length = base.config.prompt_tokens or base.family.prompt_tokens
    parts: list[dict[str, Tensor]] = []
    with Progress("captions", len(unique), enabled=show) as progress:
        for start in range(0, len(unique), CAPTIONS_AT_ONCE):
            some = unique[start : start + CAPTIONS_AT_ONCE]
            encoded = base.family.encode(pipeline, some, length)
            parts.append({name: values.cpu() for name, values in encoded.items()})
            progress.update(len(some))
    table = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return Prompts({caption: row for row, caption in enumerate(unique)}, table)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join tables of captions, the second dimension padded with zeros to the longest."""
    if parts[0].dim() == 1:
        return torch.cat(list(parts))
    longest = max(part.shape[1] for part in parts)
    padded: list[Tensor] = []
    for part in parts:
        behind = [0, 0] * (part.dim() - 2) + [0, longest - part.shape[1]]
        padded.append(F.pad(part, behind))
    return torch.cat(padded)


def drop_text_encoders(pipeline: Any) -> int:
    """Remove the text encoders from a pipeline, and return the bytes of their weights. Its VAE stays."""
    freed = 0
    for name in list(pipeline.components):
        encoder = getattr(pipeline, name)
        if name.startswith("text_encoder") and encoder is not None:
            freed += sum(weight.numel() * weight.element_size() for weight in encoder.parameters())
            pipeline.register_modules(**{name: None})
    gc.collect()
    return freed


@torch.no_grad()
def encode_pictures(vae: Any, pixels: Tensor) -> dict[str, Tensor]:
    """Return mean and logvar (B, C, H, W) of pixels (B, 3, H, W) from -1 to 1, in fp32.

    A deterministic encoder has logvar -inf, so that a draw is the mean.
    """
    is_video = type(vae).__name__ == "AutoencoderKLQwenImage"
    found = vae.encode(pixels.unsqueeze(2) if is_video else pixels)
    if not hasattr(found, "latent_dist"):
        mean = found.latent.float()
        return {"mean": mean, "logvar": torch.full_like(mean, float("-inf"))}
    mean = found.latent_dist.mean.float()
    logvar = found.latent_dist.logvar.float()
    if is_video:
        return {"mean": mean.squeeze(2), "logvar": logvar.squeeze(2)}
    return {"mean": mean, "logvar": logvar}
