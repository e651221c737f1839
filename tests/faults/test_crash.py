"""Processes killed at every place of a save: nothing acknowledged is lost, nothing torn is used, no bit differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_train.store import failpoints
from tests.faults.harness import EVERY, Trainers, acknowledged, checkpoints, debris, losses, same_run

SYNC = ("--checkpoints.asynchronous", "false")
MODES = pytest.mark.parametrize("mode", [(), SYNC], ids=["async", "sync"])
QUICK_MODES = pytest.mark.parametrize(
    "mode", [pytest.param((), id="async"), pytest.param(SYNC, id="sync", marks=pytest.mark.slow)]
)
"""The same code writes in either mode: one process is killed in both, amid all of a save, by quick tests."""
AFTER_THE_ANSWER = ("before_retention", "before_rmtree")
AFTER_THE_RENAME = ("after_rename", "after_commit", *AFTER_THE_ANSWER)


def survives(trainers: Trainers, out: Path, whole: Path, *arguments: str, failpoint: str, at: int = 10) -> None:
    """Save step 5, kill at ``failpoint`` during the save of step ``at``, look, start again, compare with ``whole``."""
    ranks = 2 if "two" in whole.parent.name else 1
    flags = (*EVERY, *arguments)
    trainers.stopped(out, 5, ranks)
    codes = trainers.run(out, *flags, ranks=ranks, failpoint=failpoint).wait()
    assert -9 in codes
    assert all(code in (-9, 1) for code in codes), "a process went on without the one that was killed"
    committed = failpoint.split("@")[0] in AFTER_THE_RENAME
    newest = at if committed else at - 5
    assert checkpoints(out) == ([newest - 5, newest] if committed else [newest])
    told = [s for s in (5, 10, 15) if s < at]
    late = failpoint.split("@")[0] in AFTER_THE_ANSWER  # the writer has answered: the trainer may have said it or not
    assert acknowledged(out) in ([told, [*told, at]] if late else [told]), "told that it was saved before it was"
    again = trainers.run(out, *flags, ranks=ranks)
    assert set(again.wait()) == {0}, again.output()
    assert f"at step {newest}" in again.output()
    assert debris(out) == []
    assert checkpoints(out) == [15, 20]
    same_run(out, whole)


PLACES = [
    pytest.param(
        "after_mkdir",
        marks=pytest.mark.fault(
            "F1",
            injected="SIGKILL after the temporary directory is made",
            outcome="ignored; resumes from the previous checkpoint",
        ),
    ),
    pytest.param(
        "after_model_file",
        marks=[
            pytest.mark.slow,  # one file further than amid it
            pytest.mark.fault(
                "F2",
                injected="SIGKILL after the weights, before the rest",
                outcome="not committed; resumes from the previous checkpoint",
            ),
        ],
    ),
    pytest.param(
        "mid_file",
        marks=pytest.mark.fault(
            "F2",
            injected="SIGKILL in the middle of a file",
            outcome="not committed; resumes from the previous checkpoint",
        ),
    ),
    pytest.param(
        "mid_manifest",
        marks=pytest.mark.fault(
            "F4",
            injected="SIGKILL in the middle of the manifest",
            outcome="not committed; resumes from the previous checkpoint",
        ),
    ),
    pytest.param(
        "before_rename",
        marks=pytest.mark.fault(
            "F5",
            injected="SIGKILL before the rename",
            outcome="not committed; resumes from the previous checkpoint",
        ),
    ),
    pytest.param(
        "after_rename",
        marks=pytest.mark.fault(
            "F6",
            injected="SIGKILL after the rename, before retention",
            outcome="resumes from the new one; retention runs at the next save",
        ),
    ),
]
SYNC_EVERY_DAY = ("mid_file",)


def cases() -> list[Any]:
    """Each place in both modes. Slow: the same code writes in either mode."""
    return [
        pytest.param(
            *place.values,
            mode,
            id=f"{'sync' if mode else 'async'}-{place.values[0]}",
            marks=[*place.marks, *([pytest.mark.slow] if mode and place.values[0] not in SYNC_EVERY_DAY else [])],
        )
        for place in PLACES
        for mode in ((), SYNC)
    ]


@pytest.mark.parametrize(("failpoint", "mode"), cases())
def test_one_process(trainers: Trainers, out: Path, whole: Path, failpoint: str, mode: tuple[str, ...]) -> None:
    survives(trainers, out, whole, *mode, failpoint=failpoint)


@pytest.mark.fault(
    "F6", injected="SIGKILL after the rename when two are kept", outcome="three remain; retention runs at the next save"
)
@pytest.mark.slow  # one checkpoint more than after the rename, above, which leaves two
@MODES
def test_killed_before_retention_leaves_one_more(
    trainers: Trainers, out: Path, whole: Path, mode: tuple[str, ...]
) -> None:
    trainers.stopped(out, 10)
    assert trainers.run(out, *EVERY, *mode, failpoint="before_retention").wait() == [-9]
    assert checkpoints(out) == [5, 10, 15]
    assert trainers.run(out, *EVERY, *mode).wait() == [0]
    assert checkpoints(out) == [15, 20]
    same_run(out, whole)


@pytest.mark.fault(
    "F7",
    injected="SIGKILL while an old checkpoint is deleted",
    outcome="its remains are deleted; the other checkpoints are intact",
)
@QUICK_MODES
def test_killed_while_deleting(trainers: Trainers, out: Path, whole: Path, mode: tuple[str, ...]) -> None:
    killed = trainers.run(out, *EVERY, *mode, failpoint="before_rmtree")
    assert killed.wait() == [-9]
    assert checkpoints(out) == [10, 15]
    trash = [name for name in debris(out) if not name.startswith(".tmp-checkpoint_00000020")]
    assert [name.split("-")[1] for name in trash] == ["checkpoint_00000005"]
    assert trash[0].startswith(".trash-")
    assert trainers.run(out, *EVERY, *mode).wait() == [0]
    assert debris(out) == []
    same_run(out, whole)


@pytest.mark.fault(
    "F3", injected="SIGKILL of rank 1 after its share", outcome="rank 0 fails within the timeout; not committed"
)
@QUICK_MODES
def test_one_of_two_processes(trainers: Trainers, out: Path, whole_of_two: Path, mode: tuple[str, ...]) -> None:
    survives(trainers, out, whole_of_two, *mode, failpoint="after_optimizer_file@1")


@pytest.mark.slow
@pytest.mark.fault("F8", injected="SIGKILL at every place of a save, 1 and 2 processes", outcome="as F1 to F7")
@pytest.mark.parametrize("ranks", [1, 2])
@MODES
@pytest.mark.parametrize("name", failpoints.NAMES)
def test_every_place(
    trainers: Trainers, out: Path, request: pytest.FixtureRequest, name: str, mode: tuple[str, ...], ranks: int
) -> None:
    whole = request.getfixturevalue("whole" if ranks == 1 else "whole_of_two")
    at = 15 if name == "before_rmtree" else 10
    survives(trainers, out, whole, *mode, failpoint=f"{name}@0", at=at)


# ------------------------------------------------------------------------------------------------ where a run may stop
def stopped_at(trainers: Trainers, out: Path, *steps: int, every: tuple[str, ...] = EVERY) -> None:
    """Run to each of ``steps`` in turn, a process each, and then to step 20."""
    for step in (*steps, 20):
        ended = trainers.run(out, *every, "--max_steps", str(step))
        assert ended.wait() == [0], ended.output()
        assert checkpoints(out)[-1] == step


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(
            12,
            marks=pytest.mark.fault(
                "F46", injected="stop at an epoch's end", outcome="the same bits as an uninterrupted run"
            ),
        ),
        pytest.param(
            7,
            marks=[
                pytest.mark.slow,  # three interruptions in one epoch are below
                pytest.mark.fault(
                    "F46", injected="stop amid an epoch", outcome="the same bits as an uninterrupted run"
                ),
            ],
        ),
        pytest.param(
            1,
            marks=[
                pytest.mark.slow,  # a checkpoint of step 0 and one of step 2 are below
                pytest.mark.fault(
                    "F46", injected="stop after the first step", outcome="the same bits as an uninterrupted run"
                ),
            ],
        ),
    ],
)
def test_stop_anywhere(trainers: Trainers, out: Path, whole: Path, step: int) -> None:
    stopped_at(trainers, out, step)
    same_run(out, whole)


@pytest.mark.fault(
    "F46", injected="stop at the last step, then more steps", outcome="the same bits as an uninterrupted run"
)
def test_stop_at_the_last_step(trainers: Trainers, out: Path, whole: Path) -> None:
    stopped_at(trainers, out)
    again = trainers.run(out, *EVERY)
    assert again.wait() == [0]
    assert "at step 20" in again.output()
    assert trainers.run(out, *EVERY, "--max_steps", "30").wait() == [0]
    straight = out.with_name("straight")
    assert trainers.run(straight, *EVERY, "--max_steps", "30").wait() == [0]
    same_run(out, straight, 30)
    assert {s: x for s, x in losses(out).items() if s <= 20} == losses(whole)


@pytest.mark.fault(
    "F46", injected="a checkpoint of step 0, before any update", outcome="the same bits as an uninterrupted run"
)
def test_a_checkpoint_of_step_0(trainers: Trainers, out: Path, whole: Path) -> None:
    killed = trainers.run(out, *EVERY, "--save_first", "true", "--raise_at", "0")
    assert killed.wait() == [1]
    assert checkpoints(out) == [0]
    again = trainers.run(out, *EVERY)
    assert again.wait() == [0], again.output()
    assert "at step 0" in again.output()
    same_run(out, whole)


@pytest.mark.fault("F46", injected="SIGTERM between two micro-batches", outcome="the step is finished, then saved")
def test_stop_amid_accumulation(trainers: Trainers, out: Path, whole: Path) -> None:
    patch = """
