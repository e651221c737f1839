"""Checksums of weights, the process unlike the others, and the judgement of slow ones, on numbers."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.training.health import stragglers
from accel_train.training.health.comparing import forward_is_local
from accel_train.training.health.options import HealthConfig, nothing_to_compare
from accel_train.training.health.replicas import COLUMNS, checksums, compare
from accel_train.training.health.stragglers import Measure, Probe, Stragglers, Times, factor_of

NAN = math.nan


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Behind another tensor, on whose end the place of its sums depends."""
    return checksums([torch.ones(3), tensor], torch.device("cpu"))[1]


def test_each_tensor_has_its_own_sum_and_place() -> None:
    a, b, c = torch.rand(7), torch.rand(9000), torch.rand(0)
    cpu = torch.device("cpu")
    usual = checksums([a, b, c, b], cpu).tolist()
    changed = b.clone()
    changed[8500] = 0
    assert [x == y for x, y in zip(usual, checksums([a, changed, c, b], cpu).tolist(), strict=True)] == [1, 0, 1, 1]
    assert usual[1] != usual[3]
    assert usual[2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 8 * COLUMNS, 3 * 8 * COLUMNS + 11])
def test_every_bit_of_a_tensor_counts(dtype: torch.dtype, size: int) -> None:
    tensor = torch.rand(size, generator=torch.Generator().manual_seed(0)).mul(200).to(dtype)
    sums = {int(checksum(tensor))}
    flipped = tensor.clone()
    octets = flipped.view(torch.uint8)
    places = sorted({0, size // 2, size - 1})
    for place, bit in itertools.product(places, range(8 * tensor.element_size())):
        octet = octets[place * tensor.element_size() + bit // 8 :][:1]
        octet ^= 1 << bit % 8
        sums.add(int(checksum(flipped)))
        octet ^= 1 << bit % 8
    assert len(sums) == 1 + len(places) * 8 * tensor.element_size()
    assert int(checksum(flipped)) == int(checksum(tensor.reshape(-1, 1).t()))


def test_changes_do_not_cancel_out() -> None:
    """Two values that change places, in one row, one column or neither, and two signs."""
    tensor = torch.rand(4, 2 * COLUMNS, generator=torch.Generator().manual_seed(0))
    sums = {int(checksum(tensor))}
    for (a, b), (c, d) in (((0, 1), (0, 7)), ((0, 1), (2, 1)), ((0, 1), (3, 5)), ((1, 0), (1, 1))):
        changed = tensor.clone()
        changed[a, b], changed[c, d] = tensor[c, d], tensor[a, b]
        signs = tensor.clone()
        signs[a, b], signs[c, d] = -tensor[a, b], -tensor[c, d]
        sums |= {int(checksum(changed)), int(checksum(signs))}
    assert len(sums) == 9


def test_a_part_of_a_larger_tensor_has_the_same_sum() -> None:
    """Whatever its alignment: DeepSpeed's weights are views of one flat tensor."""
    flat = torch.rand(5000)
    for start in range(4):
        part = flat[start : start + 2222]
        assert int(checksum(part)) == int(checksum(part.clone()))


def test_the_processes_unlike_the_majority() -> None:
    names, hosts = ["a", "b"], [("x", "A100"), ("x", "A100"), ("y", "A100"), ("y", "A100")]
    found = compare(names, [0, 0, 0, 0], [[1, 2], [1, 2], [1, 3], [1, 2]], hosts)
    assert "different devices" not in found.explanation
    assert (found.parameters, found.processes, found.has_majority) == (["b"], [2], True)
    assert "b: process 2 (y) differs from the majority" in found.explanation
    # Two groups of two: shards 0 and 1 of two replicas.
    found = compare(names, [7, 9, 7, 9], [[1, 2], [3, 4], [1, 2], [5, 4]], hosts)
    assert (found.parameters, found.processes, found.has_majority) == (["a"], [1, 3], False)
    assert "processes 1 (x), 3 (y) differ, and no majority shows" in found.explanation
    mixed = compare(names, [0, 0, 0], [[1, 2], [1, 2], [1, 3]], [("x", "A100"), ("x", "A100"), ("y", "H100")])
    assert "The processes compute on different devices (A100, H100)" in mixed.explanation


def test_processes_that_differ_everywhere_have_not_reduced_their_gradients() -> None:
    names = [f"{number}" for number in range(20)]
    mine, other = list(range(20)), list(range(20, 40))
    hosts = [("x", "A100"), ("x", "A100")]
    # One tensor without a gradient is the same.
    everywhere = compare(names, [0, 0], [[7, *mine[1:]], [7, *other[1:]]], hosts).explanation
    assert "must go through prepared.model, not through accelerator.unwrap_model" in everywhere
    assert everywhere.index("prepared.model") < everywhere.index("memory errors")
    assert "check_replicas_every 0" not in everywhere
    flipped = compare(names, [0, 0], [mine, [99, *mine[1:]]], hosts).explanation
    assert "unwrap_model" not in flipped
    assert "check_replicas_every 0" in flipped
    # One of three machines is at fault, however much of it differs.
    assert "unwrap_model" not in compare(names, [0] * 3, [mine, mine, other], [*hosts, hosts[0]]).explanation


def row(step: float = 1.0, **times: float) -> Times:
    return Times(**({"step": step, "data": 0.0, "forward": NAN, "device": 0.01, "host": 0.02} | times))


def test_a_slow_process_is_told_in_its_second_check_and_again_after_it_recovered() -> None:
    judge = Stragglers(1.3)
    fast, slow = [row(), row(), row()], [row(), row(device=0.014), row()]
    told: list[list[int]] = []
    back: list[list[int]] = []
    for rows in (slow, fast, slow, slow, slow, fast, slow, fast, slow, slow):
        found, recovered = judge.judge(rows)
        told.append([each.process for each in found])
        back.append([process for process, _ in recovered])
    assert told == [[], [], [], [1], [], [], [], [], [], [1]]
    # One check alone was none to recover from.
    assert back == [[], [], [], [], [], [1], [], [], [], []]


def test_two_processes_are_compared_with_the_faster() -> None:
    judge = Stragglers(1.3)
    rows = [row(forward=0.4), row(forward=0.1)]
    assert judge.judge(rows)[0] == []
    (found,) = judge.judge(rows)[0]
    assert (found.process, found.measure, found.seconds, found.median_seconds) == (0, "forward", 0.4, 0.1)
    assert found.factor == pytest.approx(4)
    assert found.describe("here", 2).startswith(
        "process 0 (here) is slower than the others, which wait for it: it takes 400 ms per step for the forward, the "
        "median of the 2 processes 100 ms, 4.0 times as long; check"
    )


@pytest.mark.parametrize(
    ("measure", "own", "median", "expected"),
    [
        ("data", 0.5, 0.0, 2.0),  # half of a step of 1 s
        ("data", 0.001, 0.000001, 1.001),  # a thousand times the wait, and nothing of the step
        ("host", 0.3, 0.2, 1.5),
        ("forward", NAN, NAN, 0.0),
    ],
)
def test_factors(measure: Measure, own: float, median: float, expected: float) -> None:
    assert factor_of(measure, own, median, 1.0) == pytest.approx(expected, rel=1e-3)


def test_the_probe_sees_a_slower_device_and_a_slower_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    probe = Probe(device, torch.float32)
    usual = [min(each) for each in zip(*(probe.measure() for _ in range(5)), strict=True)]
    monkeypatch.setattr(stragglers, "PYTHON_ROUNDS", 20 * stragglers.PYTHON_ROUNDS)
    assert probe.measure()[1] > 5 * usual[1]
    multiply = torch.mm

    def slow(*arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return multiply(*arguments, **named)

    monkeypatch.setattr(torch, "mm", slow)
    assert probe.measure()[0] > max(0.01, 2 * usual[0])


def test_a_forward_is_local_under_ddp_without_buffers(tmp_path: Path) -> None:
    """DDP sends buffers before the forward, in which the others wait for process 0."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel
        assert forward_is_local(wrapped(nn.Linear(2, 2)), "ddp")
        assert not forward_is_local(wrapped(nn.BatchNorm1d(2)), "ddp")
        with_buffers = wrapped(nn.BatchNorm1d(2))
        with_buffers.broadcast_buffers = False
        assert forward_is_local(with_buffers, "ddp")
    finally:
        torch.distributed.destroy_process_group()
    assert not forward_is_local(nn.Linear(2, 2), "fsdp2")


def test_comparisons_without_anything_to_compare_are_named() -> None:
    asks = HealthConfig(compare_every=10)
    (notice,) = nothing_to_compare(asks, 1, replicated=False)
    assert notice.startswith("health.compare_every: 10: nothing to compare, this run has one process")
    (notice,) = nothing_to_compare(HealthConfig(check_replicas_every=9), 4, replicated=False)
    assert notice.startswith("health.check_replicas_every: 9: nothing to compare")
    assert not nothing_to_compare(asks, 2, replicated=False)
    assert not nothing_to_compare(HealthConfig(check_replicas_every=9), 2, replicated=True)
    (notice,) = nothing_to_compare(HealthConfig(slow_factor=2), 1, replicated=False)
    assert notice.startswith("health.slow_factor: 2: nothing to compare, this run has one process")
    for quiet in (HealthConfig(), HealthConfig(compare_every=0, check_replicas_every=0)):
        assert not nothing_to_compare(quiet, 1, replicated=False)
    with pytest.raises(UsageError, match=r"health.slow_factor: 2: has no effect with health.compare_every: 0"):
        HealthConfig(slow_factor=2, compare_every=0)
    with pytest.raises(UsageError, match=r"health.slow_factor: 1.0: more than 1 is required"):
        HealthConfig(slow_factor=1.0)
