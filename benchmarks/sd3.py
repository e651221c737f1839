"""SD3's model from this project's blocks, and that of diffusers, which the GPU suite trains.

Input and output layers are those of SD3 (patches of 2 x 2, 2-D positions, time and pooled text as conditioning), so
both models have the same parameters and, with the weights copied, the same output.
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
    """Sizes of a model and of its batch. Defaults: SD3-medium at 512 x 512 pixels."""

    width: int = 1536
    depth: int = 24
    head_width: int = 64
    side: int = 64
    """Height and width of the latents: 64 gives 1024 tokens."""
    text_tokens: int = 154
    batch: int = 32
    text_width: int = 4096
    pooled_width: int = 2048
    channels: int = 16

    @property
    def image_tokens(self) -> int:
        """Number of image tokens, the patches of the latents."""
        return (self.side // PATCH) ** 2

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.width // self.head_width

    def train_flops(self) -> int:
        """Return the model FLOPs of forward and backward of one sample, without recomputation.

        Three times the forward, less the gradients of inputs that need none. The last block has only keys and values
        of the text; diffusers also computes its queries and drops them (0.07 % more).
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
    """SD3-medium's architecture from `MMDiTBlock`, in this shape."""

    def __init__(self, shape: Shape) -> None:
        widths = {"text_width": shape.text_width, "pooled_width": shape.pooled_width}
        config = sd3.SD3Config(shape.width, shape.depth, shape.head_width, shape.channels, PATCH, **widths)
        super().__init__(config)


def diffusers_model(shape: Shape) -> Any:
    """Return diffusers' model with this shape."""
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
    """Copy all weights of diffusers' model into ours."""
    ours.load_diffusers(theirs.state_dict())


Batch = dict[str, Tensor]


def batch_of(shape: Shape, device: torch.device, seed: int = 0) -> Batch:
    """Return a batch of random latents, noise, text and times. Zeros would run faster."""
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
    """Return the rectified-flow loss: the mean squared error of the velocity of each sample, summed over the batch."""
    time = batch["time"][:, None, None, None]
    noisy = (1 - time) * batch["latents"] + time * batch["noise"]
    found = model(noisy, batch["text"], batch["pooled"], 1000 * batch["time"])
    found = found if isinstance(found, Tensor) else found[0]
    target = batch["noise"] - batch["latents"]
    return (found.float() - target).square().flatten(1).mean(1).sum()


def theirs_call(model: Any) -> Callable[..., Any]:
    """Return a call of diffusers' model with our order of arguments. It returns a tuple."""
    return lambda latents, text, pooled, time: model(latents, text, pooled, time, return_dict=False)
