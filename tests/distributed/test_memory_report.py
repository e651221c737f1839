"""Memory by category of real runs: against closed forms of AdamW in fp32, and the simulation of the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.metrics.records import read_metrics
from tests.distributed.launching import Finished, Layout, run_recipe
from tests.simulation.counting import counted

pytestmark = pytest.mark.distributed

STEPS = ("--max_steps", "2", "--checkpoints.save_every", "2")
FP32 = 4
NAMES = {
    "weights": "parameters",
    "master_weights": "master weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "ema": "EMA",
}
"""Categories of a simulation by those of the event."""
PERSISTENT = 100_000
"""``stage3_param_persistence_threshold`` of DeepSpeed: values of a parameter that is not worth a gather."""


def memory_event(run: Finished) -> dict[str, Any]:
    events = [record for record in read_metrics(run.directory / "metrics.jsonl") if record["event"] == "memory"]
    assert [event["step"] for event in events] == [1]
    return events[0]


def sharded_by_rows(shape: torch.Size, processes: int) -> int:
    """Values of one process under FSDP2: as many rows for each, the last ones padded."""
    return -(-shape[0] // processes) * shape[1:].numel()


@pytest.mark.parametrize(
    "layout",
    # DDP's differs by the gradients alone, which the simulation has as well.
    [
        Layout("fsdp2", 2),
        pytest.param(Layout("single", 1), marks=pytest.mark.slow),
        pytest.param(Layout("ddp", 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_state_and_ema_are_those_of_the_closed_form_and_of_the_simulation(
    layout: Layout, tmp_path: Path
) -> None:
    run = run_recipe(layout, tmp_path / "run", *STEPS)
    held = memory_event(run)["held_bytes"]
    shapes = [tensor.shape for tensor in run.tensors(2, "model").values()]
    processes = layout.processes if layout.strategy == "fsdp2" else 1
    weights = FP32 * sum(sharded_by_rows(shape, processes) for shape in shapes)
    expected = {
        "weights": weights,
        "gradients": weights,
        "optimizer_state": 2 * weights + FP32 * len(shapes),  # and a count of steps for each parameter
        "ema": weights,
    }
    print(layout, held)
    assert held == expected
    whole = FP32 * sum(shape.numel() for shape in shapes)
    assert held["weights"] * processes == pytest.approx(whole, rel=0.01)
    fake = counted(layout, tmp_path)["held"]
    assert {name: fake[theirs] for name, theirs in NAMES.items() if name in held} == held


@pytest.mark.parametrize(
    "layout",
    [
        # tests/simulation counts both of a real run of stage 1 every day, and has the closed forms of stage 3.
        pytest.param(Layout("zero3", 2), marks=pytest.mark.slow),
        pytest.param(Layout("zero2_offload", 2), marks=pytest.mark.slow),
        pytest.param(Layout("zero1", 2), marks=pytest.mark.slow),  # stage 2 without its offload
        pytest.param(Layout("zero3_offload", 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_zero_holds_masters_beside_the_weights_of_the_forward(layout: Layout, tmp_path: Path) -> None:
    run = run_recipe(layout, tmp_path / "run", *STEPS)
    held = memory_event(run)["held_bytes"]
    sizes = [tensor.numel() for tensor in run.tensors(2, "model").values()]
    whole = sum(sizes)
    weights: float = whole
    if layout.strategy.startswith("zero3"):
        # Small parameters stay gathered, beside their shards.
        weights = whole / 2 + sum(size for size in sizes if size <= PERSISTENT)
    expected = {
        "weights": FP32 * weights,
        "master_weights": FP32 * whole / 2,
        "gradients": FP32 * whole / 2,
        "optimizer_state": 2 * FP32 * whole / 2,
        "ema": FP32 * whole / 2,
    }
    print(layout, whole, held)
    fake = counted(layout, tmp_path)
    # The event has one memory, the CPU's.
    both = {name: fake["held"].get(name, 0) + fake["host"].get(name, 0) for name in NAMES.values()}
    # Beside the weights, DeepSpeed has a buffer on the host for those on their way to the device.
    margin = FP32 * whole / 2 if layout.strategy == "zero2_offload" else 0
    assert both.pop("parameters") == pytest.approx(held["weights"] + margin, rel=0.001)
    # The event counts what the optimizer steps on, and the simulation DeepSpeed's partitions beside it as well.
    assert both.pop("gradients") >= held["gradients"]
    assert both == {theirs: held[name] for name, theirs in NAMES.items() if theirs in both}
    gradients = held.pop("gradients")
    # Without an offload, those of a group are made when the optimizer steps on it: nine tenths are in the first.
    assert gradients == pytest.approx(expected.pop("gradients"), rel=0.05)
    # Flat groups are padded to equal parts.
    assert held == pytest.approx(expected, rel=0.001)
