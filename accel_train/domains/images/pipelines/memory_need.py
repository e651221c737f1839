"""Memory for training adapters on a pipeline, estimated by arithmetic before anything is loaded.

Weights are counted. Activations are numbers estimated by hand for each family, until a planner measures them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel_train.domains.images.pipelines.loading import DiffusersBase
from accel_train.precision import dtype_of
from accel_train.speed.fitting import FP32_BYTES, GIB, OPTIMIZER_BYTES, Size
from accel_train.speed.frozen_offload import offloaded_bytes

MEGAPIXEL = 1 << 20
RESERVED_GIB = 1.0
"""Context of the device, buffers of kernels, gaps between allocations."""
VAE_GIB = 5.0
"""Activations of a VAE in fp32, for each megapixel."""
SELECTIVE = 0.5
"""Share of activations kept by selective activation checkpointing."""


class Activations(NamedTuple):
    """GiB of a denoiser in bf16 for each megapixel of one picture."""

    checkpointed: float
    """With activation checkpointing of mode full."""
    whole: float


ACTIVATIONS = {
    "Stable Diffusion 1.x and 2.x": Activations(2.5, 12.0),
    "Stable Diffusion XL": Activations(3.0, 14.0),
    "Stable Diffusion 3": Activations(1.0, 12.0),
    "Flux": Activations(2.6, 48.0),
    "Flux.2": Activations(5.0, 100.0),
    "Flux.2 klein": Activations(1.6, 22.0),
    "Sana": Activations(0.2, 3.0),
    "Qwen-Image": Activations(2.6, 55.0),
    "Z-Image": Activations(1.8, 20.0),
}
"""By name of the family. Estimated by hand, not measured."""
UNKNOWN = Activations(5.0, 100.0)
"""For an unlisted family: the most of all."""


class Load(NamedTuple):
    """Load of a run on one device."""

    size: Size
    """Of the denoiser with its adapters."""
    micro_batch_size: int
    megapixels: float
    """Of the largest picture."""
    checkpointing: str
    """Mode of activation checkpointing."""
    precision: str
    optimizer: str


class Need(NamedTuple):
    """GiB required on a device, at the three peaks of a run."""

    texts: float
    """While captions are encoded: text encoders and VAE."""
    pictures: float
    """While pictures are encoded: VAE and its activations."""
    training: float
    parts: str
    """Parts of the training peak."""

    @property
    def most(self) -> float:
        """The largest of the three, plus the reserve."""
        return max(self.texts, self.pictures, self.training) + RESERVED_GIB

    def __str__(self) -> str:
        return (
            f"{self.most:.1f} GiB (captions {self.texts:.1f}, pictures {self.pictures:.1f}, training "
            f"{self.training:.1f}: {self.parts}; reserved {RESERVED_GIB:.0f})"
        )


def estimate(base: DiffusersBase, load: Load) -> Need:
    """Estimate the memory of a run. Reads headers of files, no weights."""
    texts = encoder_bytes(base) / GIB
    vae = base.values_of("vae") * FP32_BYTES / GIB
    size = load.size
    # Gradient and state of the optimizer; the adapters themselves are among the weights.
    state = size.trained * (FP32_BYTES + OPTIMIZER_BYTES.get(load.optimizer, 2 * FP32_BYTES)) / GIB
    weights = (size.weight_bytes - size.offloaded_bytes) / GIB
    activations = _activations(base.family.name, load)
    parts = f"weights {weights:.1f}, optimizer {state:.1f}, activations {activations:.1f}, VAE {vae:.1f}"
    pictures = vae + VAE_GIB * load.megapixels * base.config.encoder_batch_size
    return Need(texts + vae, pictures, weights + state + activations + vae, parts)


def encoder_bytes(base: DiffusersBase) -> int:
    """Return the bytes of the text encoders on a device, from headers and configs. Reads no tensor."""
    found = 0
    for name in base.text_encoders():
        values = base.values_of(name)
        if base.config.offload_encoders:
            with torch.device("meta"):
                encoder = base.component(name, "fp32").requires_grad_(False)
            values -= offloaded_bytes(encoder) // FP32_BYTES
        found += values * dtype_of(base.config.encoder_precision).itemsize
    return found


def _activations(family: str, load: Load) -> float:
    known = ACTIVATIONS.get(family, UNKNOWN)
    each = known.checkpointed
    if load.checkpointing == "selective":
        # Selective keeps more than full does, never less.
        each = max(each, SELECTIVE * known.whole)
    elif load.checkpointing != "full":
        each = known.whole
    # The table is of bf16, 2 bytes a value.
    wider = FP32_BYTES / 2 if load.precision == "fp32" else 1.0
    return each * wider * load.megapixels * load.micro_batch_size
