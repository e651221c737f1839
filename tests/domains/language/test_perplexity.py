"""The cross entropy that needs no fp32 copy of the logits, against torch's own in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from accel_train.domains.language import perplexity
from accel_train.domains.language.packing import IGNORED

BATCH, LENGTH, VOCABULARY = 3, 7, 50


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (4 * torch.randn(BATCH, LENGTH, VOCABULARY)).to(dtype).requires_grad_()
    expected = torch.randint(VOCABULARY, (BATCH, LENGTH))
    expected[:, ::3] = IGNORED
    expected[1] = IGNORED
    return logits, expected, torch.tensor([0.5, 1.0, -2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_loss_and_gradient_are_those_of_fp64(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "VALUES_AT_ONCE", rows * VOCABULARY + 1)
    logits, expected, weight = case(dtype)
    exact = logits.detach().double().requires_grad_()
    reference = F.cross_entropy(exact.flatten(0, 1), expected.flatten(), ignore_index=IGNORED, reduction="none")
    reference = reference.view_as(expected).sum(-1)
    found = perplexity.losses(logits.flatten(0, 1), expected.flatten()).view_as(expected).sum(-1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), reference, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad((found * weight).sum(), logits)
    (correct,) = torch.autograd.grad((reference * weight).sum(), exact)
    assert gradient.dtype == dtype
    # Of bf16 the exact gradient, rounded once.
    torch.testing.assert_close(
        gradient.double(), correct.to(dtype).double(), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-7
    )
    assert not gradient[expected == IGNORED].any()


def test_the_backward_keeps_the_logits_and_the_targets_alone() -> None:
    logits, expected, _ = case(torch.bfloat16)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        perplexity.losses(logits.flatten(0, 1), expected.flatten())
    assert sorted(kept) == sorted([2 * logits.numel(), 8 * expected.numel()])
