"""Closed-form FLOPs against torch's counter on the real forward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accel_train.domains.models.flops import flops_per_sample
from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig

SHAPES = [
    (MultimodalMMDiTConfig(MMDiTConfig(width=32, depth=1, heads=2), 50, 6, 8), 8, 1),
    (MultimodalMMDiTConfig(MMDiTConfig(width=48, depth=3, heads=4, ffn_ratio=2), 64, 5, 16, 4), 16, 4),
    (
        MultimodalMMDiTConfig(MMDiTConfig(width=48, depth=3, heads=4, bias=False, qk_norm=False), 33, 7, 20, 4),
        11,
        3,
    ),
    (
        MultimodalMMDiTConfig(MMDiTConfig(width=64, depth=2, heads=2, conditioning_width=24), 40, 8, 10, 2),
        10,
        2,
    ),
]


@pytest.mark.parametrize(("config", "text_length", "latent_length"), SHAPES)
def test_flops_equal_the_counter(config: MultimodalMMDiTConfig, text_length: int, latent_length: int) -> None:
    model, batch = MultimodalMMDiT(config), 3
    tokens = torch.zeros(batch, text_length, dtype=torch.int64)
    latents, time = torch.zeros(batch, latent_length, config.latent_dim), torch.zeros(batch)
    # The counter does not know the CPU's flash kernel; the math backend is made of products that it counts.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(tokens, latents, time, time, None)
    assert counter.get_total_flops() == batch * flops_per_sample(config, text_length, latent_length)
