"""Memory bandwidth and links of the GPUs known to a plan. Their matrix peaks are in ``speed.device_peaks``."""

from __future__ import annotations

from typing import NamedTuple

from accel_train.config import UsageError
from accel_train.speed.device_peaks import peak_flops
from accel_train.wording import did_you_mean, nearest


class Device(NamedTuple):
    """One model of GPU, by the vendor's data sheet."""

    torch_name: str
    """``torch.cuda.get_device_name``, the key of the table of matrix peaks."""
    memory_gbs: float
    """Bandwidth of its memory in GB/s."""
    link: str
    link_gbs: float
    """GB/s from one GPU to the others of its machine: one direction, half of the bidirectional sum on data sheets."""
    source: str


# GB/s of 16 lanes in one direction.
_PCIE_3 = ("PCIe 3 x16", 16.0)
_PCIE_4 = ("PCIe 4 x16", 32.0)
_PCIE_5 = ("PCIe 5 x16", 64.0)

DEVICES = {
    "v100-sxm": Device("Tesla V100-SXM2-32GB", 900, "NVLink 2", 150, "NVIDIA V100 data sheet"),
    "t4": Device("Tesla T4", 320, *_PCIE_3, "NVIDIA T4 data sheet"),
    "a100-40gb-sxm": Device("NVIDIA A100-SXM4-40GB", 1555, "NVLink 3", 300, "NVIDIA A100 data sheet"),
    "a100-80gb-sxm": Device("NVIDIA A100-SXM4-80GB", 2039, "NVLink 3", 300, "NVIDIA A100 data sheet"),
    "a100-80gb-pcie": Device("NVIDIA A100 80GB PCIe", 1935, *_PCIE_4, "NVIDIA A100 data sheet"),
    "a10": Device("NVIDIA A10", 600, *_PCIE_4, "NVIDIA A10 data sheet"),
    "a30": Device("NVIDIA A30", 933, *_PCIE_4, "NVIDIA A30 data sheet, without NVLink bridges"),
    "a40": Device("NVIDIA A40", 696, *_PCIE_4, "NVIDIA A40 data sheet, without NVLink bridges"),
    "l4": Device("NVIDIA L4", 300, *_PCIE_4, "NVIDIA L4 data sheet"),
    "l40s": Device("NVIDIA L40S", 864, *_PCIE_4, "NVIDIA L40S data sheet"),
    "h100-sxm": Device("NVIDIA H100 80GB HBM3", 3350, "NVLink 4", 450, "NVIDIA H100 data sheet"),
    "h100-pcie": Device("NVIDIA H100 PCIe", 2000, *_PCIE_5, "NVIDIA H100 data sheet, without NVLink bridges"),
    "h100-nvl": Device("NVIDIA H100 NVL", 3900, *_PCIE_5, "NVIDIA H100 data sheet, without NVLink bridges"),
    "h200": Device("NVIDIA H200", 4800, "NVLink 4", 450, "NVIDIA H200 data sheet"),
    "b200": Device("NVIDIA B200", 8000, "NVLink 5", 900, "NVIDIA Blackwell architecture brief: HGX B200"),
    "rtx-3090": Device("NVIDIA GeForce RTX 3090", 936, *_PCIE_4, "NVIDIA GA102 paper, without NVLink bridges"),
    "rtx-4090": Device("NVIDIA GeForce RTX 4090", 1008, *_PCIE_4, "NVIDIA Ada architecture paper"),
    "rtx-5090": Device("NVIDIA GeForce RTX 5090", 1792, *_PCIE_5, "NVIDIA RTX Blackwell architecture paper"),
}
"""By the name for ``--device``."""
DEFAULT = "h100-sxm"
"""Without ``--device``, candidates are compared by the rates of this one, and no time is printed."""


def find_device(name: str, precision: str) -> tuple[Device, float]:
    """Return a device and its matrix peak in FLOP/s. Raises ``UsageError`` for one without such units."""
    device = DEVICES.get(name)
    if device is None:
        meant = did_you_mean(nearest(name, DEVICES))
        raise UsageError(
            f"device: {name}: one of the table is required: {', '.join(DEVICES)}{meant}; give one of them, or leave "
            "--device out to plan without a step time"
        )
    peak = peak_flops(device.torch_name, precision)
    if peak is None:
        raise UsageError(
            f"device: {name}: it has no matrix units for precision {precision}; another precision or device is "
            "required. Give --precision fp32"
        )
    return device, peak
