"""``accel-train monitor``: values and alerts from the lines of a run, the page at any width, JSON, exit codes."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accel_train import cli
from accel_train.config import UsageError
from accel_train.hub.queue import Entry, HubQueue
from accel_train.watching.alerts import Alert, alerts_of
from accel_train.watching.html_report.facts import facts_of
from accel_train.watching.reading import read_files
from accel_train.watching.run_files import MetricsFile
from accel_train.watching.run_state import RunState, gpu_in_words, state_of
from accel_train.watching.status import condition_of
from accel_train.watching.terminal import Terminal, Watched, page, sparkline
from tests.waiting import PATIENCE_SECONDS
from tests.watching.run_directory import BEGIN, RunDirectory, pid_of_the_dead

ROOT = Path(__file__).parents[2]
MODES = {"loss_of": "mode"}


def look(run: RunDirectory, after: float = 1.0, metrics: MetricsFile | None = None) -> Watched:
    files = read_files(run.path, metrics or MetricsFile(run.file), run.time + after)
    state = state_of(files, condition_of(files))
    return Watched(state, alerts_of(files, state))


def state(run: RunDirectory) -> RunState:
    return look(run).state


def kinds(run: RunDirectory, after: float = 1.0) -> list[str]:
    return [alert.kind for alert in look(run, after).alerts]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


# ------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("seconds", ["NaN", "Infinity"])
def test_a_step_time_that_is_not_finite_is_shown_without_the_time_left(
    run: RunDirectory, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train(1, step_seconds=seconds)
    assert state(run).eta_seconds is None
    # 3: the value is an alert.
    assert cli._main(["monitor", str(run.path), "--once"]) == 3
    printed = capsys.readouterr().out
    assert "step_seconds is " in printed
    assert "ETA" not in printed


def test_progress_and_time_left(run: RunDirectory) -> None:
    run.steps(1, 40)
    found = state(run)
    assert (found.step, found.max_steps, found.eta_seconds, found.last_line_seconds) == (40, 100, 30.0, 1.0)
    run.add("end", 40, reason="stopped")
    assert state(run).eta_seconds is None


def test_of_a_repeated_step_the_later_line_counts(run: RunDirectory) -> None:
    run.steps(1, 40, loss=5.0)
    run.add("environment")
    run.add("resume", 20)
    assert state(run).step == 20
    run.steps(21, 30, loss=3.0)
    found = state(run)
    assert found.step == 30
    assert found.losses[0].value == 3.0
    assert found.losses[0].step == 30
    # 30 steps are left, not 50 lines: 20 of the first start and 10 of the second.
    assert found.losses[0].curve == [5.0] * 20 + [3.0] * 10


def test_each_mode_has_its_own_loss(run: RunDirectory) -> None:
    run.add("environment", labels=MODES)
    for step in range(1, 9):
        run.train(step, loss=float(step) if step % 2 else 10.0 * step, mode="a" if step % 2 else "b")
    found = state(run).losses
    assert [(loss.mode, loss.step, loss.value) for loss in found] == [("a", 7, 7.0), ("b", 8, 80.0)]
    assert found[0].curve == [1.0, 3.0, 5.0, 7.0]


def test_a_long_curve_is_made_of_means(run: RunDirectory) -> None:
    for step in range(1, 97):
        run.train(step, loss=float(step))
    assert state(run).losses[0].curve == [2 * index + 1.5 for index in range(48)]


def test_evaluations_have_their_extremes_and_the_best_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", checkpoints={"best_metric": "accuracy", "best_mode": "max"})
    for step, nll, accuracy in ((10, 3.0, 0.2), (20, 1.0, 0.9), (30, 2.0, "NaN"), (40, 2.5, 0.4)):
        run.add("evaluation", step, nll=nll, accuracy=accuracy, eval_seconds=3.0, samples=5)
    nll, accuracy = state(run).metrics
    assert (nll.name, accuracy.name) == ("nll", "accuracy")  # seconds and samples are no results
    assert [(one.value, one.step) for one in (nll.latest, nll.lowest, nll.highest) if one] == [
        (2.5, 40),
        (1, 20),
        (3, 10),
    ]
    assert nll.best is None  # nothing tells whether less is better
    assert accuracy.best is not None
    assert (accuracy.best.value, accuracy.best.step) == (0.9, 20)


def test_throughput_is_of_the_last_start(run: RunDirectory) -> None:
    run.steps(1, 20, samples_per_second=1000.0)
    run.add("environment")
    run.add("resume", 20)
    run.steps(21, 29, samples_per_second=200.0)
    run.train(30, samples_per_second=150.0)
    speed = state(run).speed
    assert speed is not None
    assert (speed.samples_per_second, speed.median_samples_per_second, speed.change) == (150.0, 200.0, -0.25)


def test_memory_by_category_is_of_the_last_start(run: RunDirectory) -> None:
    assert state(run).memory_by_category == {}
    run.add("memory", 1, held_bytes={"weights": 8_000_000_000}, peak_bytes=9)
    run.add("environment")
    assert state(run).memory_by_category == {}
    run.add("memory", 21, held_bytes={"weights": 4_000_000_000, "ema": 512}, host_bytes={"gradients": 7}, peak_bytes=9)
    sizes = {"weights": 4_000_000_000, "ema": 512}
    expected = {"held_bytes": sizes, "host_bytes": {"gradients": 7}, "peak_bytes": 9}
    assert state(run).memory_by_category == expected
    shown = "\n".join(page([Watched(state(run), [])], 0.0, Terminal(50, unicode=False, color=False)))
    assert "weights 4.0 GB, ema 512 B; in host" in shown
    assert "memory gradients 7 B" in shown
    assert "peak" not in shown, "the training lines have a newer one"


def test_memory_and_the_newest_checkpoint(run: RunDirectory) -> None:
    run.train(1, memory_peak_gib=60.5, memory_allocated_gib=40.0)
    assert state(run).memory_gib == {"memory_peak_gib": 60.5, "memory_allocated_gib": 40.0}
    assert state(run).checkpoint_step is None
    run.checkpoint(10)
    run.checkpoint(20, written_at="2023-11-14T22:12:20Z")  # a minute before the run's first line
    found = look(run, after=0.0).state
    assert (found.checkpoint_step, found.checkpoint_seconds) == (20, run.time - BEGIN + 60)
    (run.path / "checkpoints" / "checkpoint_00000020" / "manifest.json").write_text("{")
    assert (state(run).checkpoint_step, state(run).checkpoint_seconds) == (20, None)
    run.checkpoint(30, written_at=None)  # required of no manifest
    assert (state(run).checkpoint_step, state(run).checkpoint_seconds) == (30, None)


# ------------------------------------------------------------------------------------------------------------- alerts
def test_a_healthy_run_has_no_alert(run: RunDirectory) -> None:
    """Losses of five noisy courses, at each of their steps: no false alarm in 1,000 looks."""
    for seed in range(5):
        noise = random.Random(seed)
        one = RunDirectory(run.path / str(seed))
        metrics = MetricsFile(one.file)
        for step in range(1, 201):
            loss = 2 + 6 / (1 + step / 10) + noise.gauss(0, 0.15)
            one.train(step, loss=loss, samples_per_second=100 + noise.gauss(0, 4))
            assert not look(one, metrics=metrics).alerts, (seed, step)


def test_what_is_not_finite_is_an_alert(run: RunDirectory) -> None:
    run.steps(1, 10)
    run.train(11, loss="NaN", grad_norm="Infinity")
    run.train(12, loss="NaN")
    run.add("evaluation", 12, nll="-Infinity")
    assert look(run).alerts == [
        Alert("non_finite", "grad_norm is inf", 11),
        Alert("non_finite", "loss is nan", 11),
        Alert("non_finite", "nll is -inf", 12),
    ]
    run.add("environment")
    run.add("resume", 10)
    run.steps(11, 12)
    run.add("evaluation", 12, nll=1.0)
    assert kinds(run) == []  # the steps were done again


def test_a_converged_loss_may_move_a_little(run: RunDirectory) -> None:
    for step in range(1, 61):
        run.train(step, loss=1.0 + 1e-6 * (step % 3))
    run.train(61, loss=1.19)
    assert kinds(run) == []
    run.train(62, loss=1.21)
    assert kinds(run) == ["loss_spike"]


def test_a_loss_that_was_as_high_before_is_no_spike(run: RunDirectory) -> None:
    run.train(1, loss=9.0)
    run.steps(2, 9, loss=2.0)
    run.train(10, loss=8.9)
    assert kinds(run) == []
    run.train(11, loss=9.1)
    assert kinds(run) == ["loss_spike"]


@pytest.mark.parametrize("at", [12, 60, 95])
def test_a_spike_is_an_alert_for_ten_lines_of_its_mode(run: RunDirectory, at: int) -> None:
    run.add("environment", labels=MODES)
    noise = random.Random(1)
    for step in range(1, 121):
        loss = 3 + noise.gauss(0, 0.1) if step % 2 else 30 + noise.gauss(0, 1)
        if step == at:
            loss *= 2
        run.train(step, loss=loss, mode="a" if step % 2 else "b")
        expected = ["loss_spike"] if at <= step < at + 20 else []
        assert kinds(run) == expected, step
        if step == at:
            (alert,) = look(run).alerts
            assert alert.step == at
            assert f"loss ({'a' if at % 2 else 'b'}) {loss:.4g}, against a median of" in alert.message


def test_a_loss_of_other_terms_is_no_spike(run: RunDirectory) -> None:
    """A stage adds a term, and its loss is compared with those of the stage alone."""
    run.add("environment", labels=MODES)
    noise = random.Random(1)
    for step in range(1, 31):
        first = 1 + noise.gauss(0, 0.02)
        run.train(step, loss=first, loss_encoding=first, mode="a")
        assert kinds(run) == [], step
    for step in range(31, 61):
        second = 9 + noise.gauss(0, 0.2)
        run.train(step, loss=second, loss_encoding=1.0, loss_residual=8.0, mode="a")
        assert kinds(run) == [], step
    run.train(61, loss=18.0, loss_encoding=1.0, loss_residual=17.0, mode="a")
    assert kinds(run) == ["loss_spike"]
    for step in range(62, 71):
        run.train(step, loss=1.0, loss_encoding=1.0, mode="a")
        assert kinds(run) == ["loss_spike"], step
    run.train(71, loss=1.0, loss_encoding=1.0, mode="a")
    assert kinds(run) == []  # ten lines of the mode later, whatever their terms


def test_a_slower_run_is_an_alert_while_it_trains(run: RunDirectory) -> None:
    run.steps(1, 8)
    run.train(9, samples_per_second=20.0)
    assert kinds(run) == []  # the first intervals prove nothing
    run.steps(10, 20)
    run.train(21, samples_per_second=71.0)
    assert kinds(run) == []
    run.train(22, samples_per_second=69.0)
    assert [(alert.kind, alert.message) for alert in look(run).alerts] == [
        ("throughput", "69 samples/s, 31% below the median of this start")
    ]
    run.add("end", 22, reason="finished")
    assert kinds(run) == []


def test_a_missing_checkpoint_is_an_alert(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", checkpoints={"save_every": 10})
    run.steps(1, 20)
    assert kinds(run) == []
    run.train(21)
    assert kinds(run) == ["save"]
    run.checkpoint(10)
    assert kinds(run) == []
    run.steps(22, 31)
    assert "of step 10, with checkpoints.save_every 10" in look(run).alerts[0].message


def test_the_gpu_of_the_newest_line_is_shown(run: RunDirectory) -> None:
    run.train(11, gpu_utilization=0.874, gpu_power_watts=612.4, gpu_temperature_celsius=71, gpu_memory_used_gib=33.0)
    assert gpu_in_words(state(run).gpu) == "87% busy, 612 W, 71 °C"
    assert state(run).memory_gib == {"gpu_memory_used_gib": 33.0}
    run.train(12, gpu_power_watts=300, gpu_throttled="thermal")
    text = "300 W, clock lowered (thermal)"
    (row,) = [line for line in page([look(run)], run.time, Terminal(100, True, False)) if line.startswith("  gpu ")]
    assert row == f"  gpu         {text}"
    assert ("GPU at the last line", text) in facts_of(read_files(run.path, MetricsFile(run.file), run.time), state(run))
    run.train(13)
    assert state(run).gpu == {}


def test_a_slow_process_is_an_alert_until_it_recovers(run: RunDirectory) -> None:
    slow = {"process": 1, "host": "n2"}
    run.add("straggler", 12, **slow, measure="data", factor=2.04, recovered=False)
    run.add("straggler", 12, **slow, measure="host", factor=3.0, recovered=False)
    run.add("straggler", 14, **slow, measure="host", recovered=True)
    run.train(15)
    text = "process 1 (n2) is slower than the others (data): 2.0 times as long"
    assert look(run).alerts == [Alert("straggler", text, 12)]


def test_silence_a_crash_a_warning_and_a_failed_push_are_alerts(run: RunDirectory) -> None:
    run.steps(1, 5)
    assert kinds(run, after=1e4) == ["silent"]
    run.add("warning", 5, message="the disk is nearly full")
    queue = HubQueue(run.path)
    queue.fail(Entry("checkpoint_00000005", 5, "id", "me/model"), "403 Forbidden")
    assert [alert.message for alert in look(run).alerts] == [
        "checkpoint_00000005 was not pushed: 403 Forbidden",
        "the disk is nearly full",
    ]
    run.lock(pid_of_the_dead(), at=BEGIN)
    assert kinds(run) == ["crashed", "push", "warning"]
    run.add("environment")  # a new start: its warnings count
    assert kinds(run)[-1] == "push"


# --------------------------------------------------------------------------------------------------------------- page
def shown(run: RunDirectory, width: int = 80, unicode: bool = True, color: bool = False) -> list[str]:
    return page([look(run)], run.time, Terminal(width, unicode, color))


def rich_run(path: Path) -> RunDirectory:
    run = RunDirectory(path, checkpoints={"best_metric": "nll", "best_mode": "min"})
    run.add("environment", labels=MODES)
    for step in range(1, 41):
        run.train(step, loss=10.0 / step, mode="a-mode-of-a-long-name" if step % 2 else "b", memory_peak_gib=61.25)
    run.add("evaluation", 20, nll=3.0, a_metric_with_a_very_long_name_of_its_own_that_no_terminal_has_room_for=1.0)
    run.add("evaluation", 40, nll=2.0, a_metric_with_a_very_long_name_of_its_own_that_no_terminal_has_room_for=2.0)
    run.train(41, loss="NaN", mode="b", memory_peak_gib=61.25)
    run.checkpoint(40)
    return run


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int, unicode: bool) -> None:
    lines = shown(rich_run(tmp_path / ("deep" * 10) / "run"), width, unicode)
    assert max(map(len, lines)) <= width
    assert all(line.isascii() for line in lines) == (not unicode)


def test_wide_letters_take_two_columns(tmp_path: Path) -> None:
    lines = shown(rich_run(tmp_path / ("实验a\u0301" * 12)), width=60)
    headline = next(line for line in lines if line.startswith("实验"))
    # 12 columns of 5 for each repetition: an accent joins its letter.
    assert headline == ("实验a\u0301" * 12)[: 4 * 11] + "实..."
    assert headline.count("实") * 2 + headline.count("验") * 2 + headline.count("a") + 3 <= 60


def test_the_page_tells_the_values(tmp_path: Path) -> None:
    text = "\n".join(shown(rich_run(tmp_path / "run"), 100))
    for expected in (
        "run: training, last line 0:01 ago",
        "41%  step 41/100  ETA 0:30",
        "a-mode-of-a-long-name 0.2564 at step 39",
        "b nan at step 41",
        "100 samples/s, median 100 (+0%)",
        "memory peak 61.25 GiB",
        "step 40, ",
        "ALERT non_finite at step 41: loss is nan",
    ):
        assert expected in text
    assert re.search(r"nll +2 +2 \(40\) best +3 \(20\)\n", text)


def test_a_curve_reaches_back_to_the_first_step_in_any_width(run: RunDirectory) -> None:
    for step in range(1, 97):
        run.train(step, loss=10.0 if step <= 24 else 1.0)
    for width in (40, 60, 80):
        (line,) = [line for line in shown(run, width) if "1 at step 96" in line]
        curve = line.split()[-1]
        assert len(curve) == min(48, width - 16 - len("1 at step 96"))
        assert curve.count("█") == pytest.approx(len(curve) / 4, abs=1)
        assert curve.endswith("▁")


def test_colors_are_for_terminals_and_control_characters_for_none(run: RunDirectory) -> None:
    run.add("warning", 1, message="\x1b[2Jgone\x07")
    plain = "\n".join(shown(run))
    assert "\x1b" not in plain
    assert "?[2Jgone?" in plain
    colored = "\n".join(shown(run, color=True))
    assert set(re.findall(r"\x1b\[[0-9;]*m", colored)) == {"\x1b[2m", "\x1b[1;33m", "\x1b[1;31m", "\x1b[0m"}
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_sparklines_reach_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 3.5, 7.0], unicode=True) == "▁▅█"
    assert sparkline([7.0, 0.0], unicode=False) == "#_"
    assert sparkline([2.0, 2.0], unicode=True) == "▁▁"
    assert sparkline([1.0], unicode=True) == ""


# ------------------------------------------------------------------------------------------------------------ command
def test_json_is_one_object_with_every_value(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.steps(1, 100)
    run.train(101, loss="NaN")
    run.add("end", 101, reason="finished")
    other = RunDirectory(tmp_path / "other")
    assert cli._main(["monitor", str(run.path), str(other.path), "--json"]) == 3
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    first, second = found["runs"]
    assert (found["alerts"], first["status"], first["step"]) == (2, "finished", 101)
    assert first["alerts"] == [{"kind": "non_finite", "message": "loss is nan", "step": 101}]
    assert math.isnan(float(first["losses"][0]["value"]))
    assert [alert["kind"] for alert in second["alerts"]] == ["silent"]  # its only lines are of 2023


def test_json_of_a_name_that_is_no_text_can_be_printed(tmp_path: Path) -> None:
    name = os.fsdecode(b"l\xe4uft-\xe5\xae\x9f")
    run = RunDirectory(tmp_path / name)
    words = ["-m", "accel_train.cli", "monitor", str(run.path), "--json"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    (found,) = json.loads(done.stdout)["runs"]
    assert found["name"] == name, done.stderr


def test_once_prints_a_page_and_the_code_tells_of_alerts(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.steps(1, 100)
    run.add("end", 100, reason="finished")
    before = {path: path.read_bytes() for path in run.path.rglob("*")}
    assert cli._main(["monitor", str(run.path), "--once"]) == 0
    assert "run: finished" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.path.rglob("*")} == before  # only read
    run.add("evaluation", 100, nll="NaN")
    assert cli._main(["monitor", str(run.path), "--once"]) == 3


def test_wrong_usage_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    for every in ("0", "-1", "nan", "inf", "1e10"):
        says = rf"--every {re.escape(f'{float(every):g}')}: seconds between two pages, above 0 and at most 86400"
        with pytest.raises(UsageError, match=says):
            cli._main(["monitor", str(run.path), "--every", every])
    with pytest.raises(UsageError, match="does not exist; give the directory of a run"):
        cli._main(["monitor", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as left:
        cli._main(["monitor"])
    assert left.value.code == 2


def test_an_encoding_without_blocks_gets_letters(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.steps(1, 10)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    assert cli._main(["monitor", str(run.path), "--once"]) == 3  # silent since 2023
    sys.stdout.flush()
    assert b"##.................." in written.getvalue()


def test_a_disk_that_is_away_for_a_while_does_not_end_the_live_page(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.steps(1, 10)
    away = run.path / "away"

    def between_pages(_: float) -> None:
        if not away.exists():
            run.file.rename(away)
            run.file.mkdir()  # which no read succeeds on
        else:
            run.file.rmdir()
            away.rename(run.file)
            run.add("end", 10, reason="stopped")

    monkeypatch.setattr(time, "sleep", between_pages)
    monkeypatch.setenv("COLUMNS", "400")
    assert cli._main(["monitor", str(run.path)]) == 0
    pages = capsys.readouterr().out.split("\n\n1 run, ")
    assert "as last read, because" in pages[0]
    assert f"{run.path}: cannot be read (Is a directory); mount its disk" in " ".join(pages[0].split())
    assert "run: stopped" in pages[-1]
    run.file.rename(away)
    run.file.mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        look(run)


def test_the_live_page_follows_a_run_to_its_end_in_a_terminal(tmp_path: Path) -> None:
    """In a real terminal of 80 columns: it redraws in place, and ends with the run."""
    run = RunDirectory(tmp_path / "run")
    run.lock(os.getpid())
    side, inner = pty.openpty()
    command = [sys.executable, "-m", "accel_train.cli", "monitor", str(run.path), "--every", "0.05"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment)
    os.close(inner)
    text = ""

    def read_to(expected: str) -> None:
        nonlocal text
        while expected not in text:
            text += os.read(side, 4096).decode(errors="ignore")

    read_to("run: starting")
    run.train(7)
    read_to("step 7/100")
    run.add("end", 7, reason="stopped")
    # The process of the lock began after these lines of 2023, as a start does that has not written any yet.
    (run.path / ".lock").unlink()
    read_to("run: stopped")
    assert process.wait(timeout=PATIENCE_SECONDS) == 0
    os.close(side)
    assert text.startswith("\x1b[2J\x1b[H")
    assert text.count("\x1b[H") > 2
