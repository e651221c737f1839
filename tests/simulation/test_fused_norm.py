"""RMSNorm as CUDA computes it: the values of torch's own, the memory and the operators of one kernel each way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.simulation.ledger import Ledger
from accel_train.simulation.tensors.cuda_casts import cuda_casts
from accel_train.simulation.tensors.fused_norm import rms_norm
from accel_train.simulation.work import WorkCounter

ROWS, WIDTH = 4 * 8, 16


def made(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("shape", [(WIDTH,), (8, WIDTH)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("eps", [1e-6, None])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], weighted: bool, eps: float | None) -> None:
    x, weight, arriving = made(4, 8, WIDTH), made(*shape) if weighted else None, torch.randn(4, 8, WIDTH).double()

    def computed(norm: Callable[..., Tensor]) -> list[Tensor]:
        result = norm(x, shape, weight, eps)
        return [result, *torch.autograd.grad(result, [x] if weight is None else [x, weight], arriving)]

    for ours, theirs in zip(computed(rms_norm), computed(F.rms_norm), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_bf16_is_added_up_in_fp32() -> None:
    x = torch.full((1, 4096), 0.1, dtype=torch.bfloat16)
    expected = F.rms_norm(x.double(), (4096,), eps=1e-6).bfloat16()
    assert torch.equal(rms_norm(x, (4096,), eps=1e-6), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_operator_each_way_keeps_the_input_and_a_number_for_each_row(dtype: torch.dtype) -> None:
    norm = nn.RMSNorm(WIDTH, dtype=dtype)
    x = made(ROWS, WIDTH, dtype=dtype)
    size = x.numel() * x.element_size()
    counter = WorkCounter()
    ledger = Ledger(lambda: ("forward", ""), counter.watch)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with cuda_casts(), ledger.recording(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = norm(x)
        forward = counter.work()
        result.backward(torch.ones_like(result))
    weight = norm.weight
    row_numbers = kept[-1]
    assert [tensor.data_ptr() for tensor in kept[:-1]] == [x.data_ptr(), weight.data_ptr()]
    assert (row_numbers.numel(), row_numbers.dtype) == (ROWS, torch.float32)
    numbers = 4 * ROWS
    gain = weight.numel() * weight.element_size()
    assert (forward.kernels, forward.moved) == (1, 2 * size + gain + numbers)
    # The backward reads both inputs and the numbers, and writes both gradients; before it the ones are written.
    both = counter.work()
    assert both.kernels == 3
    assert both.moved - forward.moved == size + (3 * size + 2 * gain + numbers)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_weight_of_another_type_is_composed_as_torch_does() -> None:
    """On a GPU too: the kernel takes one type."""
    x, weight = made(ROWS, WIDTH, dtype=torch.bfloat16), made(WIDTH, dtype=torch.float32)

    def kept() -> list[tuple[torch.Size, torch.dtype]]:
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            F.rms_norm(x, (WIDTH,), weight)
        return [(tensor.shape, tensor.dtype) for tensor in found]

    composed = kept()
    with cuda_casts():
        assert kept() == composed
    assert (x.shape, torch.float32) in composed


def test_strided_rows_are_copied_for_the_kernel_and_kept_as_they_are() -> None:
    """Queries and keys are views of one product."""
    both = made(ROWS, 2 * WIDTH, dtype=torch.float32)
    query = both[:, :WIDTH]
    ledger = Ledger(lambda: ("forward", ""), lambda *_: None)
    with cuda_casts(), ledger.recording():
        result = F.rms_norm(query, (WIDTH,))
        held = ledger.held("activations", "forward")[0]
    size = 4 * ROWS * WIDTH
    assert held == size + 4 * ROWS
    assert ledger.peak().total == held + size
    assert result.is_contiguous()
