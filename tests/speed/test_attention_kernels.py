"""Layouts and packing. flash-attn needs a GPU: here a stand-in with its documented signatures, which checks what it
is given and computes in fp64, takes its place. That tests the contract with the kernel, not the kernel."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.speed.attention.kernels import (
    TORCH_CHOICE,
    Attention,
    _flex,  # pyright: ignore[reportPrivateUsage]
    _rows_as_sequences,  # pyright: ignore[reportPrivateUsage]
    build_attention,
    flash_attention,
    flex_mask,
    pack,
    pack_mask,
    packed_kernel,
    unpack,
)
from accel_train.speed.attention.proof import prove_attention, reference
from accel_train.speed.attention.selection import apply_attention
from accel_train.speed.attention.table import AttentionNeeds


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(n, H, D) of one sequence, in fp64."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()).to(q.dtype)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """flash-attn 2.8: q, k, v and the result (batch, sequence, heads, head size)."""
    assert k.shape == v.shape
    assert (q.shape[0], q.shape[2:]) == (k.shape[0], k.shape[2:])
    assert q.dim() == 4
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert (dropout_p, softmax_scale, causal, window_size, softcap) == (0.0, None, False, (-1, -1), 0.0)
    return torch.stack([exact(*rows) for rows in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attn 2.8: q, k, v and the result (all tokens, heads, head size); int32 starts of sequences, and the end.

    Elements past the last end are never written: here they are NaN.
    """
    assert k.shape == v.shape
    assert q.shape[1:] == k.shape[1:]
    assert q.dim() == 3
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    queries, keys = bounds(q, cu_seqlens_q, max_seqlen_q), bounds(k, cu_seqlens_k, max_seqlen_k)
    assert (dropout_p, softmax_scale, causal, window_size, softcap) == (0.0, None, False, (-1, -1), 0.0)
    pieces = [exact(q[of], k[seen], v[seen]) for of, seen in zip(queries, keys, strict=True)]
    return torch.cat([*pieces, torch.full_like(q[queries[-1].stop :], torch.nan)])


def bounds(x: Tensor, ends: Tensor, longest: int) -> list[slice]:
    """The sequences of a packed tensor, which must lie inside it."""
    assert isinstance(longest, int)
    numbers: list[int] = ends.tolist()
    assert numbers[0] == 0
    assert numbers[-1] <= len(x)
    assert all(0 <= b - a <= longest for a, b in itertools.pairwise(numbers))
    return [slice(a, b) for a, b in itertools.pairwise(numbers)]


STAND_IN = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)


def with_stand_in() -> Attention:
    return Attention("flash", flash_attention(STAND_IN, deterministic=True), pack_mask)


def with_varlen_stand_in() -> Attention:
    def dense(q: Tensor, k: Tensor, v: Tensor, _mask: None) -> Tensor:
        return _rows_as_sequences(flash_attn_varlen_func, q, k, v, None)

    return Attention("varlen", packed_kernel(dense, flash_attn_varlen_func), pack_mask)


# ------------------------------------------------------------------------------------------ flash-attn of the Hub
def sdpa_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
    """The signature of kernels-community/flash-attn2, with torch's attention on (batch, sequence, heads, head size)."""
    assert set(named) <= set(inspect.signature(flash_attn_func).parameters)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)


def sdpa_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **named: Any,
) -> Tensor:
    """As above on packed tokens, one sequence after the other."""
    assert set(named) <= set(inspect.signature(flash_attn_varlen_func).parameters)
    queries, keys = bounds(q, cu_seqlens_q, max_seqlen_q), bounds(k, cu_seqlens_k, max_seqlen_k)
    rows = [(q[of][None], k[seen][None], v[seen][None]) for of, seen in zip(queries, keys, strict=True)]
    return torch.cat([sdpa_flash_attn_func(*row)[0] if row[0].shape[1] else row[0][0] for row in rows])


