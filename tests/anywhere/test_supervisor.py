"""Starts that follow the devices: another layout, a failure, a stop, a run that does not end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from accel_train.anywhere import supervisor
from accel_train.anywhere.flags import Request
from accel_train.anywhere.layouts import Layout, Layouts
from accel_train.anywhere.supervisor import Supervisor
from accel_train.config import UsageError
from accel_train.store import manifest
from tests.waiting import PATIENCE_SECONDS

PRINTED = "output_dir: 'x'  # default\nglobal_batch_size: 4  # default\nprecision: 'fp32'  # default"
WORKER = """
import json, os, pathlib, signal, sys, time

def save(*_):
    sys.exit(75)

action, directory = sys.argv[1], pathlib.Path(sys.argv[2])
signal.signal(signal.SIGTERM, signal.SIG_IGN if action == "deaf" else save)
directory.mkdir(exist_ok=True)
(directory / "run.json").write_text('{"run_id": "new"}')
with (directory / "metrics.jsonl").open("a") as file:
    print('{"event": "environment"}', file=file)
with (directory / "starts").open("a") as file:
    print(action, os.environ.get("ACCEL_TRAIN_STARTED_AGAIN", "first"), file=file)
if action.isdigit():
    sys.exit(int(action))
if action == "saves":
    steps = len(list(directory.glob("checkpoints/*")))
    (directory / "checkpoints" / f"checkpoint_{steps:08d}").mkdir(parents=True)
    sys.exit(1)
