"""Squares of pixels from pictures, and their tokens: patches of pixels, or of the latents of an autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from accel_train.domains.models.patches import (
    as_grid,
    as_tokens,
    cut,
    from_patches,
    from_values,
    joined,
    to_patches,
    to_values,
)
from accel_train.domains.models.vae import PictureVae, VaeReference, load_vae

if TYPE_CHECKING:
    from PIL import Image

MIN_SIDE = 2
"""Smallest side, in pixels, of a picture that is cropped to a square."""
CHANNELS = 3
"""Colour channels of a pixel."""


def square(picture: Image.Image, size: int) -> Tensor:
    """Crop the largest square from the centre and scale it: (size, size, 3) uint8."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    fitted = ImageOps.fit(picture, (size, size), Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted))


@dataclass(frozen=True)
class Patching:
    """Conversion of pictures to tokens and back: patches of pixels, or of the latents of an autoencoder."""

    patch: int
    """Pixels, or latents, along a side of a patch."""
    vae: PictureVae | None = None
    batch_size: int = 8
    """Pictures per forward of the autoencoder."""

    @property
    def identity(self) -> str:
        """Identity of the tokens: the patch, and the hashes of the autoencoder if there is one."""
        return f"{self.patch}" if self.vae is None else f"{self.patch} {self.vae.reference.identity}"

    @property
    def side(self) -> int:
        """Pixels along a side of a token."""
        return self.patch if self.vae is None else self.patch * self.vae.reference.reduction

    def tokens(self, pictures: Tensor) -> Tensor:
        """Return tokens (N, L, D) of pictures (N, H, W, 3) uint8, in fp16 on the CPU as the rows of training have them.

        That is fine enough to keep the 256 values of a pixel apart.
        """
        return self._exact(pictures).to(torch.float16)

    def pictures(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return pictures (N, H, W, 3) uint8 on the CPU of tokens (N, L, D)."""
        if self.vae is None:
            return from_patches(tokens.cpu(), grid, self.patch)
        latents = joined(as_grid(tokens.float(), grid), self.patch)
        return from_values(self.vae.decode_all(latents, self.batch_size))

    def _exact(self, pictures: Tensor) -> Tensor:
        """Return the tokens in fp32."""
        if self.vae is None:
            return to_patches(pictures, self.patch)
        device = next(self.vae.parameters()).device
        tokens: list[Tensor] = []
        for part in pictures.split(self.batch_size):
            latents = self.vae.encode(to_values(part).to(device)).cpu()
            tokens.append(as_tokens(cut(latents, self.patch)))
        return torch.cat(tokens)


def find_patching(width: int, reference: VaeReference | None, device: str) -> Patching:
    """Return the patching of tokens of ``width`` values in training, with the autoencoder of ``reference``, if any.

    Raises ``UsageError`` if the autoencoder is missing, or differs from that of training.
    """
    channels = CHANNELS
    vae = None
    if reference is not None:
        channels = reference.channels
        vae = load_vae(reference.source, reference.revision, "--vae", reference).to(device)
    # A token is a square patch: D = patch * patch * channels.
    return Patching(round((width / channels) ** 0.5), vae)
