"""Simulated memory of published pipelines: what ``memory_need`` adds to weights and the state of the optimizer.

The values are those of benchmarks/results/lora_memory.json, written by ``python -m benchmarks.lora_memory``; a test
compares them. They were not measured on a GPU. They exclude workspaces of kernels, the context of a device,
fragmentation, and what kernels of 8 and 4 bits keep.
"""

from __future__ import annotations

from typing import NamedTuple


class Activations(NamedTuple):
    """GiB for each picture of a micro-batch in bf16, beside weights, gradients and the state of the optimizer."""

    picture: float
    """GiB for a picture of any size, mostly for its caption."""
    megapixel: float
    """GiB for each megapixel of a picture."""


class Model(NamedTuple):
    """A published denoiser, by mode of activation checkpointing."""

    name: str
    values: int
    """Number of values in its weights."""
    fixed: float
    """GiB for a micro-batch of any size: buffers, and copies of adapters in bf16."""
    none: Activations
    selective: Activations
    full: Activations


class Vae(NamedTuple):
    """GiB of a VAE in fp32 for each megapixel, beside its weights."""

    encode: float
    decode: float


MODELS: dict[str, tuple[Model, ...]] = {
    "Stable Diffusion 1.x and 2.x": (
        Model(
            "Stable Diffusion 1.5",
            859_520_964,
            fixed=0.007,
            none=Activations(0.008, 4.314),
            selective=Activations(0.002, 3.24),
            full=Activations(-0.005, 1.921),
        ),
    ),
    "Stable Diffusion XL": (
        Model(
            "Stable Diffusion XL",
            2_567_463_684,
            fixed=0.046,
            none=Activations(0.067, 7.163),
            selective=Activations(0.004, 5.362),
            full=Activations(0.004, 2.535),
        ),
    ),
    "Stable Diffusion 3": (
        Model(
            "Stable Diffusion 3 medium",
            2_028_328_000,
            fixed=0.234,
            none=Activations(0.377, 4.632),
            selective=Activations(0.345, 4.388),
            full=Activations(0.028, 0.602),
        ),
        Model(
            "Stable Diffusion 3.5 medium",
            2_243_171_520,
            fixed=0.871,
            none=Activations(0.515, 8.49),
            selective=Activations(0.338, 5.849),
            full=Activations(0.021, 0.734),
        ),
        Model(
            "Stable Diffusion 3.5 large",
            8_056_627_520,
            fixed=0.383,
            none=Activations(1.276, 15.77),
            selective=Activations(0.838, 10.974),
            full=Activations(0.052, 1.324),
        ),
    ),
    "Flux": (
        Model(
            "FLUX.1-dev",
            11_901_408_320,
            fixed=0.061,
            none=Activations(3.111, 24.754),
            selective=Activations(2.353, 19.107),
            full=Activations(0.262, 2.4),
        ),
    ),
    "Flux.2": (
        Model(
            "FLUX.2-dev",
            32_223_281_152,
            fixed=0.15,
            none=Activations(7.589, 60.151),
            selective=Activations(6.974, 55.239),
            full=Activations(0.551, 4.889),
        ),
    ),
    "Flux.2 klein": (
        Model(
            "FLUX.2-klein-4B",
            3_875_544_576,
            fixed=0.049,
            none=Activations(1.762, 13.855),
            selective=Activations(1.61, 12.64),
            full=Activations(0.21, 1.724),
        ),
        Model(
            "FLUX.2-klein-9B",
            9_078_581_248,
            fixed=0.077,
            none=Activations(3.0, 23.572),
            selective=Activations(2.686, 21.07),
            full=Activations(0.308, 2.513),
        ),
    ),
    "Sana": (
        Model(
            "Sana 1.6B",
            1_604_462_752,
            fixed=0.024,
            none=Activations(0.112, 3.376),
            selective=Activations(0.094, 1.418),
            full=Activations(-0.034, 0.304),
        ),
    ),
    "Qwen-Image": (
        Model(
            "Qwen-Image",
            20_430_401_088,
            fixed=0.059,
            none=Activations(3.198, 31.347),
            selective=Activations(1.953, 21.708),
            full=Activations(0.223, 2.279),
        ),
    ),
    "Z-Image": (
        Model(
            "Z-Image",
            6_154_908_736,
            fixed=0.036,
            none=Activations(4.025, 32.12),
            selective=Activations(1.997, 16.133),
            full=Activations(0.252, 2.178),
        ),
    ),
}
"""Published denoisers by the name of their family, the smallest first."""
VAES: dict[str, Vae] = {
    "AutoencoderKL": Vae(encode=2.5, decode=3.001),
    "AutoencoderKLFlux2": Vae(encode=2.5, decode=3.002),
    "AutoencoderDC": Vae(encode=2.504, decode=2.258),
    "AutoencoderKLQwenImage": Vae(encode=3.778, decode=6.758),
}
"""VAEs by the name of their class."""
