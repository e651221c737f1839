"""Attention of models of transformers and diffusers: what runs is what was asked for, and it is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.simulated import simulating
from accel_train.simulation.step import FakeStep
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.apply import SpeedOptions, apply_speed_options
from accel_train.speed.attention import other_libraries as library_attention
from accel_train.speed.attention.calls import block_mask_on, recorded_calls
from accel_train.speed.attention.other_libraries import LibraryAttention, apply_library_attention
from accel_train.speed.attention.proof import _recorded_operators
from accel_train.speed.options import ActivationCheckpointingConfig
from tests.distributed.foreign_models import MODELS

CPU = torch.device("cpu")
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
IDS = torch.arange(24).reshape(2, 12)


def wide_llama() -> nn.Module:
    """With heads that every kernel takes: 16 channels each, as many of keys as of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, attn_implementation="eager"))


def flux() -> nn.Module:
    """Its attention goes through the backends of diffusers."""
    from diffusers import FluxTransformer2DModel

    sizes: Any = {"attention_head_dim": 8, "num_attention_heads": 2, "axes_dims_rope": (2, 2, 4)}
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        **sizes,
    )


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def run_text(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def run_sd3(model: Any) -> Tensor:
    return model(values(2, 4, 8, 8), values(2, 6, 16), values(2, 16), torch.full((2,), 5.0)).sample


def run_unet(model: Any) -> Tensor:
    return model(values(2, 4, 8, 8), torch.full((2,), 5.0), values(2, 6, 16)).sample


def run_flux(model: Any) -> Tensor:
    ids = {"img_ids": torch.zeros(4, 3), "txt_ids": torch.zeros(6, 3)}
    return model(values(2, 4, 4), values(2, 6, 16), values(2, 16), torch.full((2,), 0.5), **ids).sample


Case = tuple[Callable[[], nn.Module], Callable[[Any], Tensor], int]
CASES: dict[str, Case] = {
    "llama": (MODELS["llama"], run_text, 3),
    "gpt": (MODELS["gpt"], run_text, 3),
    "sd3": (MODELS["sd3"], run_sd3, 2),
    "unet": (MODELS["unet"], run_unet, 12),
    "flux": (flux, run_flux, 2),
}
"""Each model, its inputs, and how often it attends."""
GPU_CASES: dict[str, Case] = {**CASES, "wide_llama": (wide_llama, run_text, 3)}


def built(kind: str) -> tuple[Any, Callable[[Any], Tensor], int]:
    torch.manual_seed(3)
    make, run, calls = GPU_CASES[kind]
    return make(), run, calls


def applied(model: nn.Module, name: str, example: Any, dtype: torch.dtype = torch.float32) -> LibraryAttention:
    return apply_library_attention(model, name, CPU, dtype, example)


def operators(run: Callable[[], object]) -> list[str]:
    with _recorded_operators() as names:
        run()
    return [name for name in names if "attention" in name]


@pytest.mark.parametrize("name", ["sdpa", "sdpa_math", "sdpa_flash"])
@pytest.mark.parametrize("kind", CASES)
def test_the_model_runs_the_kernel_asked_for_and_says_the_same_as_in_fp64(kind: str, name: str) -> None:
    model, run, calls = built(kind)
    model.eval()
    with torch.no_grad():
        exact = run_in_fp64(model, kind)
        found = applied(model, name, run)
        ran = operators(lambda: run(model))
        torch.testing.assert_close(run(model).double(), exact, rtol=1e-4, atol=1e-5)
    assert ran == ([] if name == "sdpa_math" else [FLASH] * calls)
    assert found.name == name
    assert f"(as asked): {calls} calls" in found.notice
    assert found.kernels == (() if name == "sdpa_math" else (FLASH,))


def run_in_fp64(model: Any, kind: str) -> Tensor:
    """By transformers' own eager attention, and by the native backend of diffusers."""
    torch.manual_seed(3)
    reference: Any = CASES[kind][0]()
    reference.load_state_dict(model.state_dict())
    if kind in ("llama", "gpt"):
        assert reference.config._attn_implementation == "eager"
        return run_text(reference.double().eval())
    reference.set_attention_backend("native")
    return CASES[kind][1](reference.eval()).double()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # Flux's norms, under autocast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CASES)
def test_auto_proves_what_the_model_has_and_changes_nothing(kind: str, dtype: torch.dtype) -> None:
    model, run, calls = built(kind)
    model.train()
    list(model.children())[-1].eval()
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        before = run(model.eval())
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    state = torch.get_rng_state()
    found = applied(model, "auto", run, dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        assert torch.equal(run(model.eval()), before)
    assert found.name == ("eager" if kind in ("llama", "gpt") else "sdpa")
    assert f"(as it came): {calls} calls" in found.notice
    assert "against fp64" in found.notice


def test_a_recorded_call_repeats_the_attention_by_its_definition() -> None:
    """Grouped queries and the causal mask of transformers, against the formula."""
    model, run, _ = built("llama")
    with recorded_calls() as calls, torch.no_grad():
        run(model)
    q, k, v = (values(*drawn.shape).double() for drawn in calls[0].inputs)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(calls[0].attend(q, k, v), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fault", ["leaks", "scaled"])
def test_a_wrong_kernel_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def wrong(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **named: Any) -> Any:
        if fault == "leaks":
            return right(module, q, k, v, attention_mask, **{**named, "is_causal": False})
        return right(module, q, k, v, attention_mask, **{**named, "scaling": 0.5 * named["scaling"]})

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", wrong)
    model, run, _ = built("llama")
    with pytest.raises(UsageError, match=r"attention sdpa of LlamaForCausalLM: differs from fp64 in LlamaAttention"):
        applied(model, "sdpa", run)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UsageError, match=r"attention sdpa of .*: differs from fp64 .* more than the allowed 1e-05"):
        applied(model, "auto", run)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("llama", "varlen", r"attends through transformers, which has none of that name; it has eager, sdpa, flash,"),
        ("llama", "tune", r"none of that name"),
        ("llama", "math:sqrt", r"none of that name"),
        ("sd3", "eager", r"attends through diffusers, which has none of that name; it has sdpa, flash, "),
        ("sd3", "flash4", r"attends through diffusers, which has none of that name"),
        ("llama", "flash", r"it needs a cuda device, and this one is cpu.* can: eager, sdpa, sdpa_flash, sdpa_math"),
        ("unet", "flash_hub", r"it needs a cuda device, and this one is cpu.* can: sdpa, sdpa_flash, sdpa_math"),
        ("flux", "flex", r"it has no backward on cpu"),
    ],
)
def test_what_a_library_or_this_machine_lacks_is_refused_by_name(kind: str, name: str, message: str) -> None:
    model, run, _ = built(kind)
    with pytest.raises(UsageError, match=rf"attention {name}: .*{message}"):
        applied(model, name, run)


