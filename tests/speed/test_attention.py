"""The one call against its definition in fp64, and the choice of the kernel behind it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.models.mmdit import MMDiT, MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.speed.apply import SpeedOptions, apply_speed_options
from accel_train.speed.attention.kernels import TORCH_CHOICE
from accel_train.speed.attention.selection import apply_attention, attention, resolve_attention
from accel_train.speed.attention.table import NAMES, AttentionNeeds

SELECTION = "accel_train.speed.attention.selection"
CPU = torch.device("cpu")
ON_CPU = ("sdpa", "sdpa_math", "sdpa_flash")


def needs(dtype: torch.dtype = torch.float32, head_size: int = 24, length: int = 33, **more: bool) -> AttentionNeeds:
    return AttentionNeeds(CPU, dtype, head_size, heads=2, length=length, batch=2, **more)


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


def test_a_mask_prepared_once_equals_a_mask_given_each_time() -> None:
    q, k, v = inputs(9)
    mask = torch.arange(9) < torch.tensor([[9], [0], [2]])
    assert torch.equal(TORCH_CHOICE(q, k, v, TORCH_CHOICE.mask(mask)), attention(q, k, v, mask))


# ------------------------------------------------------------------------------------------------------ the choice
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["auto", *ON_CPU])
def test_every_row_of_the_table_that_a_cpu_can_run_is_run_and_right(name: str, dtype: torch.dtype) -> None:
    chosen, reason = resolve_attention(name, needs(dtype))
    assert chosen.name == ("sdpa" if name == "auto" else name)
    assert reason.startswith(f"attention {chosen.name} (")
    assert "against fp64" in reason
    q, k, v = (x.to(dtype) for x in inputs(12))
    mask = torch.arange(12) < torch.tensor([[12], [5], [1]])
    found, expected = chosen(q, k, v, chosen.mask(mask)), definition(q, k, v, mask)
    torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_CPU])
def test_a_named_kernel_that_cannot_run_is_refused_with_the_reason_and_what_can(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_attention(name, needs())
    words = str(caught.value)
    assert words.startswith(f"attention {name}: cannot be used: it ")
    assert "no backward on cpu" in words if name == "flex" else "needs a cuda device, and this one is cpu" in words
    assert words.endswith("Use auto, or one that can: sdpa, sdpa_math, sdpa_flash.")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sdpa_flas", ("'sdpa_flas'", "did you mean 'sdpa_flash'", "module:function")),
        ("", ("is not known", "auto, tune, sdpa")),
        ("xformers", ("sdpa_efficient",)),
        ("flash_attention_2", ("Use flash, or flash_hub",)),
        ("kernels-community/flash-attn2", ("Use flash_hub.",)),
        ("no_such_module:f", ("no_such_module:f", "cannot be imported", "(q, k, v, key_mask)")),
        ("math:no_such_function", ("no_such_function", "cannot be imported")),
        (":", ("cannot be imported",)),
        (".relative:f", ("cannot be imported",)),
    ],
)
def test_unknown_names_are_refused(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_attention(name, needs())
    assert all(word in str(caught.value) for word in words), caught.value


def test_tune_measures_what_can_run_and_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, reason = resolve_attention("tune", needs())
    assert chosen.name in ON_CPU
    assert all(f"{name} " in reason for name in ON_CPU)
    seconds = {"sdpa": 3.0, "sdpa_math": 1.0, "sdpa_flash": 2.0}
    monkeypatch.setattr(f"{SELECTION}.time_attention", lambda built, _needs: seconds[built.name])
    assert resolve_attention("tune", needs())[0].name == "sdpa_math"


def test_tune_takes_one_kernel_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest process decides: here the other one finds sdpa_math slow."""
    distributed = torch.distributed
    seconds = {"sdpa": 3.0, "sdpa_math": 1.0, "sdpa_flash": 2.0}
    monkeypatch.setattr(f"{SELECTION}.time_attention", lambda built, _needs: seconds[built.name])
    reduce = distributed.all_reduce

    def with_another(times: Tensor, operation: object) -> None:
        assert operation == distributed.ReduceOp.MAX
        reduce(times, operation)
        times.copy_(torch.maximum(times, torch.tensor([1.0, 9.0, 1.0])))

    monkeypatch.setattr(distributed, "all_reduce", with_another)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert resolve_attention("tune", needs())[0].name == "sdpa_flash"
    finally:
        distributed.destroy_process_group()


