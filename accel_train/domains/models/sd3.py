"""Stable Diffusion 3's transformer (Esser et al., 2024) made of `MMDiTBlock`, with the weights of diffusers' model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.models.layers import MAX_PERIOD, NORM_EPS, TIME_FEATURES
from accel_train.domains.models.mmdit import MMDiTBlock, MMDiTConfig
from accel_train.domains.models.positions import centred_places, sincos_2d
from accel_train.wording import shortened


@dataclass(frozen=True)
class SD3Config:
    """Shape of the transformer. The defaults are those of SD3 medium."""

    width: int = 1536
    depth: int = 24
    head_width: int = 64
    channels: int = 16
    """Channels of the autoencoder's latents."""
    patch: int = 2
    text_width: int = 4096
    """Channels of the text encoders' tokens."""
    pooled_width: int = 2048
    """Channels of the pooled texts."""
    max_side: int = 192
    """Rows and columns of patches that have positions. A smaller picture takes those of the centre."""
    base_side: int = 64
    """Units that the coordinates of max_side positions span."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, as SD3.5 has."""

    @property
    def block(self) -> MMDiTConfig:
        """Shape of one block."""
        heads = self.width // self.head_width
        return MMDiTConfig(self.width, 1, heads, qk_norm=self.qk_norm, bias=True, tanh_gelu=True)


class Conditioning(nn.Module):
    """Map time and pooled text (B, P) to the conditioning vector (B, D)."""

    def __init__(self, width: int, pooled_width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))
        self.text = nn.Sequential(nn.Linear(pooled_width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor, pooled: Tensor) -> Tensor:
        half = TIME_FEATURES // 2
        frequencies = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, device=time.device) / half)
        angles = time[:, None].float() * frequencies  # (B, TIME_FEATURES / 2)
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.time(features.to(pooled.dtype)) + self.text(pooled)


class SD3(nn.Module):
    """SD3's transformer: the velocity of latents from their patches, text tokens and pooled text."""

    _no_split_modules: ClassVar[list[str]] = ["MMDiTBlock"]

    def __init__(self, config: SD3Config) -> None:
        super().__init__()
        width = config.width
        last = config.depth - 1
        self.config = config
        self.patches = nn.Conv2d(config.channels, width, config.patch, config.patch)
        whole = (config.max_side, config.max_side)
        # Not in the weights, because they follow from the shape.
        self.register_buffer("positions", sincos_2d(width, whole, config.base_side), persistent=False)
        self.context = nn.Linear(config.text_width, width)
        self.conditioning = Conditioning(width, config.pooled_width)
        self.blocks = nn.ModuleList(MMDiTBlock(config.block) for _ in range(last))
        # The text has no output in the last block.
        self.blocks.append(MMDiTBlock(config.block, context_only=(1,)))
        self.modulation = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.out = nn.Linear(width, config.patch**2 * config.channels)

    def forward(self, latents: Tensor, text: Tensor, pooled: Tensor, time: Tensor) -> Tensor:
        """latents (B, C, H, W), text (B, n, T), pooled (B, P), time (B,) in 0 to 1000 -> (B, C, H, W)."""
        patch = self.config.patch
        image = self.patches(latents)  # (B, D, h, w)
        height, width = image.shape[-2:]
        image = image.flatten(2).transpose(1, 2).contiguous()  # (B, h w, D)
        # Positions may have a wider dtype than the weights, and then the sum has it as well.
        image = (image + self._positions(height, width)).to(image.dtype)
        conditioning = nn.functional.silu(self.conditioning(time, pooled)).to(image.dtype)
        tokens = [image, self.context(text)]  # (B, h w, D) and (B, n, D)
        for block in self.blocks:
            tokens = block(tokens, conditioning, None)
        scale, shift = self.modulation(conditioning).chunk(2, dim=1)
        image = self.out(self.norm(tokens[0]) * (1 + scale)[:, None] + shift[:, None])
        image = image.unflatten(-1, (patch, patch, -1)).unflatten(1, (height, width))  # (B, h, w, p, p, C)
        return torch.einsum("nhwpqc->nchpwq", image).flatten(4, 5).flatten(2, 3)

    def _positions(self, height: int, width: int) -> Tensor:
        side = self.config.max_side
        if max(height, width) > side:
            raise UsageError(
                f"latents of {height} x {width} patches: positions cover only {side} x {side}. Make the "
                "pictures smaller."
            )
        fixed = cast(Tensor, self.positions)
        return fixed[centred_places((height, width), (side, side), fixed.device)]

    def load_diffusers(self, weights: Mapping[str, Tensor]) -> None:
        """Load the state dict of diffusers' `SD3Transformer2DModel`. Raises ``UsageError`` for another model's."""
        try:
            self.load_state_dict(from_diffusers(weights, self.config.depth))
        except (KeyError, RuntimeError) as error:
            raise UsageError(
                f"weights of SD3: they do not fit this shape ({' '.join(str(error).split())[:300]}). Those of an "
                "SD3Transformer2DModel with the same depth and widths are required."
            ) from None


