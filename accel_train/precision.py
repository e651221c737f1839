"""Numerical precision: its names in options and in torch, and differences to compare with a tolerance.

A difference that is NaN counts as infinite. Comparisons with NaN are false, so ``difference > tolerance`` would accept
it, and Python's ``max`` drops it unless it comes first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn

Precision = Literal["fp32", "bf16", "fp16"]


def dtype_of(precision: Precision) -> torch.dtype:
    """``bf16`` -> ``torch.bfloat16``."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[int]:
    """Return the ids of the parameters that their library keeps in fp32 when a model is loaded in ``dtype``.

    Models of transformers name them in ``_keep_in_fp32_modules``, for fp16, and ``_keep_in_fp32_modules_strict``, for
    bf16 as well; those of diffusers in the first, for both.
    """
    import torch

    kept: set[int] = set()
    if dtype == torch.float32:
        return kept
    for part in model.modules():
        habits: Any = part
        names: set[str] = set(getattr(habits, "_keep_in_fp32_modules_strict", None) or ())
        # Only models of diffusers have this method.
        if dtype == torch.float16 or hasattr(part, "set_attention_backend"):
            names |= set(getattr(habits, "_keep_in_fp32_modules", None) or ())
        if not names:
            continue
        pattern = re.compile(rf"(^|\.)({'|'.join(sorted(names))})($|\.)")
        kept.update(id(parameter) for name, parameter in part.named_parameters() if pattern.search(name))
    return kept


def nan_as_infinite(difference: float) -> float:
    """Return the difference, or infinity for NaN."""
    if math.isnan(difference):
        return math.inf
    return difference


def largest(differences: Iterable[float]) -> float:
    """Return the largest difference, infinity if one is NaN, 0 for none."""
    return max(map(nan_as_infinite, differences), default=0.0)


def relative(a: float, b: float) -> float:
    """Return |a - b| relative to |a|. 0 for equal values and for two NaN, infinite next to NaN or infinity."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    # No difference is small beside 0.
    if a == 0:
        return math.inf
    return nan_as_infinite(abs(a - b) / abs(a))