def stand_in_for_kernels(monkeypatch: pytest.MonkeyPatch, get_kernel: Any) -> None:
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_of_the_hub_is_loaded_at_its_pinned_version_and_passes_the_proof(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def get_kernel(repository: str, *, version: int) -> Any:
        asked.append((repository, version))
        return SimpleNamespace(flash_attn_func=sdpa_flash_attn_func, flash_attn_varlen_func=sdpa_flash_attn_varlen_func)

    stand_in_for_kernels(monkeypatch, get_kernel)
    built = build_attention("flash_hub")
    assert asked == [("kernels-community/flash-attn2", 2)]
    proof = prove_attention(built, AttentionNeeds(torch.device("cpu"), dtype, 16, heads=2, length=50, cross=True))
    assert max(proof.forward_error, proof.backward_error) <= proof.tolerance


def test_a_wrong_layout_of_the_hub_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof above can fail: here with heads and sequence changed over."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    module = SimpleNamespace(flash_attn_func=wrong, flash_attn_varlen_func=sdpa_flash_attn_varlen_func)
    stand_in_for_kernels(monkeypatch, lambda *_, **__: module)
    needs = AttentionNeeds(torch.device("cpu"), torch.float32, 16, heads=2, length=50)
    with pytest.raises(UsageError, match="attention flash_hub: differs from the fp64 reference without a mask"):
        prove_attention(build_attention("flash_hub"), needs)


@pytest.mark.parametrize("deterministic", [False, True])
def test_both_functions_of_flash_attn_are_asked_for_deterministic_gradients(deterministic: bool) -> None:
    asked: list[bool] = []

    def dense(*tensors: Tensor, deterministic: bool) -> Tensor:
        asked.append(deterministic)
        return sdpa_flash_attn_func(*tensors)

    def variable(*given: Any, deterministic: bool) -> Tensor:
        asked.append(deterministic)
        return sdpa_flash_attn_varlen_func(*given)

    module = SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=variable)
    kernel = Attention("flash", flash_attention(module, deterministic), pack_mask)
    q, k, v = inputs(2, 5)
    kernel(q, k, v)
    kernel(q, k, v, kernel.mask(torch.arange(5) < torch.tensor([[5], [3]])))
    assert asked == [deterministic] * 2


