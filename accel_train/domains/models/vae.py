"""Picture autoencoders of diffusers, for models of their latents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.config import UsageError, expand_path
from accel_train.data.tensor_cache import content_hash

TRIAL_SIDE = 64
"""Side in pixels of a trial picture, encoded once to find the channels and the size of latents."""
CHANNELS = 3
IDENTITY_FILE = "latents.identity"
"""File beside stored latents with their identity, in place of their bytes: those differ from machine to machine."""


@dataclass(frozen=True)
class VaeReference:
    """Autoencoder behind the latents of a model, and their form."""

    source: str
    """Hub id, or path of a folder."""
    revision: str | None
    """Branch, tag or commit of a Hub id."""
    sha256: str
    """Of names, dtypes, shapes and bytes of its weights."""
    channels: int
    """Of a latent."""
    reduction: int
    """Pixels along a side of one latent."""


class PictureVae(nn.Module):
    """An autoencoder of diffusers in fp32 and eval mode, with pixels and latents in the forms used here."""

    def __init__(self, module: Any, reference: VaeReference) -> None:
        super().__init__()
        self.module = module
        self.reference = reference

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Return the latents (B, C, h, w) of pixels (B, 3, H, W) from -1 to 1: of a distribution, its mean."""
        return _mean(self.module.encode(pixels))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the pixels (B, 3, H, W) of latents (B, C, h, w), about from -1 to 1."""
        return self.module.decode(latents).sample

    def decode_all(self, latents: Tensor, batch_size: int) -> Tensor:
        """Decode latents on any device in batches. The pixels are on the CPU."""
        device = next(self.parameters()).device
        pixels = [self.decode(part.to(device)).cpu() for part in latents.split(batch_size)]
        return torch.cat(pixels)


def load_vae(source: str, revision: str | None, option: str, sha256: str | None = None) -> PictureVae:
    """Load an autoencoder by path or Hub id, on the CPU: from its own folder, or the ``vae`` of a pipeline.

    ``option`` is named in errors. Raises ``UsageError`` for anything else, autoencoders of videos, and, with
    ``sha256``, other weights.
    """
    module = _load(source, revision, option)
    module.eval().requires_grad_(False)
    with torch.no_grad():
        try:
            trial = _mean(module.encode(torch.zeros(1, CHANNELS, TRIAL_SIDE, TRIAL_SIDE)))
            shape = module.decode(trial).sample.shape
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{option} {source!r}: a {type(module).__name__} encodes no picture of {TRIAL_SIDE} x {TRIAL_SIDE} "
                f"pixels ({type(error).__name__}: {str(error)[:120]}); an autoencoder of pictures, such as "
                "AutoencoderKL, is required"
            ) from None
    if shape != (1, CHANNELS, TRIAL_SIDE, TRIAL_SIDE):
        raise UsageError(
            f"{option} {source!r}: decodes a picture of {TRIAL_SIDE} x {TRIAL_SIDE} pixels to {tuple(shape)}; the same "
            "size is required"
        )
    found = content_hash(module.state_dict())
    if sha256 is not None and found != sha256:
        raise UsageError(
            f"{option} {source!r}: its weights have the sha256 {found[:12]}, and the model was trained on latents of "
            f"{sha256[:12]}; bring back the autoencoder of the training"
        )
    path = expand_path(source)
    # From any directory, as a checkpoint may be read.
    where = str(path.absolute()) if path.is_dir() else source
    reference = VaeReference(where, revision, found, trial.shape[1], TRIAL_SIDE // trial.shape[2])
    return PictureVae(module, reference)


def _load(source: str, revision: str | None, option: str) -> Any:
    try:
        from diffusers import AutoModel
    except ImportError:
        raise UsageError(f"{option}: needs diffusers; run pip install 'accel-train[diffusers]'") from None
    path = expand_path(source)
    if path.is_dir() and revision is not None:
        raise UsageError(f"{option} {source!r} is a folder and has no revision {revision!r}; leave the revision out")
    failures: list[str] = []
    for subfolder in _subfolders(path):
        try:
            return AutoModel.from_pretrained(
                str(path) if path.is_dir() else source,
                subfolder=subfolder,
                revision=revision,
                # Some autoencoders overflow in fp16, SDXL's among them.
                dtype=torch.float32,
                # A pickle may run code.
                use_safetensors=True,
            )
        except Exception as error:  # failures of hub, network and format have no common type
            failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    raise UsageError(
        f"{option} {source!r} cannot be loaded ({failures[-1]}). Required is the Hub id or folder of an autoencoder of "
        "diffusers with safetensors weights, or of a pipeline that has one (without a network it must be in the cache)"
    )


def _subfolders(path: Path) -> Iterator[str | None]:
    """Yield where the autoencoder may be: of a Hub id one can only try."""
    if path.is_dir():
        yield "vae" if (path / "vae").is_dir() else None
        return
    yield "vae"
    yield None


def _mean(encoded: Any) -> Tensor:
    if hasattr(encoded, "latent_dist"):
        return encoded.latent_dist.mean
    # AutoencoderDC and AutoencoderTiny have no distribution, and two names.
    return encoded.latent if hasattr(encoded, "latent") else encoded.latents
