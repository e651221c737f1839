"""The proof finds kernels that are wrong, each in its own way; the table of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config import UsageError
from accel_train.speed.attention.kernels import Attention, build_attention
from accel_train.speed.attention.proof import (
    attention_rows,
    kernels_that_ran,
    prove_attention,
    reference,
    time_attention,
)
from accel_train.speed.attention.table import NAMES, AttentionNeeds

NEEDS = AttentionNeeds(torch.device("cpu"), torch.float32, 16, heads=2, length=70, batch=2)


def own(function: Callable[..., Tensor]) -> Attention:
    return Attention("mine", function, lambda key_mask: key_mask)


def right(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float | None = None) -> Tensor:
    mask = None if key_mask is None else key_mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return 1.001 * gradients[0]


class NoNumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return torch.full_like(gradients[0], float("nan"))


WRONG: dict[str, Callable[..., Tensor]] = {
    "ignores the mask": lambda q, k, v, m: right(q, k, v, None),
    "inverts the mask": lambda q, k, v, m: right(q, k, v, None if m is None else ~m),
    "causal": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scale of a padded head": lambda q, k, v, m: right(q, k, v, m, scale=32**-0.5),
    "layout": lambda q, k, v, m: right(q, k, v, m).transpose(1, 2).reshape(q.shape),
    "shape": lambda q, k, v, m: right(q, k, v, m).transpose(1, 2),
    "dtype": lambda q, k, v, m: right(q, k, v, m).double(),
    "precision": lambda q, k, v, m: right(q.bfloat16(), k.bfloat16(), v.bfloat16(), m).float(),
    "not finite": lambda q, k, v, m: right(q, k, v, m) / (0 if m is not None else 1),
    "gradient": lambda q, k, v, m: WrongBackward.apply(right(q, k, v, m)),
    "gradient of q is not finite": lambda q, k, v, m: right(NoNumber.apply(q), k, v, m),
    "gradient of k is not finite": lambda q, k, v, m: right(q, NoNumber.apply(k), v, m),
    "gradient of v is not finite": lambda q, k, v, m: right(q, k, NoNumber.apply(v), m),
    "no gradient of v": lambda q, k, v, m: right(q, k, v.detach(), m) + 0 * v,
    "rows without keys": lambda q, k, v, m: right(q, k, v, m if m is None else m & (torch.arange(3) < 2)[:, None]),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_refused_with_the_numbers(fault: str) -> None:
    assert prove_attention(own(right), NEEDS).backward_error < 1e-6
    with pytest.raises(UsageError, match=r"attention mine: differs .* more than the allowed 1e-05") as caught:
        prove_attention(own(WRONG[fault]), NEEDS)
    assert "(B, H, N, D) = (2, 2, 70, 16)" in str(caught.value)


@pytest.mark.parametrize(("fault", "without_mask"), [("ignores the mask", True), ("gradient", False)])
def test_the_proof_asks_for_what_is_needed_only(fault: str, without_mask: bool) -> None:
    kernel = own(WRONG[fault])
    prove_attention(kernel, replace(NEEDS, mask=False) if without_mask else replace(NEEDS, backward=False))


def test_queries_of_padding_do_not_count() -> None:
    """Kernels for varying lengths compute something else there, or nothing."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        found = right(q, k, v, mask)
        return found if mask is None else found * (mask | ~mask.any(-1, keepdim=True))[:, None, :, None]

    proof = prove_attention(own(kernel), NEEDS)
    assert max(proof.forward_error, proof.backward_error) < 1e-6


@pytest.mark.parametrize(("length", "is_right"), [(4224, True), (4250, False)])
def test_a_kernel_that_is_wrong_for_lengths_that_are_no_multiple_is_found(length: int, is_right: bool) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return right(q, k, v, mask) * (1 if q.shape[2] % 64 == 0 else 1.1)

    needs = replace(NEEDS, length=length)
    if is_right:
        prove_attention(own(kernel), needs)
        return
    with pytest.raises(UsageError, match="differs from the fp64 reference"):
        prove_attention(own(kernel), needs)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 128, 129, 4250])
def test_the_sample_is_small_for_any_length(length: int) -> None:
    started = time.process_time()
    proof = prove_attention(build_attention("sdpa"), replace(NEEDS, length=length))
    assert proof.forward_error <= proof.tolerance
    assert time.process_time() - started < 5  # milliseconds; the first use of a function of torch's may take one second


def test_the_reference_is_the_definition() -> None:
    q, k, v = (torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.tensor([[True, True, False, True, False], [False] * 5])
    rows: list[Tensor] = []
    for i in range(5):
        weights = torch.exp((k[0, 0].double() @ q[0, 0, i].double()) / 2) * mask[0]
        rows.append((weights / weights.sum()) @ v[0, 0].double())
    found = reference(q, k, v, mask)
    torch.testing.assert_close(found[0, 0], torch.stack(rows))
    torch.testing.assert_close(found[1], reference(q, k, v, None)[1])


def test_what_ran_is_recorded() -> None:
    math = kernels_that_ran(build_attention("sdpa_math"), NEEDS)
    flash = kernels_that_ran(build_attention("sdpa_flash"), NEEDS)
    assert not any("flash" in name for name in math)
    assert [name for name in flash if "flash_attention_for_cpu_backward" in name]


def test_time_grows_with_the_work() -> None:
    sdpa = build_attention("sdpa_math")
    long = replace(NEEDS, length=700)
    assert time_attention(sdpa, long, seconds=0.2) > 5 * time_attention(sdpa, NEEDS, seconds=0.5)


def test_the_table_of_a_cpu() -> None:
    rows = {row.name: row for row in attention_rows(NEEDS, seconds=0.02)}
    assert tuple(rows) == NAMES
    ran = {name for name, row in rows.items() if row.why_not is None}
    assert ran == {"sdpa", "sdpa_math", "sdpa_flash"}
    for name in ran:
        row = rows[name]
        assert row.proof is not None
        assert row.seconds is not None
        assert row.seconds > 0
        assert row.proof.backward_error < 1e-6
        assert " ms  error " in str(row)
    assert str(rows["flash"]) == "flash           no: it needs a cuda device, and this one is cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mask", [False, True])
def test_the_table_of_a_gpu(mask: bool) -> None:
    """Every row that the device can run is right, and a named kernel is the one that ran."""
    needs = AttentionNeeds(torch.device("cuda"), torch.bfloat16, 64, heads=4, length=333, batch=4, mask=mask)
    rows = {row.name: row for row in attention_rows(needs)}
    for row in rows.values():
        print(row)
        if row.why_not is None:
            assert row.kernels, row.name
    for name, part in (("sdpa_flash", "flash"), ("sdpa_efficient", "fmha"), ("sdpa_cudnn", "cudnn")):
        if rows[name].why_not is None:
            assert any(part in kernel for kernel in rows[name].kernels), rows[name].kernels


def test_a_kernel_that_takes_as_many_keys_as_queries_only_is_refused_for_cross_attention() -> None:
    def first_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], mask)

    wrong = own(first_keys)
    prove_attention(wrong, replace(NEEDS, mask=False))
    with pytest.raises(UsageError, match="differs from the fp64 reference with other keys than queries"):
        prove_attention(wrong, replace(NEEDS, mask=False, cross=True))
