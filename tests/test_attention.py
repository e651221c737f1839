"""Attention against its definition in fp64."""

import pytest
import torch
from torch import Tensor

from accel_train.models.attention import attention


def definition(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    return scores.softmax(dim=-1) @ v.double()


def inputs(length: int, seed: int = 0) -> list[Tensor]:
    """As a model gives them: (B, H, N, D) views of (B, N, H, D)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, length, 4, 24, generator=generator).transpose(1, 2).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("length", [1, 7, 33, 130])
@pytest.mark.parametrize("masked", [False, True])
def test_forward_and_gradients_equal_the_definition(length: int, masked: bool) -> None:
    q, k, v = inputs(length)
    mask = torch.arange(length) < torch.tensor([[length], [max(1, length // 2)], [1]]) if masked else None
    result, expected = attention(q, k, v, mask), definition(q, k, v, mask)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((result * weights).sum(), (q, k, v))
    references = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_masked_keys_have_no_influence() -> None:
    q, k, v = inputs(9)
    mask = torch.arange(9) < torch.tensor([[9], [5], [2]])
    changed = [torch.where(mask[:, None, :, None], x, x + 100) for x in (k, v)]
    torch.testing.assert_close(attention(q, *changed, mask), attention(q, k, v, mask), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_keys_is_finite_forward_and_backward(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs(5))
    mask = torch.tensor([[True] * 5, [False] * 5, [True, False, True, False, True]])
    result = attention(q, k, v, mask)
    result.float().square().sum().backward()
    assert result.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    torch.testing.assert_close(result[1], attention(q, k, v)[1], rtol=0.02, atol=0.02)  # attends to all