time.sleep(1800)
"""


@dataclass
class Scripted:
    """Devices as a function of what has happened."""

    now: Callable[[], int]

    def count(self) -> int:
        return self.now()


@dataclass
class Acting(Supervisor):
    """Starts a small program in the place of a recipe. Each start has its own action, the last one stays."""

    actions: list[str] = field(default_factory=list[str])
    program: Path = Path()
    layouts_used: list[str] = field(default_factory=list[str])

    def _command(self, layout: Layout) -> list[str]:
        self.layouts_used.append(str(layout))
        action = self.actions.pop(0) if len(self.actions) > 1 else self.actions[0]
        return [sys.executable, str(self.program), action, str(self.directory)]


def acting(folder: Path, *actions: str, now: Callable[[], int] = lambda: 2, **options: float) -> Acting:
    program = folder / "worker.py"
    program.write_text(WORKER)
    request = Request("r.py", (), **options)  # type: ignore[arg-type]
    return Acting(
        request,
        Layouts(request, {"global_batch_size": 16}, folder, on_cpu=True),
        Scripted(now),
        supervisor.Stops(),
        folder / "run",
        "fp32",
        actions=list(actions),
        program=program,
    )


def starts(made: Acting) -> list[str]:
    return (made.directory / "starts").read_text().splitlines()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SECONDS_BETWEEN_LOOKS", 0.05)


def test_a_run_that_finishes_is_started_once(tmp_path: Path) -> None:
    made = acting(tmp_path, "0")
    assert made.run() == 0
    assert starts(made) == ["0 first"]
    assert "| 1 | ddp on 2 processes | 0 | 0 |" in (made.directory / "report" / "anywhere.md").read_text()


def test_a_change_of_devices_stops_and_starts_with_another_layout(tmp_path: Path) -> None:
    log = tmp_path / "run" / "starts"
    made = acting(tmp_path, "wait", "0", now=lambda: 1 if log.exists() else 2)
    assert made.run() == 0
    assert made.layouts_used == ["ddp on 2 processes", "single on 1 process"]
    # Once the run is there, --overwrite is obeyed.
    assert starts(made) == ["wait first", "0 1"]
    assert [segment.ended for segment in made.segments] == ["stopped for 1 process(es)", "finished"]


def test_one_look_between_two_numbers_changes_nothing(tmp_path: Path) -> None:
    log = tmp_path / "run" / "starts"
    counts = iter([2, 2, 1, 2, 1, 2, 3, 3])
    made = acting(tmp_path, "wait", "0", now=lambda: next(counts, 3) if log.exists() else 2)
    assert made.run() == 0
    assert made.layouts_used == ["ddp on 2 processes", "ddp on 3 processes"]


def test_without_devices_it_waits(tmp_path: Path) -> None:
    counts = iter([0, 0, 0])
    made = acting(tmp_path, "0", now=lambda: next(counts, 2))
    assert made.run() == 0
    assert made.layouts_used == ["ddp on 2 processes"]


def test_failures_without_a_new_checkpoint_are_limited(tmp_path: Path) -> None:
    made = acting(tmp_path, "3", max_restarts=2)
    assert made.run() == 3
    assert starts(made) == ["3 first", "3 1", "3 1"]


def test_a_new_checkpoint_counts_as_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def committed(folder: Path) -> list[tuple[int, Path]]:
        return [(int(path.name[-8:]), path) for path in sorted(folder.glob("*"))]

    monkeypatch.setattr(manifest, "committed", committed)
    made = acting(tmp_path, "saves", "saves", "saves", "saves", "0", max_restarts=1)
    assert made.run() == 0
    assert len(starts(made)) == 5


@pytest.mark.parametrize("code", [2, 75])
def test_wrong_usage_and_a_stop_of_its_own_are_no_reason_to_start_again(code: int, tmp_path: Path) -> None:
    made = acting(tmp_path, str(code))
    assert made.run() == code
    assert len(starts(made)) == 1


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_stop_of_this_command_is_passed_on(
    overwrites: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = acting(tmp_path, "wait")
    made.request = replace(made.request, arguments=("--overwrite",) * overwrites)

    def now() -> int:
        made.stops.requested = (made.directory / "starts").exists()
        return 2

    made.devices = Scripted(now)
    assert made.run() == 75
    assert [segment.ended for segment in made.segments] == ["stopped"]
    command = "the same command without --overwrite" if overwrites else "the same command"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"accel-train run: stopped, nothing is saved in {made.directory}; {command} continues (exit code 75)"


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_search_for_a_plan_that_a_stop_ends_is_no_wrong_usage(
    is_stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches the search too."""
    made = acting(tmp_path, "0")

    def choose(devices: int) -> Layout:
        made.stops.requested = is_stopped
        raise UsageError(f"no plan for {devices} device(s)")

    monkeypatch.setattr(made.layouts, "choose", choose)
    if is_stopped:
        assert made.run() == 75
    else:
        with pytest.raises(UsageError, match="no plan for 2"):
            made.run()
    assert not made.directory.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_options_are_read_is_no_wrong_usage(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.py"
    # As Ctrl-C in a terminal, which reaches both.
    recipe.write_text(f"import os\nos.kill(os.getppid(), {number:d})\nraise SystemExit(1)\n")
    devices = tmp_path / "devices"
    devices.write_text("2")
    # A shell's `&` ignores Ctrl-C in all that it starts, and so would this test.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert supervisor.run_anywhere(Request(str(recipe), (), devices=str(devices))) == 75
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err.endswith("the same command continues (exit code 75)\n")
    recipe.write_text("raise SystemExit(1)\n")
    with pytest.raises(UsageError, match="does not print its options"):
        supervisor.run_anywhere(Request(str(recipe), (), devices=str(devices)))


def test_a_run_that_does_not_end_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "run" / "starts"
    made = acting(tmp_path, "deaf", "0", now=lambda: 1 if log.exists() else 2, grace_seconds=0.2)
    assert made.run() == 0
    assert [segment.ended for segment in made.segments] == ["killed by signal 9", "finished"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_process_ignores_is_no_stop(number: signal.Signals) -> None:
    """As under nohup, and in the background of a script."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with supervisor.Stops() as stops:
            signal.raise_signal(number)
            assert not stops.requested
            signal.raise_signal(signal.SIGTERM)
            assert stops.requested
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_signals_to_the_command_end_it_with_75(tmp_path: Path) -> None:
    """SIGTERM while it waits for a device: there is nothing to save."""
    (tmp_path / "devices").write_text("0")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"print({PRINTED!r})")
    words = ["run", "--anywhere", "--devices", str(tmp_path / "devices"), str(recipe)]
    command = [sys.executable, "-m", "accel_train.cli", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "accel-train run: 0 device(s), and 1 are required; waiting for more\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 75