def test_attention_that_no_option_of_diffusers_reaches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where flex has a backward: SD3 calls torch itself, and diffusers says nothing of it."""
    monkeypatch.setattr(library_attention, "why_not", lambda *_: None)
    model, run, _ = built("sd3")
    message = r"attention flex: was set in SD3Transformer2DModel, but 2 of its 2 calls .* JointAttnProcessor2_0 \(torch"
    with pytest.raises(UsageError, match=message):
        applied(model, "flex", run)


def test_a_choice_that_transformers_ignores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns only, for a model that holds its attention in another way."""
    model, run, _ = built("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda _=None: False)
    with pytest.raises(UsageError, match=r"attention sdpa: was set in .* 3 of its 3 calls .* LlamaAttention \(eager"):
        applied(model, "sdpa", run)


def test_a_choice_that_transformers_refuses_is_refused_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run, _ = built("llama")
    monkeypatch.setattr(type(model), "_supports_sdpa", False)
    with pytest.raises(UsageError, match=r"attention sdpa: transformers refuses sdpa for LlamaForCausalLM: ValueError"):
        applied(model, "sdpa", run)


def test_a_hub_that_cannot_be_reached_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without a network: diffusers lets the error through."""

    class ConnectError(Exception):
        """As httpx has it, which is not among the errors of a kernel."""

    def unreachable(_part: Any, backend: str) -> None:
        raise ConnectError(f"[Errno -3] no way to {backend}")

    monkeypatch.setattr(library_attention, "why_not", lambda *_: None)
    model, run, _ = built("flux")
    monkeypatch.setattr(type(model), "set_attention_backend", unreachable)
    message = (
        r"attention flash_hub: diffusers refuses .* for FluxTransformer2DModel: ConnectError: .*no way to.* Use auto"
    )
    with pytest.raises(UsageError, match=message):
        applied(model, "flash_hub", run)


def test_the_backend_of_one_model_of_diffusers_is_not_that_of_the_process() -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before = _AttentionBackendRegistry.get_active_backend()[0]
    model, run, _ = built("flux")
    applied(model, "sdpa", run)
    assert _AttentionBackendRegistry.get_active_backend()[0] == before


def test_a_simulation_leaves_the_proof_of_auto_out() -> None:
    model, run, _ = built("llama")
    with simulating(FakeStep()):
        assert "not proven: a simulation has no device" in applied(model, "auto", run).notice
        assert "against fp64" in applied(model, "sdpa", run).notice
    assert "against fp64" in applied(model, "auto", run).notice


def test_without_an_example_auto_is_not_proven_and_a_name_is_refused() -> None:
    model, _, _ = built("sd3")
    assert "not proven: there is no example" in applied(model, "auto", None).notice
    with pytest.raises(UsageError, match=r"attention sdpa: cannot be proven .* Give `prepare` an example"):
        applied(model, "sdpa", None)
    llama, _, _ = built("llama")
    assert "3 calls" in applied(llama, "sdpa", None).notice  # transformers has an example of its own
    resnet = MODELS["resnet"]()
    assert "not proven" in applied(resnet, "auto", None).notice
    broken = partial(applied, llama, "auto", lambda model: model(nothing=1))
    assert "its example failed: ValueError" in broken().notice or "TypeError" in broken().notice


def test_a_recomputed_block_takes_the_same_kernel_again() -> None:
    model, run, _ = built("llama")
    expected = gradients(model, run)
    applied(model, "sdpa_math", run)
    apply_activation_checkpointing(model, ActivationCheckpointingConfig("full"))
    assert operators(lambda: gradients(model, run)) == []
    for found, exact in zip(gradients(model, run), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


def gradients(model: nn.Module, run: Callable[[Any], Tensor]) -> list[Tensor]:
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(run(model).square().mean(), trained))


def test_the_option_reaches_the_run_info() -> None:
    model, run, _ = built("sd3")
    found = apply_speed_options(model, SpeedOptions("sdpa_flash"), CPU, "fp32", example=run)
    assert found.facts == {"attention": "sdpa_flash", "attention_kernels": (FLASH,)}
    assert "attention sdpa_flash of SD3Transformer2DModel (as asked)" in found.choices["attention"]


def test_models_of_a_larger_module_are_found() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = MODELS["llama"]()
            self.image = MODELS["sd3"]()

    def run(pair: Any) -> None:
        run_text(pair.text)
        run_sd3(pair.image)

    pair = Pair()
    found = applied(pair, "sdpa_math", run)
    assert "of LlamaForCausalLM, SD3Transformer2DModel (as asked): 5 calls" in found.notice
    with torch.no_grad():
        assert operators(lambda: run(pair)) == []
    with pytest.raises(UsageError, match="attention eager: SD3Transformer2DModel attends through diffusers"):
        applied(pair, "eager", run)


def test_a_model_without_a_reference_is_trained_as_it_came_and_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an eager function that multiplies fp32 weights cannot be had in fp64."""
    from transformers.models.llama import modeling_llama

    def fp32_only(module: Any, q: Tensor, *_: Any, **__: Any) -> Any:
        return torch.matmul(q, q.new_zeros(8, 8, dtype=torch.float32)), None

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", fp32_only)
    model, run, _ = built("llama")
    assert "not proven: attention eager of LlamaForCausalLM: cannot be used" in applied(model, "auto", run).notice
    with pytest.raises(UsageError, match="attention sdpa of LlamaForCausalLM: cannot be used"):
        applied(model, "sdpa", run)


def test_a_mask_of_flex_attention_is_the_same_on_another_device() -> None:
    """Its function holds tensors of the device that it was made on: the texts of a packed row."""
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    text = (torch.arange(16) >= 9).int()

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (text[q] == text[k])

    mask = create_block_mask(sees, 1, None, 16, 16, device="cpu")
    found = block_mask_on(mask, CPU)
    assert found.mask_mod is not mask.mask_mod
    expected = torch.ones(16, 16, dtype=torch.bool).tril() & (text[:, None] == text)
    assert torch.equal(create_mask(found.mask_mod, 2, 3, 16, 16, device="cpu"), expected.expand(2, 3, 16, 16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["wide_llama", "flux"])
@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flash", "flash_hub", "flex"])
def test_kernels_of_a_gpu(name: str, kind: str) -> None:
    """The model is on the CPU, as before `prepare`. A package that is not installed is a reason, not a failure."""
    model, run, _ = built(kind)
    try:
        found = apply_library_attention(model, name, torch.device("cuda"), torch.bfloat16, run)
    except UsageError as error:
        absent = ("cannot be imported", "could not be loaded", "Please install a compatible version")
        absent += ("ConnectError", "is in offline mode")
        if any(words in str(error) for words in absent):
            pytest.skip(str(error))
        raise
    assert found.name == name
    assert found.kernels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "reason"), [("sdpa_efficient", "No available kernel"), ("flex", "at least 16")])
def test_a_kernel_that_cannot_run_on_a_gpu_is_refused(name: str, reason: str) -> None:
    """Of 8 channels a head, and two heads of queries for each of keys."""
    model, run, _ = built("llama")
    with pytest.raises(UsageError, match=rf"attention {name} .*cannot be used: .*{reason}.*Use auto, sdpa"):
        apply_library_attention(model, name, torch.device("cuda"), torch.bfloat16, run)
