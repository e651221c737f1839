"""SD3's model made of this project's blocks, and the same of diffusers: what the GPU suite trains.

Front and back end are those of SD3 (patches of 2 x 2, 2-D positions, time and pooled text as conditioning), so that the
two have the same parameters and, with weights copied, the same output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel_train.domains.models.mmdit import MMDiTBlock, MMDiTConfig
from benchmarks.mmdit_block import copy_weights

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


class Conditioning(nn.Module):
    """Time and pooled text (B, P) -> (B, D)."""

    def __init__(self, width: int, pooled_width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))
        self.text = nn.Sequential(nn.Linear(pooled_width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor, pooled: Tensor) -> Tensor:
        half = TIME_FEATURES // 2
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=time.device) / half)
        angles = time[:, None].float() * frequencies
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.time(features.to(pooled.dtype)) + self.text(pooled)


class SD3(nn.Module):
    """SD3-medium's architecture around `MMDiTBlock`."""

    _no_split_modules: ClassVar[list[str]] = ["MMDiTBlock"]

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = MMDiTConfig(shape.width, 1, shape.heads, qk_norm=False, bias=True, tanh_gelu=True)
        last = shape.depth - 1
        self.patches = nn.Conv2d(shape.channels, shape.width, PATCH, PATCH)
        self.register_buffer("positions", positions(shape.width, shape.side // PATCH), persistent=False)
        self.context = nn.Linear(shape.text_width, shape.width)
        self.conditioning = Conditioning(shape.width, shape.pooled_width)
        self.blocks = nn.ModuleList(MMDiTBlock(config, context_only=(1,) * (i == last)) for i in range(shape.depth))
        self.modulation = nn.Linear(shape.width, 2 * shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=1e-6, elementwise_affine=False)
        self.out = nn.Linear(shape.width, PATCH**2 * shape.channels)
        self.channels = shape.channels

    def forward(self, latents: Tensor, text: Tensor, pooled: Tensor, time: Tensor) -> Tensor:
        """latents (B, C, H, W), text (B, n, T), pooled (B, P), time (B,) in 0 to 1000 -> (B, C, H, W)."""
        image = self.patches(latents).flatten(2).transpose(1, 2).contiguous()
        image = (image + self.positions).to(image.dtype)
        conditioning = nn.functional.silu(self.conditioning(time, pooled))
        tokens = [image, self.context(text)]
        for block in self.blocks:
            tokens = block(tokens, conditioning.to(tokens[0].dtype), None)
        scale, shift = self.modulation(conditioning.to(tokens[0].dtype)).chunk(2, dim=1)
        image = self.out(self.norm(tokens[0]) * (1 + scale)[:, None] + shift[:, None])
        side = latents.shape[-1] // PATCH
        image = image.unflatten(-1, (PATCH, PATCH, self.channels)).unflatten(1, (side, side))
        return torch.einsum("nhwpqc->nchpwq", image).flatten(4, 5).flatten(2, 3)


def positions(width: int, side: int) -> Tensor:
    """SD3's: sinusoids of row and column, cropped from the middle of a square of 192. (1, side * side, width)."""
    top = (POSITIONS - side) // 2
    grid = torch.arange(top, top + side, dtype=torch.float64) / (POSITIONS / 64)
    frequencies = 1.0 / 10000 ** (torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    angles = torch.outer(grid, frequencies)  # (side, width / 4)
    one = torch.cat([angles.sin(), angles.cos()], dim=-1)
    column, line = one[None].expand(side, -1, -1), one[:, None].expand(-1, side, -1)
    return torch.cat([column, line], dim=-1).reshape(1, side * side, width).float()


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


@torch.no_grad()
def copy_model(ours: SD3, theirs: Any) -> None:
    """Every weight of diffusers' model into ours."""
    pairs = {
        ours.patches: theirs.pos_embed.proj,
        ours.context: theirs.context_embedder,
        ours.conditioning.time[0]: theirs.time_text_embed.timestep_embedder.linear_1,
        ours.conditioning.time[2]: theirs.time_text_embed.timestep_embedder.linear_2,
        ours.conditioning.text[0]: theirs.time_text_embed.text_embedder.linear_1,
        ours.conditioning.text[2]: theirs.time_text_embed.text_embedder.linear_2,
        ours.modulation: theirs.norm_out.linear,
        ours.out: theirs.proj_out,
    }
    for mine, other in pairs.items():
        mine.load_state_dict(other.state_dict())
    copy_weights(ours, type("Blocks", (), {"blocks": theirs.transformer_blocks}))


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
