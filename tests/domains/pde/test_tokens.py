"""Tokens of a grid against torch's own patches and pooling; points against the grid they lie on."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from accel_train.domains.pde.tokens import (
    AnyPointDecoder,
    DecoderShape,
    FieldGrid,
    GridEncoder,
    QueryPoints,
    at_tokens,
    coordinates,
    decoder_multiplications,
    encoder_multiplications,
    query_features,
    wave_features,
    waves,
)

LINE = FieldGrid((1, 24), (1, 4), periodic=True)
SQUARE = FieldGrid((8, 12), (2, 4), (2, 1))
GRIDS = [LINE, FieldGrid((1, 24), (1, 2), (1, 3)), SQUARE, FieldGrid((8, 12), (2, 2), periodic=True)]
SHAPE = DecoderShape(latent_width=16, width=8, head_width=4, layers=2, octaves=3)


def randomised(module: nn.Module, std: float = 0.3) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std, generator=generator)
    return module


def encoder(grid: FieldGrid, channels: int = 2, *, plain: bool = False) -> GridEncoder:
    made = GridEncoder(channels, grid, 16, 3, 3)
    if plain:
        randomised(made.project)
        nn.init.zeros_(made.position.weight)
        nn.init.zeros_(made.position.bias)
    else:
        randomised(made)
    return made


def random_fields(grid: FieldGrid, channels: int = 2, batch: int = 3) -> Tensor:
    return torch.randn(batch, channels, *grid.points, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("grid", GRIDS)
def test_encoder_starts_as_patches_in_a_linear_layer(grid: FieldGrid) -> None:
    made, fields = encoder(grid, plain=True), random_fields(grid)
    patches = F.unfold(fields, grid.patch, stride=grid.patch).mT  # (B, patches, C * p * q)
    tokens = made.project(patches).mT.unflatten(2, [n // p for n, p in zip(grid.points, grid.patch, strict=True)])
    expected = F.avg_pool2d(tokens, grid.merged).flatten(2).mT
    assert expected.shape == (3, math.prod(grid.cells), 16)
    torch.testing.assert_close(made(fields), expected)


def two_convolutions(made: GridEncoder, fields: Tensor, channel: int) -> Tensor:
    """What the stem adds to one channel, by itself."""
    stem, out = made.stem, made.stem_out
    assert stem.bias is not None
    assert out.bias is not None
    own = slice(3 * channel, 3 * channel + 3)
    hidden = F.conv2d(fields[:, channel : channel + 1], stem.weight[own], stem.bias[own], padding=1)
    last = slice(channel, channel + 1)
    return F.conv2d(F.gelu(hidden), out.weight[last], out.bias[last], padding=1)[:, 0]


def test_stem_is_a_residual_convolution_of_each_field() -> None:
    made, fields = encoder(SQUARE, plain=True), random_fields(SQUARE)
    before = made(fields)
    randomised(made.stem)
    randomised(made.stem_out)
    added = torch.stack([two_convolutions(made, fields, c) for c in range(2)], dim=1)
    plain = encoder(SQUARE, plain=True)
    plain.load_state_dict({k: v for k, v in made.state_dict().items() if "stem" not in k}, strict=False)
    torch.testing.assert_close(made(fields), plain(fields + added))
    assert not torch.allclose(before, made(fields), atol=0.1)


@pytest.mark.parametrize("grid", [LINE, FieldGrid((8, 12), (2, 2), periodic=True)])
def test_a_periodic_field_may_begin_anywhere(grid: FieldGrid) -> None:
    made, fields = encoder(grid), random_fields(grid)
    nn.init.zeros_(made.position.weight)
    tokens = made(fields).unflatten(1, grid.cells)
    moved = made(fields.roll(grid.patch, (-2, -1))).unflatten(1, grid.cells)
    shift = [min(1, n - 1) for n in grid.cells]
    torch.testing.assert_close(moved, tokens.roll(shift, (1, 2)))


def test_ends_of_a_domain_are_not_joined() -> None:
    grid = FieldGrid((1, 24), (1, 4))
    made, fields = encoder(grid), random_fields(grid)
    changed = fields.clone()
    changed[..., -1] += 5
    first, second = made(fields), made(changed)
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.equal(first[:, -1], second[:, -1])


def test_tokens_know_their_place() -> None:
    for grid in GRIDS:
        tokens = encoder(grid)(torch.zeros(1, 2, *grid.points))[0]
        inner = [torch.cdist(tokens, tokens)[i, j] for i in range(len(tokens)) for j in range(i)]
        assert torch.stack(inner).min() > 1e-2


def test_coordinates_are_the_middles_of_cells() -> None:
    assert coordinates((4,)).tolist() == [[0.125], [0.375], [0.625], [0.875]]
    assert SQUARE.coordinates().shape == (96, 2)
    rows = SQUARE.coordinates().unflatten(0, SQUARE.points)
    torch.testing.assert_close(rows[2, 7], torch.tensor([2.5 / 8, 7.5 / 12]))
    assert LINE.coordinates().shape == (24, 1)
    torch.testing.assert_close(SQUARE.coordinates(of_tokens=True)[1], torch.tensor([0.25, 0.5]))


@pytest.mark.parametrize("periodic", [False, True])
def test_waves(periodic: bool) -> None:
    x = torch.rand(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = waves(x, 3, periodic)
    assert features.shape == (5, wave_features(2, 3, periodic))
    turn = 2 * math.pi if periodic else math.pi
    expected = [f(turn * 2**k * x[:, d]) for f in (torch.sin, torch.cos) for d in (0, 1) for k in range(3)]
    expected += [] if periodic else [x[:, 0], x[:, 1]]
    torch.testing.assert_close(features, torch.stack(expected, dim=1))
    again = torch.allclose(waves(x + 1, 3, periodic), features)
    assert again == periodic


@pytest.mark.parametrize("grid", [*GRIDS, FieldGrid((1, 100), (1, 4)), FieldGrid((60, 36), (5, 3), periodic=True)])
def test_a_grid_point_lies_in_the_cell_of_its_own_token(grid: FieldGrid) -> None:
    rows, columns = grid.cells
    number = torch.arange(rows * columns, dtype=torch.float32).view(1, 1, rows, columns)
    expected = F.interpolate(number, size=grid.points, mode="nearest").flatten().long()
    _, token = QueryPoints(grid, SHAPE)(grid.coordinates()[None])
    assert torch.equal(token[0], expected)


def test_points_on_the_edges_have_a_token() -> None:
    ends = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
    last = math.prod(SQUARE.cells) - 1
    _, token = QueryPoints(SQUARE, SHAPE)(ends)
    assert token[0].tolist() == [0, last, SQUARE.cells[1] - 1, last - SQUARE.cells[1] + 1]
    points = QueryPoints(LINE, SHAPE)
    randomised(points)
    first, second = points(torch.tensor([[[0.0]]])), points(torch.tensor([[[1.0]]]))
    torch.testing.assert_close(first, second)  # periodic: the same point


def test_at_tokens() -> None:
    x, token = torch.randn(3, 5, 4), torch.tensor([[0, 4, 4], [1, 1, 2], [3, 0, 2]])
    expected = torch.stack([x[b, token[b]] for b in range(3)])
    assert torch.equal(at_tokens(x, token), expected)
    assert torch.equal(at_tokens(x, token[:1]), x[:, token[0]])


def decoder(layers: int = 2) -> AnyPointDecoder:
    made = AnyPointDecoder([LINE, SQUARE], [1, 3], DecoderShape(16, 8, 4, layers, 3))
    randomised(made)
    return made


def tokens_of(grid: FieldGrid, batch: int = 4) -> Tensor:
    return torch.randn(batch, math.prod(grid.cells), 16, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("number", "grid"), [(0, LINE), (1, SQUARE)])
def test_a_point_is_decoded_alike_in_any_company(number: int, grid: FieldGrid) -> None:
    made, tokens, points = decoder(), tokens_of(grid), grid.coordinates()
    whole = made(tokens, points[None], number)
    assert whole.shape == (4, (1, 3)[number], math.prod(grid.points))
    index = torch.randint(0, len(points), (4, 9), generator=torch.Generator().manual_seed(3))
    some = made(tokens, points[index], number)
    torch.testing.assert_close(
        some, whole.gather(2, index[:, None].expand(-1, whole.shape[1], -1)), rtol=1e-4, atol=1e-5
    )
    twice = made(torch.cat((tokens, 2 * tokens)), points[index], number)
    torch.testing.assert_close(twice[:4], some)
    torch.testing.assert_close(twice[4:], made(2 * tokens, points[index], number))


@pytest.mark.parametrize("layers", [0, 1])
def test_what_a_point_sees(layers: int) -> None:
    """Its own token, and with a layer of attention all of them."""
    made, tokens = decoder(layers), tokens_of(SQUARE, 1).requires_grad_()
    made(tokens, torch.tensor([[[0.9, 0.4]]]), 1).sum().backward()
    assert tokens.grad is not None
    seen = tokens.grad[0].abs().sum(-1) > 0
    own = 1 * SQUARE.cells[1] + 1
    assert seen[own]
    assert int(seen.sum()) == (1 if layers == 0 else math.prod(SQUARE.cells))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("queries", [None, 5])
def test_products_equal_the_counter(grid: FieldGrid, queries: int | None) -> None:
    made, coder = AnyPointDecoder([grid], [2], SHAPE), encoder(grid)
    counts: list[int] = []
    for batch in (2, 5):
        tokens, fields = tokens_of(grid, batch), random_fields(grid, 2, batch)
        points = grid.coordinates()[None] if queries is None else torch.rand(batch, queries, grid.dimensions)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            coder(fields)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                made(tokens, points, 0)
        counts.append(counter.get_total_flops())
    expected = 2 * encoder_multiplications(grid, 16, 3) + decoder_multiplications(grid, 2, SHAPE, queries)
    assert counts[1] - counts[0] == 3 * 2 * expected
    assert query_features(grid, 3) == QueryPoints(grid, SHAPE).expand.in_features
