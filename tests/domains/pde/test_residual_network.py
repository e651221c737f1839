"""The network that corrects residuals: where its numbers land on the grid, and how it starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_train.domains.models.token_blocks import BlockShape
from accel_train.domains.pde.residual.network import (
    LOG_SIZE_RATE,
    LOG_SIZE_START,
    FieldResidual,
    ResidualGuess,
    ResidualSize,
)
from accel_train.domains.pde.tokens import FieldGrid

GRIDS = [FieldGrid((1, 12), (1, 4), periodic=True), FieldGrid((8, 12), (2, 2), (2, 1)), FieldGrid((4, 4), (2, 2))]
TARGETS, INPUTS = [2, 1, 3], [2, 3, 1]


def network() -> FieldResidual:
    torch.manual_seed(0)
    return FieldResidual(GRIDS, INPUTS, TARGETS, BlockShape(16, 8, 16), depth=2, stem_width=2, octaves=3)


def fields(task: int, size: int = 2) -> ResidualGuess:
    grid, generator = GRIDS[task].points, torch.Generator().manual_seed(1)

    def drawn(channels: int) -> torch.Tensor:
        return torch.randn(size, channels, *grid, generator=generator)

    return ResidualGuess(
        drawn(TARGETS[task]), torch.rand(size, generator=generator), drawn(TARGETS[task]), drawn(INPUTS[task])
    )


@pytest.mark.parametrize("task", range(3))
def test_each_number_of_a_head_is_one_point_of_its_token(task: int) -> None:
    net, grid = network(), GRIDS[task]
    net.start_at_zero()
    head = net.heads[task]
    assert isinstance(head, nn.Linear)
    nn.init.zeros_(head.bias)
    conditioning = torch.zeros(2, 16)
    assert net(fields(task), conditioning, task).abs().max() == 0
    head.bias.data = torch.arange(len(head.bias), dtype=torch.float32)
    rows, columns = (p * m for p, m in zip(grid.patch, grid.merged, strict=True))
    found = net(fields(task), conditioning, task)
    for c in range(TARGETS[task]):
        for i in range(grid.points[0]):
            for j in range(grid.points[1]):
                expected = (c * rows + i % rows) * columns + j % columns
                assert found[:, c, i, j].tolist() == [expected] * 2


@pytest.mark.parametrize("task", range(3))
def test_a_token_speaks_of_where_it_lies(task: int) -> None:
    """Without attention, a change of one token's points changes that token's points alone."""
    net, grid = network(), GRIDS[task]
    for name, parameter in net.named_parameters():  # nor the convolutions before the patches, which look beyond them
        if name.endswith(("out.weight", "stem_out.weight")):
            nn.init.zeros_(parameter)
    rows, columns = (p * m for p, m in zip(grid.patch, grid.merged, strict=True))
    given = fields(task)
    changed = given._replace(guess=given.guess.clone())
    top, left = grid.points[0] - rows, columns  # last row of tokens, second column
    changed.guess[:, :, top : top + rows, left : left + columns] += 1
    both = [net(x, torch.zeros(2, 16), task) for x in (given, changed)]
    moved = (both[0] != both[1]).any(0).any(0)
    assert moved[top : top + rows, left : left + columns].all()
    assert moved.sum() == rows * columns


def test_sizes_belong_to_the_channels_of_a_task() -> None:
    size = ResidualSize(TARGETS)
    size.deviation.data = torch.arange(6.0)
    for task, expected in enumerate(([0, 1], [2], [3, 4, 5])):
        assert size(task).tolist() == [LOG_SIZE_START + LOG_SIZE_RATE * x for x in expected]


@pytest.mark.parametrize("ran", [None, 0, 2])
def test_what_did_not_run_runs_on_zeros(ran: int | None) -> None:
    net = network()
    idle = list(net.idle(ran, torch.zeros(())))
    torch.stack([x.sum() for x in idle]).sum().backward()
    for name, parameter in net.named_parameters():
        kind, _, rest = name.partition(".")
        own = rest.startswith(f"{ran}.") if kind in ("encoders", "heads") else True
        assert (parameter.grad is None) == (ran is not None and own), name