import os, signal
from accel_train.training import accumulation
original, calls = accumulation.GradientWindow.backward, []
def backward(self, *arguments, **options):
    original(self, *arguments, **options)
    calls.append(1)
    if len(calls) == 15:  # the first of two micro-batches of step 8
        os.kill(os.getpid(), signal.SIGTERM)
accumulation.GradientWindow.backward = backward
"""
    assert trainers.run(out, *EVERY, patch=patch).wait() == [75]
    assert checkpoints(out) == [5, 8]
    assert trainers.run(out, *EVERY).wait() == [0]
    same_run(out, whole)


@pytest.mark.fault("F47", injected="three interruptions in one epoch", outcome="the same bits as an uninterrupted run")
def test_three_interruptions_in_one_epoch(trainers: Trainers, out: Path, whole: Path) -> None:
    stopped_at(trainers, out, 2, 3, 11)
    same_run(out, whole)


@pytest.mark.slow  # three interruptions are quick above, and so is a SIGKILL of two processes
@pytest.mark.fault(
    "F47", injected="three SIGKILLs in one epoch, 2 processes", outcome="the same bits as an uninterrupted run"
)
def test_three_kills_in_one_epoch(trainers: Trainers, out: Path, whole_of_two: Path) -> None:
    flags = ("--checkpoints.save_every", "2", "--checkpoints.keep_last", "2", "--step_seconds", "0.02")
    for step in (3, 6, 10):
        run = trainers.start(out, *flags, ranks=2)
        run.until_step(step)
        run.kill()
        run.wait()
    assert trainers.run(out, *EVERY, ranks=2).wait() == [0, 0]
    same_run(out, whole_of_two)