OUTER = {
    "patches": "pos_embed.proj",
    "context": "context_embedder",
    "conditioning.time.0": "time_text_embed.timestep_embedder.linear_1",
    "conditioning.time.2": "time_text_embed.timestep_embedder.linear_2",
    "conditioning.text.0": "time_text_embed.text_embedder.linear_1",
    "conditioning.text.2": "time_text_embed.text_embedder.linear_2",
    "modulation": "norm_out.linear",
    "out": "proj_out",
}
"""Layers outside the blocks: our name -> diffusers' name."""
IMAGE = {
    "modulation.linear": "norm1.linear",
    "out": "attn.to_out.0",
    "ffn.expand": "ff.net.0.proj",
    "ffn.project": "ff.net.2",
}
TEXT = {
    "modulation.linear": "norm1_context.linear",
    "out": "attn.to_add_out",
    "ffn.expand": "ff_context.net.0.proj",
    "ffn.project": "ff_context.net.2",
}
QKV = {
    "image": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "text": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
NORMS = {"image": ("attn.norm_q", "attn.norm_k"), "text": ("attn.norm_added_q", "attn.norm_added_k")}
KINDS = ("weight", "bias")


def from_diffusers(weights: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Map the state dict of diffusers' `SD3Transformer2DModel` to that of `SD3`.

    Raises ``KeyError`` for a missing tensor, ``UsageError`` for one that has no place in the model.
    """
    remaining = dict(weights)
    # Fixed sinusoids, which `SD3` computes.
    remaining.pop("pos_embed.pos_embed", None)
    mapped: dict[str, Tensor] = {}
    for ours, theirs in OUTER.items():
        for kind in KINDS:
            mapped[f"{ours}.{kind}"] = remaining.pop(f"{theirs}.{kind}")
    for number in range(depth):
        prefix = f"transformer_blocks.{number}."
        block = {name.removeprefix(prefix): remaining.pop(name) for name in list(remaining) if name.startswith(prefix)}
        streams = _block(block, last=number == depth - 1)
        mapped |= {f"blocks.{number}.streams.{name}": tensor for name, tensor in streams.items()}
        remaining |= {prefix + name: tensor for name, tensor in block.items()}
    if remaining:
        raise UsageError(
            f"weights of SD3: {shortened(sorted(remaining), 3)} have no place in a model of depth {depth}. Those of an "
            "SD3Transformer2DModel of this depth, without dual attention, are required."
        )
    return mapped


def _block(block: dict[str, Tensor], last: bool) -> dict[str, Tensor]:
    """Take the tensors of one block out of `block`, under the names of its two streams."""
    mapped = _stream(block, "0.", IMAGE, "image")
    if not last:
        return mapped | _stream(block, "1.", TEXT, "text")
    # In the last block the text contributes only keys and values. diffusers computes queries and drops them.
    query, key, value = QKV["text"]
    for kind in KINDS:
        modulation = block.pop(f"norm1_context.linear.{kind}")
        # diffusers has scale before shift here.
        mapped[f"1.modulation.linear.{kind}"] = modulation.roll(len(modulation) // 2, 0)
        mapped[f"1.qkv.{kind}"] = torch.cat([block.pop(f"{key}.{kind}"), block.pop(f"{value}.{kind}")])
        # Not in every file, and read by nothing.
        block.pop(f"{query}.{kind}", None)
    _, key_norm = NORMS["text"]
    block.pop("attn.norm_added_q.weight", None)
    if f"{key_norm}.weight" in block:
        mapped["1.k_norm.weight"] = block.pop(f"{key_norm}.weight")
    return mapped


def _stream(block: dict[str, Tensor], prefix: str, layers: Mapping[str, str], stream: str) -> dict[str, Tensor]:
    mapped: dict[str, Tensor] = {}
    for kind in KINDS:
        for ours, theirs in layers.items():
            mapped[f"{prefix}{ours}.{kind}"] = block.pop(f"{theirs}.{kind}")
        parts = [block.pop(f"{name}.{kind}") for name in QKV[stream]]
        # One product for the three of them.
        mapped[f"{prefix}qkv.{kind}"] = torch.cat(parts)
    for ours, theirs in zip(("q_norm", "k_norm"), NORMS[stream], strict=True):
        if f"{theirs}.weight" in block:
            mapped[f"{prefix}{ours}.weight"] = block.pop(f"{theirs}.weight")
    return mapped
