"""CUDA graphs of compiled blocks: replayed in every step, with the numbers of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accel_train.domains.models.layers import FeedForward
from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.speed.compile import apply_compile
from accel_train.speed.options import CompileConfig
from tests.speed.test_compile import batch, loss_of

STEPS = 8


def losses(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = {name: tensor.cuda() for name, tensor in batch().items()}
    found: list[float] = []
    for _ in range(steps):
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at it
@pytest.mark.filterwarnings("ignore:Unable to hit fast path of CUDAGraphs:UserWarning")  # all blocks share their code
def test_graphs_are_replayed_in_every_step() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = MultimodalMMDiT(MultimodalMMDiTConfig(MMDiTConfig(width=64, depth=4, heads=2), 50, 6, 16, 3))
    compiled = copy.deepcopy(plain)
    watch = apply_compile(compiled, CompileConfig("on", optimize="reduce-overhead"), torch.device("cuda"))
    expected = losses(plain, STEPS)
    first = losses(compiled, STEPS // 2)
    with torch.profiler.profile(acc_events=True) as profile:
        rest = losses(compiled, 1)
    assert watch.blocks == 4
    assert first == pytest.approx(expected[: STEPS // 2], rel=1e-4)
    assert rest[0] < first[-1]
    launches = sum("cudaGraphLaunch" in event.name for event in profile.events())
    assert launches == 2 * watch.blocks, launches  # forward and backward of each


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_the_compiled_tanh_gelu_is_that_of_torch() -> None:
    torch.manual_seed(0)
    plain = FeedForward(64, 4, bias=True, tanh_gelu=True).cuda()
    compiled = copy.deepcopy(plain)
    compiled.compile(fullgraph=True, dynamic=False)
    x = 4 * torch.randn(3, 50, 64, device="cuda")
    for layer in (plain, compiled):
        layer(x).square().sum().backward()
    assert torch.allclose(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() < 1e-4 * other.grad.norm()
