"""When evaluations that bring nothing better end a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from accelerate import Accelerator

from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.config import UsageError
from accel_train.metrics.early_stopping import EarlyStopping
from accel_train.metrics.records import LineWriter


def ended(early: EarlyStopping, *values: float, start: int = 1) -> list[bool]:
    return [early.ended(step, {"error": value}) for step, value in enumerate(values, start)]


def logged(directory: Path, *evaluations: tuple[int, float]) -> None:
    writer = LineWriter(directory / "metrics.jsonl")
    for step, value in evaluations:
        writer.write({"event": "evaluation", "step": step, "error": value})


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_a_run_ends_when_it_stops_getting_better(accelerator: Accelerator) -> None:
    assert ended(EarlyStopping(accelerator, 2, "error"), 0.5, 0.4, 0.45, 0.41) == [False, False, False, True]
    highest = EarlyStopping(accelerator, 2, "error", "max")
    assert ended(highest, 0.1, 0.4, 0.45, 0.45, 0.2) == [False, False, False, False, True]
    assert highest.exhausted


def test_the_step_of_the_best_is_named(accelerator: Accelerator, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ended(EarlyStopping(accelerator, 2, "error"), 0.5, 0.4, 0.45, 0.4)
    assert "no better error for 2 evaluations: the run ends. The best was that of step 2; RUN@best" in caplog.text


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_evaluation_that_is_not_a_number_is_never_the_best(mode: str, accelerator: Accelerator) -> None:
    early = EarlyStopping(accelerator, 2, "error", mode)
    better = 0.5 if mode == "min" else 1.5
    assert ended(early, math.nan, 1.0, better, math.nan, better) == [False] * 4 + [True]


def test_a_resumed_run_knows_its_earlier_evaluations(tmp_path: Path, accelerator: Accelerator) -> None:
    logged(tmp_path, (10, 0.5), (20, 0.4), (30, 0.45), (40, 0.1))
    early = EarlyStopping(accelerator, 2, "error")
    early.resume(tmp_path, 30)  # what lies beyond step 30 is done again
    assert not early.exhausted
    assert ended(early, 0.42, start=40) == [True]


def test_a_run_that_has_ended_says_how_it_continues(tmp_path: Path, accelerator: Accelerator) -> None:
    logged(tmp_path, (10, 0.5), (20, 0.6))
    early = EarlyStopping(accelerator, 1, "error")
    early.resume(tmp_path, 20)
    assert early.exhausted
    says = "ended at step 20: no better error for 1 evaluations; give more --checkpoints.patience"
    assert says in early.notice(20)


def test_a_foreign_line_in_the_log_does_not_stop_a_resume(tmp_path: Path, accelerator: Accelerator) -> None:
    LineWriter(tmp_path / "metrics.jsonl").write({"note": "by hand"}, {"event": "evaluation", "step": 10, "error": 0.5})
    early = EarlyStopping(accelerator, 1, "error")
    early.resume(tmp_path, 30)
    assert ended(early, 0.6, start=40) == [True]


def test_evaluations_before_the_last_stage_do_not_count(tmp_path: Path, accelerator: Accelerator) -> None:
    logged(tmp_path, (10, 0.1), (20, 0.1), (30, 0.1), (40, 0.1))
    early = EarlyStopping(accelerator, 2, "error", after=30)
    early.resume(tmp_path, 40)
    assert not early.exhausted
    assert not early.ended(30, {"error": 0.2})
    assert [early.ended(step, {"error": 0.2}) for step in (50, 60)] == [False, True]


def test_patience_needs_a_metric_and_evaluations() -> None:
    with pytest.raises(UsageError, match=r"checkpoints.patience: 3: has no effect without checkpoints.best_metric"):
        CheckpointConfig(patience=3)
    policy = CheckpointConfig(patience=3, best_metric="heldout_loss")
    with pytest.raises(UsageError, match=r"checkpoints.patience: 3: has no effect with evaluation.every: 0"):
        policy.refuse_single_evaluation(0)
    policy.refuse_single_evaluation(10)
