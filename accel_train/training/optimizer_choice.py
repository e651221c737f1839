"""Table of optimizers, strategies and precisions that work together, and the one function that refuses the rest.

A combination that trains wrong, or differently from its name, is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
from packaging.version import Version

from accel_train.config import UsageError

OptimizerName = Literal["adamw", "muon", "adamw8bit", "adamw_offload"]

STRATEGIES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16", "fp16")
BITSANDBYTES = Version("0.50")
"""First version with a tested 8-bit AdamW. Older ones have no CPU kernels."""


@dataclass(frozen=True)
class Row:
    """One optimizer under one strategy."""

    precisions: tuple[str, ...]
    """Supported precisions. Empty: refused."""
    reason: str = ""
    """Reason of a refusal, with the remedy."""
    run: tuple[str, ...] = ()
    """Precisions trained by the project's own tests, on CPU processes. fp16 needs a GPU: not run."""


_RUNS = Row(PRECISIONS, run=("fp32", "bf16"))
_MUON_UNDER_ZERO = Row(
    (),
    "ZeRO hands the optimizer one flat vector of each group's parameters, cut across matrices, and Muon needs whole "
    "ones; use FSDP2 (accelerate_configs/fsdp2.yaml), which shards by rows, or --optimizer.name adamw",
)
_EIGHT_BIT_UNDER_FSDP = Row(
    (),
    "the kernels of bitsandbytes take no sharded tensors (bitsandbytes#89, #1633); FSDP2 divides the state by the "
    "number of GPUs already: use --optimizer.name adamw",
)
_EIGHT_BIT_UNDER_ZERO = Row(
    (),
    "ZeRO keeps the state of flat vectors, whose 8-bit blocks belong to no parameter, so no checkpoint could name "
    "them; use --optimizer.name adamw, whose state ZeRO divides by the number of GPUs",
)
_ONE_GPU = "it keeps the whole state of one GPU in host memory"
_OFFLOAD_ELSEWHERE = Row((), f"{_ONE_GPU}; for several use accelerate_configs/zero2_offload.yaml with adamw")
_OFFLOAD_UNDER_FSDP = Row(
    (), f"{_ONE_GPU}; use accelerate_configs/fsdp2_offload.yaml or zero2_offload.yaml with --optimizer.name adamw"
)
_OFFLOAD_UNDER_ZERO = Row(
    (), "ZeRO offloads by itself; use accelerate_configs/zero2_offload.yaml with --optimizer.name adamw"
)

TABLE: dict[OptimizerName, dict[str, Row]] = {
    "adamw": dict.fromkeys(STRATEGIES, _RUNS),
    "muon": {"single": _RUNS, "ddp": _RUNS, "fsdp2": _RUNS}
    | dict.fromkeys(("zero1", "zero2", "zero3"), _MUON_UNDER_ZERO),
    "adamw8bit": {"single": _RUNS, "ddp": _RUNS, "fsdp2": _EIGHT_BIT_UNDER_FSDP}
    | dict.fromkeys(("zero1", "zero2", "zero3"), _EIGHT_BIT_UNDER_ZERO),
    "adamw_offload": {"single": Row(PRECISIONS), "ddp": _OFFLOAD_ELSEWHERE, "fsdp2": _OFFLOAD_UNDER_FSDP}
    | dict.fromkeys(("zero1", "zero2", "zero3"), _OFFLOAD_UNDER_ZERO),
}
"""Optimizer -> strategy -> row. ``adamw_offload`` trains on a GPU only; its arithmetic is tested on CPU tensors."""


def refuse_combination(name: OptimizerName, strategy: str, precision: str, device: torch.device) -> None:
    """Raise ``UsageError`` for a combination outside the table, a missing package, or an unsupported device."""
    row = TABLE[name][strategy]
    if precision not in row.precisions:
        raise UsageError(f"optimizer.name: {name} does not run under {strategy} in {precision}: {row.reason}")
    if name == "adamw8bit":
        _refuse_eight_bit(device)
    if name == "adamw_offload" and device.type != "cuda":
        raise UsageError(
            f"optimizer.name: adamw_offload needs a CUDA device, this is {device.type}, where there is no device "
            "memory to save; use --optimizer.name adamw"
        )


def _refuse_eight_bit(device: torch.device) -> None:
    try:
        installed = Version(version("bitsandbytes"))
    except PackageNotFoundError:
        installed = None
    if installed is None or installed < BITSANDBYTES:
        raise UsageError(
            f"optimizer.name: adamw8bit needs bitsandbytes {BITSANDBYTES} or newer, and "
            f"{'it is not installed' if installed is None else f'{installed} is installed'}; run "
            f"pip install 'bitsandbytes>={BITSANDBYTES}', or use --optimizer.name adamw"
        )
    if device.type not in ("cuda", "cpu", "xpu"):
        raise UsageError(
            f"optimizer.name: adamw8bit runs on cuda, xpu and cpu, this is {device.type}; use --optimizer.name adamw"
        )
