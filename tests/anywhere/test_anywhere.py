"""Real runs that follow the devices, compared with runs that nothing disturbs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from accel_train.anywhere import supervisor
from accel_train.anywhere.devices import Devices
from accel_train.anywhere.flags import Request
from accel_train.anywhere.layouts import Layouts
from accel_train.anywhere.supervisor import Supervisor
from accel_train.commands.init import init
from accel_train.metrics.records import last_pass, read_metrics
from accel_train.store import manifest
from tests.distributed.launching import DEMOS, LAUNCH_FILES, RECIPE, environment

pytestmark = pytest.mark.distributed


@dataclass
class Following:
    """Devices that change once in each start, when it has saved some steps. Negative: a process is lost first."""

    directory: Path
    first: int
    changes: Sequence[int]
    """Devices from then on, one number for each start but the last."""
    saves: int = 1
    """Steps saved by a start before the change."""
    saved_at_kill: list[int] = field(default_factory=list[int])
    """Step of the newest checkpoint just before each kill."""
    _done: int = 0
    _count: int = 0

    def count(self) -> int:
        if self._done < len(self.changes) and self._is_due():
            self._count = self.changes[self._done]
            self._done += 1
            if self._count < 0:
                self.saved_at_kill.append(self._newest())
                kill_a_worker()
        return abs(self._count or self.first)

    def _is_due(self) -> bool:
        path = self.directory / "metrics.jsonl"
        events = read_metrics(path) if path.is_file() else []
        starts = [number for number, event in enumerate(events) if event["event"] == "environment"]
        if len(starts) != self._done + 1:
            return False
        began = next((event["step"] for event in events[starts[-1] :] if event["event"] == "resume"), 0)
        return self._newest() >= began + self.saves

    def _newest(self) -> int:
        return max((step for step, _ in manifest.committed(self.directory / "checkpoints")), default=-1)


def kill_a_worker() -> None:
    """SIGKILL the youngest of the processes that train, as a lost device does."""
    found = [
        process for process in psutil.Process().children(recursive=True) if "recipe" in " ".join(process.cmdline())
    ]
    max(found, key=lambda process: process.create_time()).kill()


def train(recipe: Path, arguments: Sequence[str], folder: Path, devices: Devices, **request: Any) -> int:
    given = Request(str(recipe), tuple(arguments), **request)
    with supervisor.Stops() as stops:
        layouts = Layouts(given, {"global_batch_size": 16}, folder, on_cpu=True)
        return Supervisor(given, layouts, devices, stops, folder / "run", "fp32").run()


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in last_pass(read_metrics(directory / "metrics.jsonl"), "train")]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SECONDS_BETWEEN_LOOKS", 0.02)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow  # its supervisor has quick tests
def test_a_run_goes_on_with_fewer_devices(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    init(str(tmp_path / "mine"), "mmdit", scaffold=True)
    recipe = tmp_path / "mine" / "recipe.py"
    flags = (
        "--max_steps 150 --global_batch_size 16 --micro_batch_size 2 --checkpoints.save_every 10 --log.log_every 1"
    ).split()

    def follow(changes: Sequence[int], name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        devices = Following(folder / "run", 2, changes)
        assert train(recipe, [*flags, "--output_dir", str(folder / "run")], folder, devices) == 0
        return folder / "run"

    run = follow([1], "changed")
    content = json.loads((run / "anywhere.json").read_text())
    assert [segment["layout"] for segment in content["segments"]] == ["ddp on 2 processes", "single on 1 process"]
    first, second = content["segments"]
    # The stop has saved, so nothing was trained twice.
    assert first["last_step"] == second["resumed_from"] >= 1
    assert second["repeated"] == {}
    assert "One trajectory of 150 steps on 2 layout(s). " in capfd.readouterr().err
    undisturbed = losses(follow([], "undisturbed"))
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)


CHANGES = [2, 1, 4, -4, 1, 2, -2, 4, 1, 4]
STEPS = 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_changes_leave_the_trajectory(tmp_path: Path) -> None:
    preset, small = DEMOS["mmdit"]
    files: list[str] = []
    for processes, strategy in ((1, "ddp"), (2, "ddp"), (4, "fsdp2")):
        path = tmp_path / f"{strategy}_{processes}.yaml"
        path.write_text(f"num_machines: 1\nnum_processes: {processes}\n{LAUNCH_FILES[strategy]}")
        files.append(str(path))
    # Micro-batches of 1 make steps slow, so that few of them pass until a change is seen.
    flags = [preset, *small, *f"--max_steps {STEPS} --micro_batch_size 1 --checkpoints.save_every 1".split()]
    # Differences in the last bit, which a layout makes, grow with every step, by its learning rate.
    flags += ["--optimizer.lr", "1e-4"]

    def run(name: str, devices: Callable[[Path], Following]) -> tuple[Path, Following]:
        folder = tmp_path / name
        folder.mkdir()
        following = devices(folder / "run")
        words = [*flags, "--output_dir", str(folder / "run")]
        assert train(RECIPE, words, folder, following, config_files=tuple(files), rehearse=True) == 0
        return folder / "run", following

    disturbed, following = run("disturbed", lambda directory: Following(directory, 4, CHANGES))
    undisturbed, _ = run("undisturbed", lambda directory: Following(directory, 1, []))
    found, expected = losses(disturbed), losses(undisturbed)
    assert len(found) == STEPS
    print("largest relative difference", max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)))
    assert found == pytest.approx(expected, rel=1e-6)
    content = json.loads((disturbed / "anywhere.json").read_text())
    assert content["verdict"]["problems"] == []
    segments = content["segments"]
    assert len(segments) == 1 + len(CHANGES)
    resumed_after_kill: list[int] = []
    for before, after in itertools.pairwise(segments):
        if "stopped" in before["ended"]:
            assert before["last_step"] == after["resumed_from"], (before, after)
        else:
            resumed_after_kill.append(after["resumed_from"])
    # Nothing is lost that was saved. A save in progress at the kill may have been committed after it.
    assert len(resumed_after_kill) == len(following.saved_at_kill) == 2
    for resumed, saved in zip(resumed_after_kill, following.saved_at_kill, strict=True):
        assert saved <= resumed, (resumed, saved)
    assert content["verdict"]["largest_difference"] < 1e-6
