"""The precision of a computation as options name it, and as torch does."""

from __future__ import annotations

import re
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
    """Return the ids of the parameters that their library keeps in fp32 where a model is loaded in ``dtype``.

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
        # The method tells a diffusers model.
        if dtype == torch.float16 or hasattr(part, "set_attention_backend"):
            names |= set(getattr(habits, "_keep_in_fp32_modules", None) or ())
        if not names:
            continue
        pattern = re.compile(rf"(^|\.)({'|'.join(sorted(names))})($|\.)")
        kept.update(id(parameter) for name, parameter in part.named_parameters() if pattern.search(name))
    return kept
