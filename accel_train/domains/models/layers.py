"""Layers shared by the models: norms, time embedding, adaLN-zero modulation, feed-forward.

Two ways to bf16 meet here: autocast over fp32 weights, and a module whose weights are bf16 themselves
(DeepSpeed) while times and latents arrive in fp32. Under both, norm statistics and all that is made from a
time are computed in fp32; the rest follows the dtype of the weights.

There is no dropout in any layer. It would draw from a generator that belongs to the process, and the result
would depend on how many processes share the batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6
TIME_FEATURES = 256
TIME_SCALE = 1000.0
MAX_PERIOD = 1e4


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension; statistics in fp32, result in x's dtype."""

    def __init__(self, width: int, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # torch's kernels and its composite form accumulate in fp32 for bf16; CUDA autocast returns fp32.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class Float32Linear(nn.Linear):
    """A linear layer with bias, computed in fp32 whatever autocast says or the weights were cast to.

    For what runs once per sample and feeds every layer: the cost is nothing, a bf16 time embedding is coarse.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), self.bias.float())


def sinusoid(time: Tensor, features: int = TIME_FEATURES) -> Tensor:
    """(B,) times in [0, 1] -> (B, features) in fp32: cosines, then sines, of geometric frequencies.

    The time is scaled by 1000 first. The frequencies run from 1 down to 1e-4 radians per unit and are made
    for step numbers in the hundreds: with t itself in [0, 1] nearly all features are constant to within a few
    per cent and nearby times cannot be told apart.
    """
    half = features // 2
    exponent = torch.arange(half, dtype=torch.float32, device=time.device) / half
    frequencies = torch.exp(exponent * -math.log(MAX_PERIOD))
    angles = time.float()[:, None] * TIME_SCALE * frequencies  # (B, half)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimestepEmbedder(nn.Module):
    """(B,) times in [0, 1] -> (B, width) in fp32: sinusoid, linear, SiLU, linear (DiT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = Float32Linear(TIME_FEATURES, width)
        self.project = Float32Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        return self.project(F.silu(self.expand(sinusoid(time))))


class Modulation(nn.Module):
    """adaLN-zero: `parts` tensors (B, 1, width) from a conditioning vector (B, conditioning_width).

    Computed once per sample, never per token. The layer starts at zero, so that scales start at 1 (used as
    1 + scale), shifts and gates at 0: every block starts as the identity, and depth costs nothing at first.
    """

    once_per_sample = True
    """Too little work for float8 to pay."""

    def __init__(self, conditioning_width: int, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(conditioning_width, parts * width)

    def forward(self, conditioning: Tensor) -> tuple[Tensor, ...]:
        return self.linear(conditioning).unsqueeze(1).chunk(self.parts, dim=-1)


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without parameters, then * (1 + scale) + shift. x (B, N, D); shift and scale (B, 1, D).

    torch's layer_norm accumulates in fp32 for bf16 inputs on every device.
    """
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift


class FeedForward(nn.Module):
    """Linear, GELU, linear. The exact GELU is 3 to 5 times faster than the tanh form on CPU, no slower on GPU."""

    def __init__(self, width: int, ratio: int, bias: bool, tanh_gelu: bool = False) -> None:
        super().__init__()
        self.approximate = "tanh" if tanh_gelu else "none"
        self.expand = nn.Linear(width, ratio * width, bias=bias)
        self.project = nn.Linear(ratio * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # once: a linear layer of more than two dimensions does it each time, and back
        hidden = F.gelu(self.expand(flat), approximate=self.approximate)
        return self.project(hidden).unflatten(0, x.shape[:-1])
