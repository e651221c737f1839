"""The watch for steps that do not end, in one process with limits of milliseconds."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_train.training.health import hangs
from accel_train.training.health.hangs import HangWatch, Place, describe, place_of


def steps(count: int) -> Generator[Any]:
    for done in range(1, count + 1):
        yield SimpleNamespace(done=done)


def answer(logs: Path, process: int, step: int, when: float) -> None:
    place = Place(process, step, f"recipe.py:{process} in main", "all_reduce")
    (logs / f"hang_{process}.json").write_text(json.dumps(place._asdict() | {"time": when}))


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.001)


def test_a_step_that_does_not_end_is_told_once_with_all_stacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = HangWatch(tmp_path, 0, 1, seconds=0.05)
    beside = threading.Event()
    thread = threading.Thread(target=beside.wait, name="reader")
    thread.start()
    for batches in watch.steps(steps(3)):
        if batches.done == 2:
            wait_for(tmp_path / "hang_0.json")
    beside.set()
    thread.join()
    told = [record.getMessage() for record in caplog.records]
    stacks, first, where, remedy = told
    assert stacks.startswith("no step has ended for 0.05 s:\nthread MainThread:\n")
    assert "in wait_for\n" in stacks
    assert "thread reader:\n" in stacks
    assert first == "no step has ended for 0.05 s"
    assert where == f"  process 0 is at {place_line(where)} (step 2)"
    assert "test_hangs.py" in where
    assert "--health.hang_seconds" in remedy


def place_line(where: str) -> str:
    return where.removeprefix("  process 0 is at ").rpartition(" (step")[0]


def test_pauses_do_not_count(tmp_path: Path) -> None:
    looked: list[int] = []

    def is_paused() -> bool:
        looked.append(1)
        return True

    watch = HangWatch(tmp_path, 0, 1, seconds=0.02, is_paused=is_paused)
    for _ in watch.steps(steps(1)):
        while len(looked) < 3 * hangs.LOOKS:  # three times as long as a step may take
            time.sleep(0.001)
    assert not list(tmp_path.iterdir())


def test_a_loop_that_is_left_ends_the_watch(tmp_path: Path) -> None:
    given = HangWatch(tmp_path, 0, 1, seconds=60.0).steps(steps(3))
    next(given)
    assert "hang watch" in [thread.name for thread in threading.enumerate()]
    given.close()
    assert "hang watch" not in [thread.name for thread in threading.enumerate()]


def test_old_and_missing_answers_are_no_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answer(tmp_path, 1, step=2, when=time.time() + 3600)
    answer(tmp_path, 2, step=1, when=time.time() - 3600)
    (tmp_path / "hang_3.json").write_text("{")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hangs, "ANSWER_SECONDS", 0.3)
        for _ in HangWatch(tmp_path, 0, 4, seconds=0.05).steps(steps(1)):
            while not any("rank_N" in record.getMessage() for record in caplog.records):
                time.sleep(0.001)
    told = [record.getMessage() for record in caplog.records][1:]
    assert told[1] == "  no answer from process 2, 3: ended, stopped, or busy outside of Python"
    assert told[2].startswith("  process 0 is at ")
    assert told[3] == "  process 1 waits in all_reduce, at recipe.py:1 in main (step 2)"


def test_processes_behind_and_those_that_compute_come_first() -> None:
    waiting = [Place(process, 7, "loop.py:1 in main", "all_reduce") for process in (0, 3)]
    places = [*waiting, Place(1, 7, "loss.py:2 in loss", ""), Place(2, 6, "loop.py:1 in main", "broadcast")]
    assert [line.split()[1] for line in describe(places, 4, 5.0)[1:]] == ["2", "1", "0", "3"]


def test_the_line_is_that_of_the_caller_of_torch() -> None:
    held = threading.Event()
    thread = threading.Thread(target=lambda: held.wait())
    thread.start()
    try:
        assert thread.ident is not None
        frame = sys._current_frames()[thread.ident]  # pyright: ignore[reportPrivateUsage]
        place = place_of(frame, 3, 8)
    finally:
        held.set()
        thread.join()
    assert (place.process, place.step, place.collective) == (3, 8, "")
    assert "threading.py" in place.line
