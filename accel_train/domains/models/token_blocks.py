"""A transformer block modulated by a condition, stochastic depth, and down- and upsampling of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from accel_train.domains.models.layers import FeedForward, Modulation, RMSNorm, modulated_norm
from accel_train.speed.attention.kernels import TORCH_CHOICE

MODULATIONS = 6


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a `ModulatedBlock`."""

    width: int
    head_width: int
    group: int
    """Channels per attention group: the width, or a divisor of it. Groups share their attention weights."""
    ffn_ratio: int = 4
    qk_norm: bool = True

    def multiplications(self, tokens: int) -> int:
        """Count the multiplications of one block for one sample of `tokens` tokens."""
        qkv_and_out = 4 * tokens * self.width * self.group
        feed_forward = 2 * self.ffn_ratio * tokens * self.width**2
        attention = 2 * tokens**2 * self.width  # scores, and the weighted sum of values
        modulation = MODULATIONS * self.width**2
        return qkv_and_out + feed_forward + attention + modulation


class ModulatedBlock(nn.Module):
    """Self-attention and a feed-forward layer, both modulated by the conditioning (adaLN-zero, as in DiT).

    Attention folds groups of channels into the batch. Only the feed-forward layer mixes groups.
    """

    checkpoint_parts: ClassVar[dict[str, str]] = {"attention": "self_attention", "ffn": "feed_forward"}

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        # Until `apply_attention` puts another kernel here.
        self.attend = TORCH_CHOICE
        self.shape = shape
        self.modulation = Modulation(shape.width, shape.width, MODULATIONS)
        self.qkv = nn.Linear(shape.group, 3 * shape.group, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_width)
            self.k_norm = RMSNorm(shape.head_width)
        self.out = nn.Linear(shape.group, shape.group, bias=False)
        self.ffn = FeedForward(shape.width, shape.ffn_ratio, bias=True)

    def forward(self, x: Tensor, conditioning: Tensor, keep: Tensor | None) -> Tensor:
        """x (B, N, D). conditioning (B, D) after SiLU. keep (B,) factors of `drop_path`, or None."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = self.modulation(conditioning)
        if keep is not None:
            # On the gates: a gate of 0 leaves the sample's tokens as they are.
            factor = keep.to(gate.dtype)[:, None, None]
            gate = gate * factor
            ffn_gate = ffn_gate * factor
        x = self.self_attention(x, shift, scale, gate)
        return self.feed_forward(x, ffn_shift, ffn_scale, ffn_gate)

    def self_attention(
        self,
        x: Tensor,
        shift: Tensor,
        scale: Tensor,
        gate: Tensor,
    ) -> Tensor:
        """Return x plus gated attention within each group of channels."""
        normalised = modulated_norm(x, shift, scale)
        groups = normalised.unflatten(-1, (-1, self.shape.group)).transpose(1, 2)  # (B, G, N, g)
        qkv = self.qkv(groups.flatten(0, 1))
        qkv = qkv.unflatten(-1, (3, -1, self.shape.head_width))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B * G, heads, N, head) each
        attended = self.attend(self.q_norm(q), self.k_norm(k), v, None)
        attended = self.out(attended.transpose(1, 2).flatten(2))  # (B * G, N, g)
        attended = attended.unflatten(0, groups.shape[:2])  # (B, G, N, g)
        return x + gate * attended.transpose(1, 2).flatten(2)

    def feed_forward(
        self,
        x: Tensor,
        shift: Tensor,
        scale: Tensor,
        gate: Tensor,
    ) -> Tensor:
        """Return x plus the gated feed-forward layer."""
        return x + gate * self.ffn(modulated_norm(x, shift, scale))


def drop_path(draws: Tensor, rate: float) -> Tensor:
    """Map uniform draws (B, blocks) to a factor for both branches of each block: 0, or 1 / (1 - the block's rate).

    Rates grow linearly from 0 at the first block to `rate` at the last (Huang et al. 2016, arXiv 1603.09382). Take
    the draws from `rng.uniform`, keyed by sample. A generator would make them depend on the process.
    """
    rates = torch.linspace(0, rate, draws.shape[-1], device=draws.device)
    # Divided by the share that is kept, so that the mean over the draws is the whole branch.
    return (draws >= rates) / (1 - rates)


def halve(x: Tensor) -> Tensor:
    """Average pairs of neighbours: (B, N, D) to (B, ceil(N / 2), D). The last of an odd number is copied."""
    even_length = x.shape[1] // 2 * 2
    pairs = x[:, :even_length].unflatten(1, (-1, 2)).mean(dim=2)  # (B, N // 2, D)
    if even_length < x.shape[1]:
        return torch.cat((pairs, x[:, -1:]), dim=1)
    return pairs


def double(x: Tensor, length: int) -> Tensor:
    """Undo `halve` by linear interpolation: (B, N, D) to (B, length, D), length 2 N or 2 N - 1.

    Equals `F.interpolate`, whose backward has no deterministic form on a GPU.
    """
    first_token = x[:, :1]
    last_token = x[:, -1:]
    before = torch.cat((first_token, x[:, :-1]), dim=1)
    after = torch.cat((x[:, 1:], last_token), dim=1)
    # A token lies a quarter of a step from each of its two halves.
    first = 0.75 * x + 0.25 * before
    second = 0.75 * x + 0.25 * after
    both = torch.stack((first, second), dim=2)  # (B, N, 2, D)
    # The last token of an odd length was copied, not averaged, so its second half is dropped.
    return both.flatten(1, 2)[:, :length]
