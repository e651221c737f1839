"""The precision of a computation as options name it, and as torch does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "bf16", "fp16"]


def dtype_of(precision: Precision) -> torch.dtype:
    """``bf16`` -> ``torch.bfloat16``."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
