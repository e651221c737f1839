"""Compiled blocks on a GPU: graphs that are replayed, layers that are rewritten, rows that are read once."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from accel_train.domains.models.layers import FeedForward, modulated_norm
from accel_train.domains.models.mmdit import MMDiTBlock, MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.speed.compile import apply_compile
from accel_train.speed.inductor import set_heuristics
from accel_train.speed.options import CompileConfig
from tests.speed.test_compile import batch, loss_of

STEPS = 8
WIDTH = 1536


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


class ModulatedNorm(nn.Module):
    """A gated residual and the norm behind it, as in the middle of SD3-medium's blocks."""

    def forward(self, x: Tensor, added: Tensor, vectors: Tensor) -> Tensor:
        gate, shift, scale = vectors.chunk(3, dim=-1)
        return modulated_norm((x + gate * added).float(), shift, scale).to(x.dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_rows_of_1536_are_read_once() -> None:
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch.manual_seed(0)
    shapes = ((4, 1024, WIDTH), (4, 1024, WIDTH), (4, 1, 3 * WIDTH))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    set_heuristics()
    compiled = torch.compile(ModulatedNorm(), fullgraph=True, dynamic=False)
    found, codes = run_fw_bw_and_get_code(lambda: compiled(*inputs))
    forward, backward = codes
    for code in (forward, backward):
        assert any("triton_per" in line and "layer_norm" in line for line in code.splitlines())
        assert not any("triton_red" in line and "layer_norm_backward" in line for line in code.splitlines())
    gate, shift, scale = exact[2].chunk(3, dim=-1)
    expected = modulated_norm(exact[0] + gate * exact[1], shift, scale)
    expected.sum().backward()
    assert (found.double() - expected).norm() < 1e-2 * expected.norm()
    for one, other in zip(inputs, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad.double() - other.grad).norm() < 2e-2 * other.grad.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_block_writes_down_no_activation_in_fp32() -> None:
    from torch._inductor.utils import run_fw_bw_and_get_code

    rows, lengths = 5, (1024, 154)
    set_heuristics()
    config = MMDiTConfig(width=WIDTH, depth=24, heads=24, qk_norm=False, bias=True, tanh_gelu=True)
    with torch.device("cuda"):
        block = MMDiTBlock(config)
        vector = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
        streams = [torch.randn(rows, n, WIDTH, dtype=torch.bfloat16, requires_grad=True) for n in lengths]
    block.compile(fullgraph=True, dynamic=False)

    def output() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return torch.cat(block(streams, vector, None), dim=1)

    _, codes = run_fw_bw_and_get_code(output)
    shapes = "|".join(f"{rows}, {n}|{rows * n}" for n in lengths)
    for code in codes:
        assert "empty_strided_cuda" in code
        assert not re.findall(rf"empty_strided_cuda\(\((?:{shapes}), {WIDTH}\), .*torch.float32\)", code)
