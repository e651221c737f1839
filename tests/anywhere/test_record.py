"""The record of a run over its starts, and the verdict on them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_train.anywhere import record
from accel_train.anywhere.record import Segment


def segment(resumed: int | None, last: int | None, **values: Any) -> Segment:
    made = Segment("ddp on 2 processes", 2, "finished", "a", resumed, last, 60.0)
    return replace(made, **values)


def log(directory: Path, *records: Mapping[str, Any]) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        for entry in records:
            print(json.dumps(entry), file=file)


def train(step: int, loss: float) -> dict[str, Any]:
    return {"event": "train", "step": step, "loss": loss, "time": 0.0}


def test_a_start_is_described_by_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "a"}')
    log(tmp_path, {"event": "environment"}, {"event": "config"}, train(1, 4.0), train(2, 2.0), train(3, 1.0))
    seen = record.Observed.read(tmp_path)
    log(tmp_path, {"event": "environment"}, {"event": "config"}, {"event": "resume", "step": 1})
    log(tmp_path, train(2, 2.0), train(3, 1.5), train(4, 1.0))
    found = record.segment_of(tmp_path, seen, layout="single", processes=1, ended="finished", seconds=3.0)
    assert found == Segment("single", 1, "finished", "a", 1, 4, 3.0, {2: 0.0, 3: 0.5}, reached_before=3)
    # A stop saves between two training lines.
    log(tmp_path, {"event": "checkpoint", "step": 6})
    found = record.segment_of(tmp_path, seen, layout="single", processes=1, ended="finished", seconds=3.0)
    assert found.last_step == 6


def test_a_run_that_overwrites_another_is_described_by_its_own_log(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "old"}')
    log(tmp_path, {"event": "environment"}, train(1, 4.0), train(9, 2.0))
    seen = record.Observed.read(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "run.json").write_text('{"run_id": "new"}')
    log(tmp_path, {"event": "environment"}, train(1, 7.0), train(2, 6.0))
    found = record.segment_of(tmp_path, seen, layout="single", processes=1, ended="finished", seconds=3.0)
    assert found == Segment("single", 1, "finished", "new", 0, 2, 3.0)
    verdict = record.judge([found], "fp32")
    assert (verdict.problems, verdict.steps, verdict.layouts) == ((), 2, ("single",))


def test_what_the_launcher_starts_again_belongs_to_the_same_start(tmp_path: Path) -> None:
    log(tmp_path, {"event": "environment"}, train(1, 4.0))
    seen = record.Observed.read(tmp_path)
    log(tmp_path, {"event": "environment"}, {"event": "resume", "step": 1}, train(9, 2.0))
    log(tmp_path, {"event": "environment"}, {"event": "resume", "step": 8}, train(9, 2.0), train(12, 1.0))
    found = record.segment_of(tmp_path, seen, layout="single", processes=1, ended="finished", seconds=3.0)
    assert (found.resumed_from, found.last_step) == (1, 12)
    fresh = record.segment_of(tmp_path, record.Observed(), layout="single", processes=1, ended="x", seconds=3.0)
    assert (fresh.resumed_from, fresh.last_step) == (0, 12)


def test_a_start_may_continue_from_what_another_command_or_a_killed_start_has_saved(tmp_path: Path) -> None:
    log(tmp_path, {"event": "environment"}, train(1, 4.0), train(30, 3.0))
    # Killed between the commit of the checkpoint and its line.
    (tmp_path / "checkpoints" / "checkpoint_00000032").mkdir(parents=True)
    seen = record.Observed.read(tmp_path)
    log(tmp_path, {"event": "environment"}, {"event": "resume", "step": 32}, train(40, 1.0))
    second = record.segment_of(tmp_path, seen, layout="single", processes=1, ended="finished", seconds=3.0)
    first = segment(0, 10, run_id=second.run_id)
    assert record.judge([first, second], "fp32").problems == ()
    (problem,) = record.judge([first, replace(second, reached_before=30)], "fp32").problems
    assert problem == "start 2 began at step 32, and no start before it got beyond 30"


def test_a_loss_that_is_not_a_number_the_second_time_differs(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "a"}')
    log(tmp_path, {"event": "environment"}, train(1, 4.0), train(2, 3.0))
    seen = record.Observed.read(tmp_path)
    log(tmp_path, {"event": "environment"}, {"event": "resume", "step": 0})
    # As the log has them: JSON knows no NaN.
    log(tmp_path, train(1, 4.0), {**train(2, 3.0), "loss": "NaN"})
    found = record.segment_of(tmp_path, seen, layout="single", processes=1, ended="finished", seconds=3.0)
    assert found.repeated == {1: 0.0, 2: math.inf}
    verdict = record.save(tmp_path, [found], "fp32")
    assert verdict.problems == ("a repeated step has another loss: inf relative, and at most 1e-05 is allowed",)
    # The next start judges again what it reads.
    assert record.judge(record.load(tmp_path), "fp32") == verdict


def test_losses_after_a_rollback_are_not_compared(tmp_path: Path) -> None:
    log(tmp_path, {"event": "environment"}, train(1, 4.0), train(2, 3.0))
    seen = record.Observed.read(tmp_path)
    log(tmp_path, {"event": "environment"}, {"event": "resume", "step": 1}, {"event": "rollback", "step": 3})
    log(tmp_path, {"event": "environment"}, {"event": "resume", "step": 1}, train(2, 9.0), train(4, 1.0))
    found = record.segment_of(tmp_path, seen, layout="single", processes=1, ended="finished", seconds=3.0)
    assert (found.last_step, found.repeated) == (4, {})


def test_a_start_that_failed_early_has_no_steps(tmp_path: Path) -> None:
    log(tmp_path, {"event": "environment"}, train(1, 4.0))
    seen = record.Observed.read(tmp_path)
    found = record.segment_of(tmp_path, seen, layout="single", processes=1, ended="failed", seconds=3.0)
    assert (found.run_id, found.resumed_from, found.last_step, found.repeated) == (None, None, None, {})
    empty = record.Observed.read(tmp_path / "absent")
    assert (empty.starts, empty.losses) == (0, {})


def test_starts_that_follow_each_other_are_one_trajectory() -> None:
    verdict = record.judge(
        [segment(0, 10), segment(None, None), segment(8, 20, layout="single on 1 process", repeated={9: 2e-7})], "fp32"
    )
    assert verdict == record.Verdict((), 20, ("ddp on 2 processes", "single on 1 process"), 1, 2e-7)
    assert record.describe(verdict) == (
        "One trajectory of 20 steps on 2 layout(s); 1 logged step(s) were trained again after a failure, with losses "
        "equal within 2.0e-07."
    )


@pytest.mark.parametrize(
    ("segments", "problem"),
    [
        ([segment(0, 10), segment(15, 20)], "start 2 began at step 15, and no start before it got beyond 10"),
        ([segment(0, 10), segment(0, 20, run_id="b")], "start 2 belongs to another run, b"),
        ([segment(0, 10), segment(8, 20, repeated={9: 1e-3})], "a repeated step has another loss: 1.0e-03"),
        ([segment(0, 10), segment(8, 20, repeated={9: 0.0, 10: math.nan})], "a repeated step has another loss: inf"),
    ],
)
def test_what_is_no_single_trajectory_is_named(segments: list[Segment], problem: str) -> None:
    (found,) = record.judge(segments, "fp32").problems
    assert found.startswith(problem)


def test_in_bf16_a_difference_is_given_and_not_judged() -> None:
    verdict = record.judge([segment(0, 10), segment(8, 20, repeated={9: 1e-3})], "bf16")
    assert (verdict.problems, verdict.largest_difference) == ((), 1e-3)


def test_the_record_is_read_again_but_not_that_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "a"}')
    segments = [segment(0, 10), segment(8, 20, repeated={9: 2e-7})]
    record.save(tmp_path, segments, "fp32")
    assert record.load(tmp_path) == segments
    page = (tmp_path / "report" / "anywhere.md").read_text()
    assert "| 2 | ddp on 2 processes | 8 | 20 | 1.0 | finished |" in page
    (tmp_path / "run.json").write_text('{"run_id": "b"}')
    assert record.load(tmp_path) == []
    (tmp_path / "anywhere.json").write_text('{"segments": [{}]}')
    assert record.load(tmp_path) == []
