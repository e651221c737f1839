"""The gradient contract on a toy, under every strategy with real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import ROOT, Layout, command, fork

pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests" / "distributed" / "worker.py"
DAILY = ("ddp", "fsdp2")
STRATEGIES = [
    pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in (*DAILY, "zero1", "zero2", "zero3")
]
"""The others run with -m slow, but for the two whole comparisons below."""


def work(layout: Layout, folder: Path, *arguments: str) -> dict[str, Any]:
    done = fork(layout, command(layout, list(arguments), folder, WORKER))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return work(Layout("single", 1), tmp_path_factory.mktemp("alone"), "trajectory")


@pytest.mark.parametrize(
    ("strategy", "processes", "sync"),
    [
        *((s, 2, "auto") for s in (*DAILY, "zero3")),
        ("ddp", 3, "every"),
        # That it reduces once is quick below, and its trajectory in test_foreign_models.py.
        pytest.param("zero2", 2, "last", marks=pytest.mark.slow),
        pytest.param("hsdp", 4, "auto", marks=pytest.mark.slow),
        pytest.param("zero1", 2, "auto", marks=pytest.mark.slow),
        pytest.param("zero2", 2, "auto", marks=pytest.mark.slow),
        pytest.param("zero3", 2, "last", marks=pytest.mark.slow),
    ],
)
def test_every_strategy_equals_one_process(
    strategy: str, processes: int, sync: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    found = work(Layout(strategy, processes), tmp_path, "trajectory", sync)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    for name in ("weights", "exp_avg", "ema", "averaged_output"):
        assert found[name] == pytest.approx(alone[name], rel=1e-5), name
    assert found["inverse"]
    assert found["evaluation_left_no_trace"]


@pytest.mark.parametrize(
    ("strategy", "sync", "expected"),
    [
        ("ddp", "auto", 1),
        ("fsdp2", "auto", 1),
        pytest.param("zero1", "auto", 1, marks=pytest.mark.slow),
        pytest.param("zero2", "auto", 4, marks=pytest.mark.slow),
        pytest.param("zero3", "auto", 4, marks=pytest.mark.slow),
        ("zero2", "last", 1),
        pytest.param("zero3", "last", 1, marks=pytest.mark.slow),
        ("ddp", "every", 4),
    ],
)
def test_gradient_reductions_per_optimizer_step(strategy: str, sync: str, expected: int, tmp_path: Path) -> None:
    """Accumulation 4: reduced elements as a multiple of the parameters. Padding of shards may add a little."""
    found = work(Layout(strategy, 2), tmp_path, "reductions", sync)
    assert found["micro_batches"] == 4
    assert expected <= found["reductions"] < expected * 1.15


@pytest.fixture(scope="module")
def alone_and_frozen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return work(Layout("single", 1), tmp_path_factory.mktemp("frozen"), "frozen")


@pytest.mark.parametrize(
    ("strategy", "sync"),
    [
        ("fsdp2", "auto"),
        # A frozen block in ZeRO's groups is quick in test_foreign_models.py.
        pytest.param("zero3", "auto", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ddp", "auto"), ("zero1", "auto"))),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("zero2", "auto"), ("zero2", "last"))),
    ],
)
def test_frozen_parts_leave_the_norm_alone_under_every_strategy(
    strategy: str, sync: str, alone_and_frozen: dict[str, Any], tmp_path: Path
) -> None:
    """The clip acts in each step. What one process gives by itself: `test_accumulation.py`, by hand."""
    found = work(Layout(strategy, 2), tmp_path, "frozen", sync)
    assert min(found["norms"]) > 1.0
    assert found["norms"] == pytest.approx(alone_and_frozen["norms"], rel=1e-5)
    assert found["weights"] == pytest.approx(alone_and_frozen["weights"], rel=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_stops_every_rank_before_the_optimizer(
    strategy: str, where: str, tmp_path: Path
) -> None:
    found = work(Layout(strategy, 2), tmp_path, "nonfinite", where)
    assert all(m and f"{where} of step 4 is not finite" in m and "rank 1" in m for m in found["messages"])
    assert found["unmoved"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_low_precision_starts_from_the_same_fp32_masters(strategy: str, tmp_path: Path) -> None:
    """DeepSpeed rounds the weights before it copies them: the same seed must not start elsewhere there."""
    found = work(Layout(strategy, 2), tmp_path, "masters")
    assert found == {"equal": True, "types": ["torch.float32"], "computed": "torch.bfloat16"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_cost_no_state_and_no_reduction(strategy: str, tmp_path: Path) -> None:
    """Four of five parameters are frozen. DDP holds everything on both ranks, the others half of it."""
    found = work(Layout(strategy, 2), tmp_path, "trained_bytes", str(tmp_path))
    copies = 2 if strategy == "ddp" else 1
    trained = found["trained"]
    # ZeRO-3 pads a tensor with an odd number of elements.
    assert found["state"] == pytest.approx(2 * copies * trained, abs=64)
    assert found["ema"] == pytest.approx(copies * trained, abs=64)
    # Weights, EMA and two averages, each once over all ranks, and each file aligned.
    assert 4 * trained <= found["snapshot"] <= 4 * trained + 64 * 8
    # FSDP2 pads rows and reduces one shard of each rank; ZeRO its flat groups.
    assert 0 < found["reduced"] <= 2 * trained
