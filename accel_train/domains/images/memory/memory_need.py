"""Memory for training adapters on a pipeline, estimated before anything is loaded.

Weights and the state of the optimizer are counted. Activations are taken from simulations of published models
(``simulated_memory``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel_train.domains.images.memory.simulated_memory import MODELS, VAES, Model
from accel_train.domains.images.pipelines.loading import DiffusersBase
from accel_train.precision import dtype_of
from accel_train.speed.memory.fitting import FP32_BYTES, GIB, OPTIMIZER_BYTES, Size
from accel_train.speed.memory.frozen_offload import offloaded_bytes

MEGAPIXEL = 1 << 20
RESERVED_GIB = 1.0
"""Assumed for the device's context, workspaces of kernels and gaps between allocations, which are not simulated."""


class Load(NamedTuple):
    """Load of a run on one device."""

    size: Size
    """Size of the denoiser with its adapters."""
    values: int
    """Number of weights of the denoiser without adapters, however many bits each has (``denoiser_values``)."""
    micro_batch_size: int
    """Pictures in a forward."""
    megapixels: float
    """Megapixels of the largest picture."""
    checkpointing: str
    """Mode of activation checkpointing."""
    precision: str
    optimizer: str
    has_ema: bool = False
    """True with EMA weights of the adapters."""
    drawn_megapixels: float = 0.0
    """Megapixels of a picture drawn in an evaluation. 0: none is drawn."""


class Need(NamedTuple):
    """GiB required on a device, at the four peaks of a run."""

    texts: float
    """While captions are encoded: text encoders and VAE."""
    pictures: float
    """While pictures are encoded: VAE and its activations."""
    training: float
    drawing: float
    """While a picture of an evaluation is decoded: the weights, the state of the optimizer, and the VAE's
    activations. 0 if none is drawn."""
    parts: str
    """Parts of the training peak."""

    @property
    def most(self) -> float:
        """The largest of the four, plus the reserve."""
        return max(self.texts, self.pictures, self.training, self.drawing) + RESERVED_GIB

    def __str__(self) -> str:
        drawing = ""
        if self.drawing:
            drawing = f", drawing {self.drawing:.1f}"
        return (
            f"{self.most:.1f} GiB (captions {self.texts:.1f}, pictures {self.pictures:.1f}, training "
            f"{self.training:.1f}: {self.parts}{drawing}; reserved {RESERVED_GIB:.0f})"
        )


def estimate(base: DiffusersBase, load: Load) -> Need:
    """Estimate the memory of a run. Reads headers of files, no weights."""
    texts = encoder_bytes(base) / GIB
    vae = base.values_of("vae") * FP32_BYTES / GIB
    of_vae = VAES[base.class_of("vae")]
    size = load.size
    # Gradient, state of the optimizer and EMA; the adapters themselves are among the weights.
    each = FP32_BYTES + OPTIMIZER_BYTES.get(load.optimizer, 2 * FP32_BYTES)
    if load.has_ema:
        each += FP32_BYTES
    state = size.trained * each / GIB
    weights = (size.weight_bytes - size.offloaded_bytes) / GIB
    activations = _activations(base.family.name, load)
    parts = f"weights {weights:.1f}, optimizer {state:.1f}, activations {activations:.1f}, VAE {vae:.1f}"
    pictures = vae + of_vae.encode * load.megapixels * base.config.encoder_batch_size
    resting = weights + state + vae
    drawing = 0.0
    if load.drawn_megapixels:
        drawing = resting + of_vae.decode * load.drawn_megapixels
    return Need(texts + vae, pictures, resting + activations, drawing, parts)


def denoiser_values(base: DiffusersBase) -> int:
    """Return the number of values of the denoiser's weights, from its config. Reads no tensor."""
    with torch.device("meta"):
        model = base.component(base.family.denoiser, "fp32")
    return sum(parameter.numel() for parameter in model.parameters())


def encoder_bytes(base: DiffusersBase) -> int:
    """Return the bytes of the text encoders on a device, from headers and configs. Reads no tensor."""
    total = 0
    for name in base.text_encoders():
        values = base.values_of(name)
        if base.config.offload_encoders:
            with torch.device("meta"):
                encoder = base.component(name, "fp32").requires_grad_(False)
            values -= offloaded_bytes(encoder) // FP32_BYTES
        total += values * dtype_of(base.config.encoder_precision).itemsize
    return total


def nearest(family: str, values: int) -> Model:
    """Return the smallest simulated model of a family with at least as many values, or else its largest."""
    known = MODELS[family]
    return next((model for model in known if model.values >= values), known[-1])


def _activations(family: str, load: Load) -> float:
    model = nearest(family, load.values)
    figures = model.none
    # Other modes keep more than full does, and are counted as none.
    if load.checkpointing in ("full", "selective"):
        figures = getattr(model, load.checkpointing)
    gib = model.fixed + load.micro_batch_size * (figures.picture + figures.megapixel * load.megapixels)
    # A model that is larger than any simulated one keeps more.
    gib *= max(1.0, load.values / model.values)
    if load.precision == "fp32":
        # Simulated in bf16, with at least 2 bytes for each value.
        gib *= FP32_BYTES / 2
    return gib
