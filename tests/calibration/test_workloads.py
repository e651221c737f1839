"""The pieces that are timed have the work that their names say, in the units of a plan."""

from __future__ import annotations

import pytest
import torch

from accel_train.calibration import workloads
from accel_train.calibration.workloads import Shape, count

CPU = torch.device("cpu")
SHAPE = Shape(rows=2, length=8, width=16, heads=2, depth=3, copied_bytes=4096)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_blocks(dtype: torch.dtype) -> None:
    """12 w^2 weights in a block: two FLOPs for each and token forward, four backward."""
    work = count(workloads.products(SHAPE, CPU, dtype))
    assert work.products == 6 * SHAPE.tokens * 12 * SHAPE.width**2 * SHAPE.depth
    assert (work.attention, work.moved) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_forward_and_backward(dtype: torch.dtype) -> None:
    """Two products forward and five backward, of L x L scores."""
    work = count(workloads.attention(SHAPE, CPU, dtype))
    assert work.attention == 7 * 2 * SHAPE.rows * SHAPE.length**2 * SHAPE.width * SHAPE.depth
    assert work.products == 0


def test_a_copy_reads_and_writes() -> None:
    assert count(workloads.copying(SHAPE, CPU)).moved == 2 * SHAPE.copied_bytes
    assert count(workloads.transfer(SHAPE, CPU)).moved == 2 * SHAPE.copied_bytes


def test_adamw_on_the_host_is_counted_as_in_a_simulation() -> None:
    """Weights, gradients and two means in fp32 are read and written, by torch's declaration; and the count of steps."""
    assert count(workloads.adamw_on_host(100)).moved == 8 * 4 * 100 + 3 * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_are_everything_else(dtype: torch.dtype) -> None:
    compute = workloads.operators(SHAPE, CPU, dtype)
    work = count(compute)
    assert (work.products, work.attention) == (0, 0)
    # AdamW reads weight, gradient and two means, and writes all but the gradient. EMA reads two and writes one.
    weights = 4 * workloads.OPTIMIZED * SHAPE.width**2 * SHAPE.depth
    assert work.moved > (7 + 3) * weights
    # As in the middle of a run, where AdamW makes no means: every round does the same.
    assert count(compute) == work


def test_small_operators_are_counted_as_kernels() -> None:
    work = count(workloads.small_operators(CPU, torch.float32))
    assert work.kernels > 20 * workloads.TINY.depth
    assert work.sent == 0
