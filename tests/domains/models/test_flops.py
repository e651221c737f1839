"""Closed-form FLOPs against torch's counter on the real forward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accel_train.domains.models.flops import flops_per_sample, work
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


def test_the_work_of_a_step_counts_padding_as_work_and_not_as_tokens() -> None:
    config = SHAPES[1][0]
    batches = [
        {
            "tokens": torch.zeros(2, length, dtype=torch.int64),
            "text_mask": torch.arange(length) < torch.tensor([[length], [3]]),
            "latent": torch.zeros(2, 4, 5),
            "weight": torch.tensor([1.0, weight]),
        }
        for length, weight in ((16, 1.0), (8, 0.0))
    ]
    found = work(config, batches)
    assert (int(found["tokens"]), found["padded_tokens"]) == (16 + 3 + 8, 2 * (16 + 8))
    # Three forwards, of rows without weight too.
    assert found["flops"] == 3 * 2 * (flops_per_sample(config, 16, 4) + flops_per_sample(config, 8, 4))
