"""The modulated block against attention written out in fp64, and what surrounds it against torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accel_train import rng
from accel_train.domains.models.token_blocks import BlockShape, ModulatedBlock, double, drop_path, halve

SHAPES = [BlockShape(16, 4, 16), BlockShape(16, 4, 8, ffn_ratio=2), BlockShape(16, 4, 4, qk_norm=False)]


def build(shape: BlockShape) -> ModulatedBlock:
    torch.manual_seed(0)
    block = ModulatedBlock(shape)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 7, 16, generator=generator), torch.randn(3, 16, generator=generator)


def written_out(block: ModulatedBlock, x: Tensor, conditioning: Tensor) -> Tensor:
    """Group by group and head by head, in fp64."""
    shape, x = block.shape, x.double()
    modulation = F.linear(
        conditioning.double(), block.modulation.linear.weight.double(), block.modulation.linear.bias.double()
    )
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation[:, None].chunk(6, dim=-1)

    def normal(u: Tensor, by: Tensor, add: Tensor) -> Tensor:
        centred = u - u.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + by) + add

    def unit(u: Tensor, norm: nn.Module) -> Tensor:
        if isinstance(norm, nn.Identity):
            return u
        assert isinstance(norm.weight, Tensor)
        return u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()

    h, attended = normal(x, scale, shift), torch.zeros_like(x)
    for g in range(0, shape.width, shape.group):
        q, k, v = (h[..., g : g + shape.group] @ block.qkv.weight.double().T).chunk(3, dim=-1)
        heads: list[Tensor] = []
        for a in range(0, shape.group, shape.head_width):
            own = slice(a, a + shape.head_width)
            scores = unit(q[..., own], block.q_norm) @ unit(k[..., own], block.k_norm).mT / shape.head_width**0.5
            heads.append(scores.softmax(-1) @ v[..., own])
        attended[..., g : g + shape.group] = torch.cat(heads, dim=-1) @ block.out.weight.double().T
    x = x + gate * attended
    expand, project = block.ffn.expand, block.ffn.project
    hidden = F.gelu(F.linear(normal(x, ffn_scale, ffn_shift), expand.weight.double(), expand.bias.double()))
    return x + ffn_gate * F.linear(hidden, project.weight.double(), project.bias.double())


@pytest.mark.parametrize("shape", SHAPES)
def test_block_equals_its_definition(shape: BlockShape) -> None:
    block, (x, conditioning) = build(shape), inputs()
    torch.testing.assert_close(
        block(x, conditioning, None).double(), written_out(block, x, conditioning), rtol=1e-4, atol=1e-4
    )


def test_groups_attend_apart() -> None:
    """Without the feed-forward layer, a channel of one group never meets another group."""
    block, (x, _) = build(BlockShape(16, 4, 8)), inputs()
    zeros = torch.zeros(3, 1, 16)
    x.requires_grad_()
    block.self_attention(x, zeros, zeros - 1, zeros + 1)[..., :8].sum().backward()  # scale -1: x is not read
    assert x.grad is not None
    assert x.grad[..., 8:].abs().max() == 0
    read = torch.randn_like(x)
    first = block.self_attention(read, zeros, zeros, zeros + 1)
    # LayerNorm is over all channels: a permutation within the second group leaves its statistics as they are.
    second = block.self_attention(torch.cat((read[..., :8], read[..., 8:].flip(-1)), -1), zeros, zeros, zeros + 1)
    torch.testing.assert_close(first[..., :8], second[..., :8])
    assert not torch.allclose(first[..., 8:], second[..., 8:].flip(-1))


def test_a_dropped_block_is_the_identity_for_its_samples_alone() -> None:
    block, (x, conditioning) = build(SHAPES[0]), inputs()
    whole = block(x, conditioning, None)
    torch.testing.assert_close(block(x, conditioning, torch.ones(3)), whole)
    some = block(x, conditioning, torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(some[[0, 2]], whole[[0, 2]])
    assert torch.equal(some[1], x[1])


def test_drop_path_keeps_the_mean_and_the_first_block() -> None:
    draws = rng.uniform(rng.sample_keys(0, "test", 0, torch.arange(20000)), (5,))
    factors = drop_path(draws, 0.4)
    assert factors.shape == (20000, 5)
    assert (factors[:, 0] == 1).all()
    for block, rate in enumerate((0.0, 0.1, 0.2, 0.3, 0.4)):
        kept = factors[:, block]
        assert set(kept.unique().tolist()) <= {0.0, float(torch.tensor(1.0) / (1 - torch.linspace(0, 0.4, 5)[block]))}
        assert abs(float((kept == 0).float().mean()) - rate) < 0.02
        assert abs(float(kept.mean()) - 1) < 0.03
    assert (drop_path(draws, 0.0) == 1).all()
    assert torch.equal(drop_path(draws[7:8], 0.4), factors[7:8])


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_fewer_and_more_tokens_equal_torch(length: int) -> None:
    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    expected = F.avg_pool1d(x.mT, 2, ceil_mode=True).mT
    torch.testing.assert_close(halve(x), expected)
    expected = F.interpolate(x.mT, scale_factor=2, mode="linear", align_corners=False).mT
    torch.testing.assert_close(double(x, 2 * length), expected)
    torch.testing.assert_close(double(x, 2 * length - 1), expected[:, :-1])
    weight = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (double(x, 2 * length), expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_the_counter(shape: BlockShape) -> None:
    block, (x, conditioning) = build(shape), inputs()
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        block(x, conditioning, None)
    assert counter.get_total_flops() == 3 * 2 * shape.multiplications(7)


@pytest.mark.parametrize("shape", SHAPES)
def test_block_compiles_without_graph_breaks(shape: BlockShape) -> None:
    block, (x, conditioning) = build(shape), inputs()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, conditioning, None), block(x, conditioning, None))
    keep = torch.tensor([0.0, 1.0, 2.0])
    torch.testing.assert_close(compiled(x, conditioning, keep), block(x, conditioning, keep))
