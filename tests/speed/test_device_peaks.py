"""Peaks of devices by their exact names."""

import pytest

from accel_train.speed.device_peaks import peak_flops


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
