"""A transformer block modulated by a condition, the depth of a path through such blocks, fewer and more tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from accel_train.domains.models.layers import FeedForward, Modulation, RMSNorm, modulated_norm
from accel_train.speed.attention import TORCH_CHOICE

MODULATIONS = 6


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a `ModulatedBlock`."""

    width: int
    head_width: int
    group: int
    """Channels that attend together: the width, or a divisor of it. Groups share the weights of attention."""
    ffn_ratio: int = 4
    qk_norm: bool = True

    def products(self, tokens: int) -> int:
        """Multiplications of one block for one sample of so many tokens."""
        linear = tokens * self.width * (4 * self.group + 2 * self.ffn_ratio * self.width)
        return linear + 2 * tokens**2 * self.width + MODULATIONS * self.width**2


class ModulatedBlock(nn.Module):
    """Self-attention and a feed-forward layer, both modulated by the conditioning (adaLN-zero, as in DiT).

    Groups of channels are folded into the batch for attention; only the feed-forward layer mixes them.
    """

    checkpoint_parts: ClassVar[dict[str, str]] = {"attention": "attend_to_all", "ffn": "feed_forward"}

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.attend = TORCH_CHOICE
        self.shape = shape
        self.modulation = Modulation(shape.width, shape.width, MODULATIONS)
        self.qkv = nn.Linear(shape.group, 3 * shape.group, bias=False)
        self.q_norm = RMSNorm(shape.head_width) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_width) if shape.qk_norm else nn.Identity()
        self.out = nn.Linear(shape.group, shape.group, bias=False)
        self.ffn = FeedForward(shape.width, shape.ffn_ratio, bias=True)

    def forward(self, x: Tensor, conditioning: Tensor, keep: Tensor | None) -> Tensor:
        """x (B, N, D); conditioning (B, D) after SiLU; keep (B,) factors of `drop_path`, or None."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = self.modulation(conditioning)
        if keep is not None:
            factor = keep.to(gate.dtype)[:, None, None]
            gate, ffn_gate = gate * factor, ffn_gate * factor
        x = self.attend_to_all(x, shift, scale, gate)
        return self.feed_forward(x, ffn_shift, ffn_scale, ffn_gate)

    def attend_to_all(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """The first half of the block."""
        rows = modulated_norm(x, shift, scale).unflatten(-1, (-1, self.shape.group)).transpose(1, 2)  # (B, G, N, g)
        qkv = self.qkv(rows.flatten(0, 1)).unflatten(-1, (3, -1, self.shape.head_width))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B * G, heads, N, head) each
        attended = self.attend(self.q_norm(q), self.k_norm(k), v, None)
        attended = self.out(attended.transpose(1, 2).flatten(2)).unflatten(0, rows.shape[:2])  # (B, G, N, g)
        return x + gate * attended.transpose(1, 2).flatten(2)

    def feed_forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """The second half of the block."""
        return x + gate * self.ffn(modulated_norm(x, shift, scale))


def drop_path(draws: Tensor, rate: float) -> Tensor:
    """Uniform draws (B, blocks) -> a factor for both branches of each block: 0, or 1 / (1 - the block's rate).

    Rates grow linearly from 0 at the first block to `rate` at the last (Huang et al. 2016, arXiv 1603.09382). The
    draws come from `rng.uniform`, keyed by sample: a generator would belong to the process.
    """
    rates = torch.linspace(0, rate, draws.shape[-1], device=draws.device)
    return (draws >= rates) / (1 - rates)


def halve(x: Tensor) -> Tensor:
    """(B, N, D) -> (B, ceil(N / 2), D): means of neighbours; the last of an odd number stays."""
    pairs = x[:, : x.shape[1] // 2 * 2].unflatten(1, (-1, 2)).mean(dim=2)
    return torch.cat((pairs, x[:, -1:]), dim=1) if x.shape[1] % 2 else pairs


def double(x: Tensor, length: int) -> Tensor:
    """(B, N, D) -> (B, length, D), length 2 N or 2 N - 1: linear interpolation, where the pairs of `halve` were.

    `F.interpolate`, whose backward has no deterministic form on a GPU.
    """
    before = torch.cat((x[:, :1], x[:, :-1]), dim=1)
    after = torch.cat((x[:, 1:], x[:, -1:]), dim=1)
    both = torch.stack((0.75 * x + 0.25 * before, 0.75 * x + 0.25 * after), dim=2)
    return both.flatten(1, 2)[:, :length]