def test_auto_goes_on_where_the_first_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SELECTION}.preferred", lambda *_: (f"{__name__}:deaf_to_masks", "sdpa"))
    chosen, reason = resolve_attention("auto", needs())
    assert chosen.name == "sdpa"
    assert f"{__name__}:deaf_to_masks failed" in reason
    assert "with a mask" in reason


def deaf_to_masks(q: Tensor, k: Tensor, v: Tensor, _key_mask: Tensor | None) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_function_of_ones_own_passes_the_same_proof_or_is_refused() -> None:
    chosen, reason = resolve_attention(f"{__name__}:by_hand", needs())
    assert f"attention {__name__}:by_hand (as asked" in reason
    q, k, v = inputs(9)
    mask = torch.arange(9) < torch.tensor([[9], [0], [2]])
    torch.testing.assert_close(chosen(q, k, v, chosen.mask(mask)), attention(q, k, v, mask))
    with pytest.raises(UsageError, match=r"deaf_to_masks.*fp64 reference with a mask"):
        resolve_attention(f"{__name__}:deaf_to_masks", needs())
    assert resolve_attention(f"{__name__}:deaf_to_masks", needs(mask=False))  # nobody masks: it is right


def by_hand(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if key_mask is not None:
        assert key_mask.any(-1).all()  # no row without a key reaches a kernel
        scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    return scores.softmax(-1) @ v


# -------------------------------------------------------------------------------------------------------- the model
def test_a_model_uses_the_kernel_that_was_applied() -> None:
    torch.manual_seed(0)
    model = MMDiT(MMDiTConfig(width=48, depth=2, heads=2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    names = list(model.state_dict())
    tokens, mask = (torch.randn(3, 6, 48), torch.randn(3, 4, 48)), torch.arange(10) < torch.tensor([[10], [7], [0]])
    expected = model(tokens, torch.randn(3, 48, generator=torch.Generator().manual_seed(0)), mask)
    calls: list[Tensor | None] = []

    def counting(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        calls.append(key_mask)
        return by_hand(q, k, v, key_mask)

    chosen, _ = resolve_attention(f"{__name__}:by_hand", needs())
    object.__setattr__(chosen, "kernel", counting)
    apply_attention(model, chosen)
    found = model(tokens, torch.randn(3, 48, generator=torch.Generator().manual_seed(0)), mask)
    assert len(calls) == 2
    assert calls[0] is not None
    assert calls[0].shape == (3, 10)
    assert list(model.state_dict()) == names
    for result, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-5)


def test_a_model_says_what_it_needs() -> None:
    shape = MultimodalMMDiTConfig(
        MMDiTConfig(width=48, depth=1, heads=2), 50, 6, max_text_length=8, max_latent_length=3
    )
    needs = shape.attention_needs(CPU, "bf16", 5)
    assert not needs.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert shape.attention_needs(CPU, "bf16", 5).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    seen: list[tuple[torch.Size, torch.dtype]] = []

    def looking(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        seen.append((q.shape, q.dtype))
        return by_hand(q, k, v, key_mask)

    chosen, _ = resolve_attention(f"{__name__}:by_hand", needs)
    object.__setattr__(chosen, "kernel", looking)
    model = MultimodalMMDiT(shape)
    apply_attention(model, chosen)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(5, 8).long(), torch.ones(5, 3, 6), torch.rand(5), torch.rand(5), torch.ones(5, 8) > 0)
    assert seen == [(torch.Size((needs.batch, needs.heads, needs.length, needs.head_size)), needs.dtype)]


def test_a_model_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(UsageError, match="no part of Linear"):
        apply_attention(nn.Linear(2, 2), TORCH_CHOICE)


def test_choosing_draws_nothing_and_is_quick() -> None:
    state, started = torch.get_rng_state(), time.process_time()
    resolve_attention("auto", AttentionNeeds(CPU, torch.float32, 64, heads=24, length=1178, batch=32))
    assert torch.equal(state, torch.get_rng_state())
    assert time.process_time() - started < 5  # one attention at this size takes that, and its gradients twice as much


def test_a_model_with_attention_of_its_own_keeps_it_and_an_option_for_it_is_refused() -> None:
    applied = apply_speed_options(torch.nn.Linear(2, 2), SpeedOptions(), CPU, "fp32")
    assert applied.choices["attention"] == "attention: the model's own"
    assert applied.facts == {"attention": "own"}
    with pytest.raises(UsageError, match="attention sdpa_math: Linear chooses its own attention"):
        apply_speed_options(torch.nn.Linear(2, 2), SpeedOptions("sdpa_math"), CPU, "fp32")
