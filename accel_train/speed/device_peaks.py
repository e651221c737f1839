"""Peak throughput of devices: of their matrix units (the reference for MFU), and in ordinary fp32."""

from __future__ import annotations

import re

import torch

# Dense matrix throughput with fp32 accumulation in TFLOP/s (fp16, bf16, fp32 on TF32 units), and fp32 on the ordinary
# units, from the vendors' data sheets. Where a sheet has only the sparse value, half of it. None: no such units. Names
# are those of torch.cuda.get_device_name. A slice of a device (MIG), a laptop or an export variant matches nothing.
_PEAKS: tuple[tuple[str, tuple[float | None, float | None, float | None, float]], ...] = (
    # NVIDIA V100, T4 data sheets: no bf16; fp32 on the ordinary units
    (r"Tesla V100-SXM\d-\d+GB", (125.0, None, 15.7, 15.7)),
    (r"Tesla T4", (65.0, None, 8.1, 8.1)),
    # NVIDIA A100, A30, A40, A10 data sheets
    (r"NVIDIA A100[- ](SXM\d?-|PCIE-|PG\d+-)?\d+GB( PCIe)?", (312.0, 312.0, 156.0, 19.5)),
    (r"NVIDIA A30", (165.0, 165.0, 82.0, 10.3)),
    (r"NVIDIA A40", (149.7, 149.7, 74.8, 37.4)),
    (r"NVIDIA A10", (125.0, 125.0, 62.5, 31.2)),
    # NVIDIA H100 and H200 data sheets
    (r"NVIDIA H100 \d+GB HBM\w+", (989.4, 989.4, 494.7, 67.0)),
    (r"NVIDIA H100 PCIe", (756.0, 756.0, 378.0, 51.0)),
    (r"NVIDIA (H100|H200) NVL", (835.5, 835.5, 417.5, 60.0)),
    (r"NVIDIA (H200|GH200 \d+GB)", (989.4, 989.4, 494.7, 67.0)),
    # NVIDIA L4, L40, L40S data sheets
    (r"NVIDIA L4", (121.0, 121.0, 60.0, 30.3)),
    (r"NVIDIA L40", (181.05, 181.05, 90.5, 90.5)),
    (r"NVIDIA L40S", (362.05, 362.05, 183.0, 91.6)),
    # NVIDIA Blackwell architecture brief: HGX B200, GB200
    (r"NVIDIA B200", (2250.0, 2250.0, 1125.0, 80.0)),
    (r"NVIDIA GB200", (2500.0, 2500.0, 1250.0, 80.0)),
    # NVIDIA Ampere GA102, Ada and RTX Blackwell architecture papers, the rows "with FP32 accumulate"
    (r"NVIDIA GeForce RTX 3090", (71.0, 71.0, 35.6, 35.6)),
    (r"NVIDIA GeForce RTX 4090", (165.2, 165.2, 82.6, 82.6)),
    (r"NVIDIA GeForce RTX 5090", (209.5, 209.5, 104.8, 104.8)),
    # AMD CDNA 3 data sheet
    (r"AMD Instinct MI300X", (1307.4, 1307.4, 653.7, 163.4)),
)
_COLUMNS = {"fp16": 0, "bf16": 1, "fp32": 2}
_ORDINARY = 3


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of one device by its `torch.cuda.get_device_name`, or None for an unknown one.

    `precision` is fp32, bf16 or fp16. The peak of fp32 is the TF32 peak, even with TF32 switched off.
    """
    return _peak(device_name, _COLUMNS[precision])


def fp32_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of fp32 on the ordinary units, for products with TF32 off, which is torch's default."""
    return _peak(device_name, _ORDINARY)


def _peak(device_name: str, column: int) -> float | None:
    for pattern, peaks in _PEAKS:
        if re.fullmatch(pattern, device_name):
            teraflops = peaks[column]
            return None if teraflops is None else teraflops * 1e12
    return None


def peak_of(device: torch.device, precision: str) -> float | None:
    """Return `peak_flops` of this device, None for a CPU or an unknown one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)
