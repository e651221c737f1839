"""Layers against fp64 formulas, in fp32, under autocast and with bf16 weights."""

import math

import pytest
import torch
from torch import Tensor, nn

from accel_train.domains.models.layers import (
    FeedForward,
    Float32Linear,
    Modulation,
    RMSNorm,
    TimestepEmbedder,
    modulated_norm,
    sinusoid,
    tanh_gelu,
)

BF16_ROUNDING = 2**-8  # half a unit in the last place of bf16, relative


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rms_reference(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def norm_reference(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    x = x.double()
    centred = x - x.mean(dim=-1, keepdim=True)
    normed = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    return normed * (1 + scale.double()) + shift.double()


def test_rms_norm() -> None:
    norm = RMSNorm(48)
    nn.init.normal_(norm.weight)
    x = torch.randn(5, 7, 48) * 3
    torch.testing.assert_close(norm(x).double(), rms_reference(x, norm.weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cast_weights", [False, True])
def test_rms_norm_statistics_are_fp32_under_bf16(cast_weights: bool) -> None:
    """In bf16 a sum of 65,536 squares of equal size stops growing at a few hundred of them."""
    norm = RMSNorm(65536)
    if cast_weights:
        norm.bfloat16()
    x = (torch.rand(2, 65536) + 1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast_weights):
        result = norm(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), rms_reference(x, norm.weight), rtol=BF16_ROUNDING, atol=0)


@pytest.mark.parametrize("cast_weights", [False, True])
def test_layer_norm_statistics_are_fp32_under_bf16(cast_weights: bool) -> None:
    """The mean is 16 times the deviation: in bf16 the difference from the mean loses 4 of its 8 bits."""
    x = (torch.randn(2, 3, 4096) + 16).bfloat16()
    shift, scale = torch.randn(2, 1, 4096) * 0.1, torch.randn(2, 1, 4096) * 0.1
    if cast_weights:
        shift, scale = shift.bfloat16(), scale.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast_weights):
        result = modulated_norm(x, shift, scale)
    expected = norm_reference(x, shift, scale)
    # norm, 1 + scale, their product and the sum are each rounded once
    torch.testing.assert_close(result.double(), expected, rtol=4 * BF16_ROUNDING, atol=4 * BF16_ROUNDING)
    unshifted = modulated_norm(x, torch.zeros_like(shift), torch.zeros_like(scale)).double()
    mean_error = (unshifted - norm_reference(x, torch.zeros(()), torch.zeros(()))).mean(dim=-1).abs().max()
    assert mean_error < 1e-3  # statistics in bf16 shift the whole row by 0.01 and more


def test_sinusoid_closed_form() -> None:
    time = torch.rand(16, dtype=torch.float64)
    frequencies = torch.tensor([10000 ** (-i / 128) for i in range(128)], dtype=torch.float64)
    angles = 1000 * time[:, None] * frequencies
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1)
    result = sinusoid(time.float())
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-4)  # fp32 of an angle near 1000


def test_sinusoid_tells_near_times_apart() -> None:
    """Times 1/32 apart, as a sampler of 32 steps meets them: cosine well below 1 (unscaled: above 0.9999)."""
    features = sinusoid(torch.linspace(0, 1, 33))
    similarity = nn.functional.cosine_similarity(features[1:], features[:-1])
    assert similarity.max() < 0.9
    unscaled = sinusoid(torch.linspace(0, 1, 33) / 1000)
    assert nn.functional.cosine_similarity(unscaled[1:], unscaled[:-1]).min() > 0.9999


@pytest.mark.parametrize("mode", ["fp32", "autocast", "cast"])
def test_time_embeddings_are_fp32(mode: str) -> None:
    embedder = TimestepEmbedder(32)
    if mode == "cast":
        embedder.bfloat16()
    time = torch.rand(9)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        result = embedder(time)
    angles = sinusoid(time).double()
    hidden = nn.functional.silu(angles @ embedder.expand.weight.double().T + embedder.expand.bias.double())
    expected = hidden @ embedder.project.weight.double().T + embedder.project.bias.double()
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_float32_linear_keeps_the_gradient_of_its_weights() -> None:
    layer = Float32Linear(4, 3).bfloat16()
    layer(torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.bfloat16


def test_modulation_is_per_sample() -> None:
    modulation = Modulation(8, 16, parts=6)
    parts = modulation(torch.randn(5, 8))
    assert [part.shape for part in parts] == [(5, 1, 16)] * 6


@pytest.mark.parametrize("tanh", [False, True])
def test_feed_forward(tanh: bool) -> None:
    layer = FeedForward(16, ratio=3, bias=True, tanh_gelu=tanh)
    x = torch.randn(4, 16)
    hidden = x.double() @ layer.expand.weight.double().T + layer.expand.bias.double()
    if tanh:
        inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
        activated = hidden * 0.5 * (1 + torch.tanh(inner))
    else:
        activated = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    expected = activated @ layer.project.weight.double().T + layer.project.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)
    assert layer.expand.weight.shape == (48, 16)


def test_feed_forward_without_bias() -> None:
    assert [name for name, _ in FeedForward(8, 2, bias=False).named_parameters()] == [
        "expand.weight",
        "project.weight",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sigmoid_form_of_the_tanh_gelu(dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, 4001).to(dtype)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    difference = (tanh_gelu(x).double() - expected).norm() / expected.norm()
    assert difference < (1e-6 if dtype is torch.float32 else 4e-3)
    assert tanh_gelu(x).dtype is dtype
