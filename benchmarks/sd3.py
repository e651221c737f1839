"""SD3's model made of this project's blocks, and the same of diffusers: what the GPU suite trains.

Front and back end are those of SD3 (patches of 2 x 2, 2-D positions, time and pooled text as conditioning), so that the
two have the same parameters and, with weights copied, the same output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_train.domains.models import sd3

PATCH, TIME_FEATURES, POSITIONS = 2, 256, 192


@dataclass(frozen=True)
class Shape:
    """A model and the tokens that it is trained on. Defaults: SD3-medium at 512 x 512 pixels."""

    width: int = 1536
    depth: int = 24
    head_width: int = 64
    side: int = 64
    """Of the latents, in values: 64 gives 1024 tokens."""
    text_tokens: int = 154
    batch: int = 32
    text_width: int = 4096
    pooled_width: int = 2048
    channels: int = 16

    @property
    def image_tokens(self) -> int:
        """Patches of the latents."""
        return (self.side // PATCH) ** 2

    @property
    def heads(self) -> int:
        """Of attention."""
        return self.width // self.head_width

    def train_flops(self) -> int:
        """Model FLOPs of one sample's forward and backward, recomputation not counted.

        Three forwards, less the gradients of inputs that need none. Of the last block's text there are keys and values
        only; diffusers makes its queries as well and drops them (0.07 % more).
        """
        h, image, text = self.width, self.image_tokens, self.text_tokens
        length, patch = image + text, PATCH**2 * self.channels
        linears = self.depth * length * 24 * h**2 - text * 20 * h**2
        attention = self.depth * 4 * length**2 * h - 4 * text * length * h
        modulation = self.depth * 24 * h**2 - 8 * h**2 + 4 * h**2
        front = 2 * image * patch * h + 2 * text * self.text_width * h
        front += 2 * TIME_FEATURES * h + 2 * self.pooled_width * h
        back = 2 * image * patch * h + 4 * h**2
        return 3 * (linears + attention + modulation + front + back) - front


class SD3(sd3.SD3):
    """SD3-medium's architecture around `MMDiTBlock`, in this shape."""

    def __init__(self, shape: Shape) -> None:
        widths = {"text_width": shape.text_width, "pooled_width": shape.pooled_width}
        config = sd3.SD3Config(shape.width, shape.depth, shape.head_width, shape.channels, PATCH, **widths)
        super().__init__(config)


def diffusers_model(shape: Shape) -> Any:
    """diffusers' own class with this shape."""
    from diffusers import SD3Transformer2DModel

    model: Any = SD3Transformer2DModel(
        sample_size=128,
        in_channels=shape.channels,
        out_channels=shape.channels,
        num_layers=shape.depth,
        attention_head_dim=shape.head_width,
        num_attention_heads=shape.heads,
        joint_attention_dim=shape.text_width,
        caption_projection_dim=shape.width,
        pooled_projection_dim=shape.pooled_width,
        pos_embed_max_size=POSITIONS,
    )
    return model


def copy_model(ours: SD3, theirs: Any) -> None:
    """Every weight of diffusers' model into ours."""
    ours.load_diffusers(theirs.state_dict())


Batch = dict[str, Tensor]


def batch_of(shape: Shape, device: torch.device, seed: int = 0) -> Batch:
    """Random latents, text, noise and times: random, because zeros run faster."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    latents = (shape.batch, shape.channels, shape.side, shape.side)
    return {
        "latents": draw(*latents),
        "noise": draw(*latents),
        "text": draw(shape.batch, shape.text_tokens, shape.text_width),
        "pooled": draw(shape.batch, shape.pooled_width),
        "time": torch.rand(shape.batch, generator=generator).to(device),
        "sample": torch.arange(shape.batch, device=device),
    }


def loss_sum(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Rectified flow: the sum of the squared error of the velocity over the batch, of means over each sample."""
    time = batch["time"][:, None, None, None]
    noisy = (1 - time) * batch["latents"] + time * batch["noise"]
    found = model(noisy, batch["text"], batch["pooled"], 1000 * batch["time"])
    found = found if isinstance(found, Tensor) else found[0]
    target = batch["noise"] - batch["latents"]
    return (found.float() - target).square().flatten(1).mean(1).sum()


def theirs_call(model: Any) -> Callable[..., Any]:
    """diffusers' order of arguments."""
    return lambda latents, text, pooled, time: model(latents, text, pooled, time, return_dict=False)
