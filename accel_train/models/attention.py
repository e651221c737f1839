"""Attention: one function, so that every model meets the kernels through the same door."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Bidirectional attention over tensors of shape (B, H, N, D); the result has that shape too.

    `key_mask` (B, N) is True where a key may be attended. None means that no key is masked in any row, which
    leaves torch the choice of its fastest kernels: a caller who knows it should say so. A row in which every
    key is masked attends to all of them: its result means nothing but is finite, forward and backward, in
    every kernel (some of them return NaN for such a row).
    """
    if key_mask is None:
        return F.scaled_dot_product_attention(q, k, v)
    nothing = ~key_mask.any(dim=-1, keepdim=True)  # (B, 1)
    mask = torch.logical_or(key_mask, nothing)[:, None, None, :]  # (B, 1, 1, N)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