@pytest.mark.parametrize("error", [OSError("offline"), ValueError("no build"), FileNotFoundError("not cached")])
def test_flash_of_the_hub_that_cannot_be_loaded(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_kernel(*_: Any, **__: Any) -> Any:
        raise error

    stand_in_for_kernels(monkeypatch, get_kernel)
    with pytest.raises(UsageError) as raised:
        build_attention("flash_hub")
    for words in ("flash-attn2 version 2 could not be loaded", str(error), "HF_HUB_OFFLINE", "get_kernel('kernels-c"):
        assert words in str(raised.value)


def test_a_kernel_without_the_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_kernels(monkeypatch, lambda *_, **__: SimpleNamespace())
    with pytest.raises(UsageError, match="flash_attn_func"):
        build_attention("flash_hub")


def test_the_package_itself_says_that_the_kernel_is_not_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the real package, offline and with an empty cache."""
    if find_spec("kernels") is None:
        pytest.skip("kernels is not installed: pip install -e '.[kernels]'")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"attention flash_hub: kernels-community/flash-attn2 version 2 could not"):
        build_attention("flash_hub")


def inputs(rows: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (rows, length, 2, 8)
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


masks = st.integers(1, 12).flatmap(
    lambda length: st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=4)
)


@given(masks)
@settings(max_examples=60, deadline=None)
def test_packing_is_undone_and_keeps_keys_in_front_and_in_order(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    count, length = mask.shape
    packing = pack_mask(mask)
    x = torch.arange(count * 3 * length * 2).reshape(count, 3, length, 2)
    packed = pack(x, packing)
    assert packed.shape == (count * length, 3, 2)
    assert torch.equal(unpack(packed, packing, count), x)
    ends = packing.boundaries.tolist()
    assert packing.boundaries.dtype == torch.int32
    assert (ends[0], ends[-1], len(ends)) == (0, count * length, 2 * count + 1)
    for row in range(count):
        keys = packed[ends[2 * row] : ends[2 * row + 1]]
        padding = packed[ends[2 * row + 1] : ends[2 * row + 2]]
        tokens = x[row].transpose(0, 1)
        assert torch.equal(keys, tokens[mask[row]])
        assert torch.equal(padding, tokens[~mask[row]])


@given(masks)
@settings(max_examples=40, deadline=None)
def test_the_contract_with_flash_attn_holds_for_any_mask(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    q, k, v = inputs(*mask.shape)
    read = (mask | ~mask.any(-1, keepdim=True))[:, None, :, None]
    for chosen in (with_stand_in(), with_varlen_stand_in()):
        result, expected = chosen(q, k, v, chosen.mask(mask)), reference(q, k, v, mask)
        assert result.isfinite().all()
        torch.testing.assert_close((result * read).double(), expected * read, rtol=1e-5, atol=1e-6)
        gradients = torch.autograd.grad((result * read).sum(), (q, k, v))
        references = torch.autograd.grad((expected * read).sum(), (q, k, v))
        for found, wanted in zip(gradients, references, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [with_stand_in, with_varlen_stand_in])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_contract_passes_the_proof(build: Any, dtype: torch.dtype) -> None:
    needs = AttentionNeeds(torch.device("cpu"), dtype, 16, heads=2, length=50, cross=True)
    proof = prove_attention(build(), needs)
    assert proof.forward_error <= proof.tolerance


@pytest.mark.parametrize("build", [with_stand_in, with_varlen_stand_in])
@pytest.mark.parametrize("keys", [3, 11])
def test_other_numbers_of_keys_than_of_queries(build: Any, keys: int) -> None:
    q, k, v = inputs(2, 7)[0], *inputs(2, keys)[1:]
    torch.testing.assert_close(build()(q, k, v, None).double(), reference(q, k, v, None), rtol=1e-5, atol=1e-6)


def test_a_model_on_packed_sequences_gives_the_same_outputs_and_gradients() -> None:
    torch.manual_seed(0)
    model = MultimodalMMDiT(MultimodalMMDiTConfig(MMDiTConfig(width=32, depth=2, heads=2), 50, 6, 8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    other = copy.deepcopy(model)
    apply_attention(other, with_stand_in())
    mask = torch.arange(8) < torch.tensor([[8], [3], [1], [0]])
    batch = (torch.randint(0, 50, (4, 8)), torch.randn(4, 3, 6), torch.rand(4), torch.rand(4), mask)
    outputs = model(*batch), other(*batch)
    losses = [out.latents.square().sum() + out.text_logits[mask].square().sum() for out in outputs]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for expected, found in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5)


def test_packing_fetches_nothing_from_the_device() -> None:
    """Sizes that follow from values would wait for the device, and fail on meta tensors."""
    mask = torch.ones(3, 5, dtype=torch.bool, device="meta")
    packing = pack_mask(mask)
    x = torch.ones(3, 2, 5, 8, device="meta")
    assert unpack(pack(x, packing), packing, 3).shape == x.shape


@pytest.mark.parametrize("name", ["sdpa", "sdpa_math", "sdpa_flash"])
def test_kernels_survive_copies(name: str) -> None:
    built = build_attention(name)
    q, k, v = inputs(2, 5)
    for again in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert again.name == name
        assert torch.equal(again(q, k, v), built(q, k, v))


def test_a_restricted_kernel_is_an_error_where_it_cannot_run() -> None:
    q, k, v = inputs(2, 5)
    with pytest.raises(RuntimeError, match="No viable backend"):
        build_attention("sdpa_cudnn")(q, k, v)


def test_the_mask_of_flex_on_cpu_which_has_its_forward_only() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.detach() for x in inputs(3, 20))
    mask = torch.arange(20) < torch.tensor([[20], [7], [0]])
    flex = Attention("flex", lambda *x: _flex(flex_attention, *x), flex_mask)
    with pytest.warns(UserWarning, match="without torch.compile"):
        result = flex(q, k, v, flex.mask(mask))
    torch.testing.assert_close(result, TORCH_CHOICE(q, k, v, mask), rtol=1e-4, atol=1e-5)


def test_another_kernel_puts_back_the_flash_kernel_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash3 without its package: torch's own switch is asked for by name, and undone by the next kernel."""
    from torch.nn import attention as of_torch

    removed: list[str] = []
    handle = SimpleNamespace(remove=lambda: removed.append("FA3"))
    registered: dict[str, Any] = {"FA3": lambda: handle}
    monkeypatch.setattr(of_torch._registry, "_FLASH_ATTENTION_IMPLS", registered)
    assert build_attention("flash3").name == "flash3"
    assert of_torch.current_flash_attention_impl() == "FA3"
    build_attention("sdpa")
    assert (of_torch.current_flash_attention_impl(), removed) == (None, ["FA3"])
