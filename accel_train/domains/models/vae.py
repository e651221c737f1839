"""Picture autoencoders of diffusers, for models of their latents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from accel_train.config import UsageError, expand_path
from accel_train.data.datasets import content_hash
from accel_train.domains.models.pretrained import config_hash, refuse_missing

TRIAL_SIDE = 64
"""Side in pixels of a trial picture, encoded once to find the channels and the size of latents."""
CHANNELS = 3
IDENTITY_FILE = "latents.identity"
"""File beside stored latents that identifies them, because their bytes differ from machine to machine."""


@dataclass(frozen=True)
class VaeReference:
    """Autoencoder behind the latents of a model, and their form."""

    source: str
    """Hub id, or path of a folder."""
    revision: str | None
    """Commit of a Hub id."""
    sha256: str
    """Sha256 of the names, dtypes, shapes and bytes of its weights."""
    channels: int
    """Channels of a latent."""
    reduction: int
    """Pixels along a side of one latent."""
    config: str
    """Sha256 of its config: the same weights with another activation give other latents."""

    @property
    def identity(self) -> str:
        """Hash of weights and config."""
        return f"{self.sha256} {self.config}"


class PictureVae(nn.Module):
    """An autoencoder of diffusers in fp32 and eval mode, with pixels and latents in the forms used here."""

    def __init__(self, module: Any, reference: VaeReference) -> None:
        super().__init__()
        self.module = module
        self.reference = reference

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Return the latents (B, C, h, w) of pixels (B, 3, H, W) from -1 to 1. A distribution gives its mean."""
        return _mean_latents(self.module.encode(pixels))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the pixels (B, 3, H, W) of latents (B, C, h, w), about from -1 to 1."""
        return self.module.decode(latents).sample

    def decode_all(self, latents: Tensor, batch_size: int) -> Tensor:
        """Decode latents on any device in batches. The pixels are on the CPU."""
        device = next(self.parameters()).device
        pixels = [self.decode(part.to(device)).cpu() for part in latents.split(batch_size)]
        return torch.cat(pixels)


def load_vae(source: str, revision: str | None, option: str, expected: VaeReference | None = None) -> PictureVae:
    """Load an autoencoder by path or Hub id, on the CPU: from its own folder, or the ``vae`` of a pipeline.

    ``option`` is named in errors. Raises ``UsageError`` for anything else, missing weights, autoencoders of videos, and
    weights or a config other than ``expected``.
    """
    module, commit = _load(source, revision, option)
    module.eval().requires_grad_(False)
    with torch.no_grad():
        try:
            trial = _mean_latents(module.encode(torch.zeros(1, CHANNELS, TRIAL_SIDE, TRIAL_SIDE)))
            shape = module.decode(trial).sample.shape
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{option} {source!r}: a {type(module).__name__} cannot encode a picture of {TRIAL_SIDE} x "
                f"{TRIAL_SIDE} pixels ({type(error).__name__}: {str(error)[:120]}); an autoencoder of pictures, such "
                "as AutoencoderKL, is required"
            ) from None
    if shape != (1, CHANNELS, TRIAL_SIDE, TRIAL_SIDE):
        raise UsageError(
            f"{option} {source!r}: decodes a picture of {TRIAL_SIDE} x {TRIAL_SIDE} pixels to {tuple(shape)}; the same "
            "size is required"
        )
    found = content_hash(module.state_dict())
    config = config_hash(module)
    if expected is not None:
        _refuse_other("weights", found, expected.sha256, f"{option} {source!r}")
        _refuse_other("config", config, expected.config, f"{option} {source!r}")
    path = expand_path(source)
    # Absolute, because a checkpoint may be read from any directory.
    where = str(path.absolute()) if path.is_dir() else source
    reference = VaeReference(where, commit, found, trial.shape[1], TRIAL_SIDE // trial.shape[2], config)
    return PictureVae(module, reference)


def _refuse_other(part: str, found: str, expected: str, named: str) -> None:
    if found != expected:
        raise UsageError(
            f"{named}: the sha256 of its {part} is {found[:12]}, and the model was trained on latents of "
            f"{expected[:12]}; restore the autoencoder of the training"
        )


def _load(source: str, revision: str | None, option: str) -> tuple[Any, str | None]:
    """Return the autoencoder and, for a Hub id, its commit."""
    try:
        import diffusers
    except ImportError:
        raise UsageError(f"{option}: needs diffusers; run pip install 'accel-train[diffusers]'") from None
    path = expand_path(source)
    if path.is_dir() and revision is not None:
        raise UsageError(f"{option} {source!r} is a folder and has no revision {revision!r}; leave the revision out")
    failures: list[str] = []
    for subfolder in _subfolders(path):
        where: dict[str, Any] = {"subfolder": subfolder, "revision": revision}
        folder = str(path) if path.is_dir() else source
        try:
            # AutoModel itself has no loading info to return.
            config, commit = cast("Any", diffusers.AutoModel.load_config(folder, return_commit_hash=True, **where))
            if path.is_dir():
                commit = None
            else:
                # The branch may move on before the weights are read.
                where["revision"] = commit
            model, found = getattr(diffusers, config["_class_name"]).from_pretrained(
                folder,
                **where,
                # Some autoencoders overflow in fp16, SDXL's among them.
                dtype=torch.float32,
                # A pickle may run code.
                use_safetensors=True,
                output_loading_info=True,
            )
            break
        except Exception as error:  # failures of hub, network and format have no common type
            failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    else:
        raise UsageError(
            f"{option} {source!r} cannot be loaded ({failures[-1]}). The Hub id or folder of a "
            "diffusers autoencoder with safetensors weights, or of a pipeline that has one, is required (without a "
            "network it must be in the cache)"
        )
    refuse_missing(f"{option} {source!r}", model, found["missing_keys"])
    return model, commit


def _subfolders(path: Path) -> Iterator[str | None]:
    """Yield the subfolders that may hold the autoencoder. For a Hub id both have to be tried."""
    if path.is_dir():
        yield "vae" if (path / "vae").is_dir() else None
        return
    yield "vae"
    yield None


def _mean_latents(encoded: Any) -> Tensor:
    if hasattr(encoded, "latent_dist"):
        return encoded.latent_dist.mean
    # AutoencoderDC and AutoencoderTiny have no distribution, and two names.
    return encoded.latent if hasattr(encoded, "latent") else encoded.latents
