"""Peak memory of VAEs that encode or decode pictures in fp32, simulated at the published sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_train.domains.images.pipelines.encoding import encode_pictures
from accel_train.simulation.ledger import PARAMETERS, Ledger
from accel_train.simulation.tensors.fake_tensors import FakeWhereNeeded, build_fake


def _kl() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(**_levels(), latent_channels=16)


def _kl_flux2() -> Any:
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2()


def _dc() -> Any:
    from diffusers import AutoencoderDC

    parts: dict[str, Any] = {}
    for part in ("encoder", "decoder"):
        parts[f"{part}_block_types"] = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
        parts[f"{part}_block_out_channels"] = (128, 256, 512, 512, 1024, 1024)
        parts[f"{part}_qkv_multiscales"] = ((), (), (), (5,), (5,), (5,))
    return AutoencoderDC(
        latent_channels=32,
        **parts,
        encoder_layers_per_block=(2, 2, 2, 3, 3, 3),
        decoder_layers_per_block=(3, 3, 3, 3, 3, 3),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )


def _qwen() -> Any:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage()


def _levels() -> dict[str, Any]:
    return {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
    }


VAES: dict[str, Callable[[], Any]] = {
    "AutoencoderKL": _kl,
    "AutoencoderKLFlux2": _kl_flux2,
    "AutoencoderDC": _dc,
    "AutoencoderKLQwenImage": _qwen,
}
"""VAEs by class. AutoencoderKL stands for Stable Diffusion 1.x to 3, Flux and Z-Image, which differ in channels."""


def peak_bytes(name: str, side: int, batch: int, work: str) -> int:
    """Return the peak bytes, without weights, of ``work``: encode or decode ``batch`` pictures of side ``side``."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    vae: Any = build_fake(fake, VAES[name]).eval().requires_grad_(False)
    ledger = Ledger(lambda: ("forward", name), lambda *_: None)
    where = FakeWhereNeeded(fake)
    where.computing = 1
    with fake:
        pixels = torch.zeros(batch, 3, side, side)
    with torch.no_grad(), where:
        latents = encode_pictures(vae, pixels).mean
        weights = ledger.mark((*vae.parameters(), *vae.buffers()), PARAMETERS)
        with ledger.recording():
            if work == "encode":
                encode_pictures(vae, pixels)
            else:
                _decode(vae, latents)
    return ledger.peak().total - weights


def _decode(vae: Any, latents: Tensor) -> None:
    is_video = type(vae).__name__ == "AutoencoderKLQwenImage"
    vae.decode(latents.unsqueeze(2) if is_video else latents, return_dict=False)
