"""Closed-form FLOPs against torch's counter on the real forward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accel_train.models.flops import flops_per_sample, mfu, peak_flops
from accel_train.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig

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


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 156.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA B200", "bf16", 2250.0),
    ],
)
def test_peaks(name: str, precision: str, teraflops: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("Tesla T4", "bf16"),
        ("Intel Xeon", "fp32"),
    ],
)
def test_unknown_peaks_are_absent(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None
    assert mfu(1e12, peak_flops(name, precision)) is None


def test_mfu_is_a_fraction_of_the_peak() -> None:
    assert mfu(494.7e12, peak_flops("NVIDIA H200", "bf16")) == pytest.approx(0.5)
