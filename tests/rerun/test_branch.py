"""``accel-train branch``: the parent's bits without a change, paired differences with one, and the parent untouched."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest

from accel_train import cli
from accel_train.compare.runs import InterruptedRunError
from accel_train.config import UsageError
from accel_train.rerun import branch, branch_report, changes, recorded, training
from accel_train.rerun.paired import paired_difference
from accel_train.store import commit
from accel_train.store.run_file import write_run
from tests.distributed.launching import ROOT, Finished, Layout, environment, run_recipe
from tests.rerun import recording
from tests.waiting import until


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return recording.record("mmdit", tmp_path_factory.mktemp("recorded") / "run", "--evaluation.every", "4")


def finished(directory: Path) -> Finished:
    return Finished(directory, "", 0)


def assert_same_weights(a: Finished, b: Finished, step: int) -> None:
    for stem in ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        left, right = a.tensors(step, stem), b.tensors(step, stem)
        assert left.keys() == right.keys()
        assert all(left[name].equal(right[name]) for name in left), stem


def test_without_a_change_it_is_the_parent_bit_for_bit(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording.fork_runs(monkeypatch)
    before = recording.tree(run.directory)
    directory = tmp_path / "branch"
    assert cli._main(["branch", str(run.directory), "--at", "7", "--output_dir", str(directory)]) == 0
    assert recording.tree(run.directory) == before
    made = finished(directory)
    assert made.losses() == run.losses()[4:]
    assert_same_weights(made, run, 12)
    output = capsys.readouterr().out
    assert "no checkpoint of step 7: the branch forks at step 4" in output
    assert "control: the recorded run itself" in output
    assert "-> " not in output
    report = json.loads((directory / "report" / branch.BRANCH_FILE).read_text())
    assert {row["metric"] for row in report["differences"]} >= {"loss", "loss_text", "l2t_nll"}
    assert all(row["found"]["equal"] for row in report["differences"])
    # A run of its own, that knows where it comes from.
    parent = recorded.open_run(str(run.directory))
    child = recorded.open_run(str(directory))
    assert child.run_id != parent.run_id
    manifest = run.checkpoint(4) / "manifest.json"
    assert child.saved["parent"] == {
        "run_id": parent.run_id,
        "checkpoint": "checkpoint_00000004",
        "manifest_sha256": commit.hash_file(manifest),
    }


@pytest.mark.slow  # a branch without a change is quick
def test_a_change_a_trained_control_and_going_on(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording.fork_runs(monkeypatch)
    before = recording.tree(run.directory)
    directory = tmp_path / "branch"
    words = ["branch", str(run.directory), "--at", "8", "--steps", "8", "--output_dir", str(directory)]
    words += ["--optimizer.lr", "1e-4", "--schedule.kind", "constant"]
    assert cli._main(words) == 0
    output = capsys.readouterr().out
    assert "optimizer.lr 0.0015 -> 0.0001, schedule.kind 'cosine' -> 'constant'" in output
    assert "-control, because the run logged steps up to 12" in output
    assert f"{directory}/config.yaml --output_dir {directory}\n" in output
    assert recording.tree(run.directory) == before
    lines = finished(directory).train_lines()
    assert sorted(lines) == list(range(9, 17))
    assert {line["lr"] for step, line in lines.items() if step > 8} == {1e-4 * 1.0}
    control = finished(directory.with_name("branch-control"))
    # The schedule of the run has ended there, which a control continues.
    assert control.losses()[:4] == run.losses()[8:]
    # Ordinary: its own command has nothing left to do, and continues where it is asked to.
    config = str(directory / "config.yaml")
    longer = run_recipe(Layout("single", 1), directory, config, "--max_steps", "18", ok=False)
    assert longer.code == 2  # `run_recipe` names a preset first
    again = recording.zygote.run(
        [sys.executable, str(ROOT / "recipes" / "mmdit.py"), config, "--max_steps", "18"], env=environment()
    )
    assert again.returncode == 0, again.stdout[-2000:]
    assert "resuming" in again.stdout
    assert sorted(finished(directory).train_lines()) == list(range(9, 19))


def test_refusals(run: Finished, tmp_path: Path) -> None:
    def refusal(*words: str, directory: Path | None = None) -> str:
        with pytest.raises(UsageError) as refused:
            branch.branch(str(directory or run.directory), words)
        return str(refused.value)

    at = ("--at", "4")
    assert "--at is missing" in refusal()
    assert "no checkpoint at or before that step" in refusal("--at", "3")
    assert "--seed 3: 0 in the run, and a branch cannot change it" in refusal(*at, "--seed", "3")
    assert "--model.width 64: 32 in the run" in refusal(*at, "--model.width", "64")
    assert "--data.max_length 16" in refusal(*at, "--data.max_length", "16")
    assert "--max_steps 5: --steps gives" in refusal(*at, "--max_steps", "5")
    assert "--resume must: a branch begins at" in refusal(*at, "--resume", "must")
    assert "--nope" in refusal(*at, "--nope", "5")
    assert "where the branch begins" in refusal("--at", "12")
    assert "--at 13: " in (said := refusal("--at", "13"))
    assert said.endswith("ends at step 12; give that step or an earlier one")
    assert "is inside the run itself" in refusal(*at, "--output_dir", str(run.directory / "branch"))
    other = recording.copied(run, tmp_path / "other")
    saved = recorded.open_run(str(other.directory)).saved
    parent = {"run_id": saved["run_id"], "checkpoint": "checkpoint_00000004"}
    write_run(other.directory, {**saved, "parent": parent})
    said = refusal(*at, "--optimizer.lr", "0.5", "--output_dir", str(other.directory))
    assert "contains another run (optimizer.lr 0.0015 there, 0.5 now)" in said
    said = refusal("--at", "8", "--output_dir", str(other.directory))
    assert "its parent is" in said


def test_a_branch_of_a_run_that_was_extended_ends_with_it(run: Finished, tmp_path: Path) -> None:
    longer = recording.copied(run, tmp_path / "longer")
    saved = recorded.open_run(str(longer.directory)).saved
    # As a start with a larger --max_steps leaves it: the checkpoints keep the length of their time.
    write_run(longer.directory, {**saved, "experiment": {**saved["experiment"], "max_steps": 20}})
    for place, last in ((run, 12), (longer, 20)):
        assert branch._open_fork(str(place.directory), branch.BranchOptions(at=4), [], tmp_path).last == last


def test_a_branch_that_is_refused_by_its_start_leaves_nothing(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only with its model and optimizer built, after the checkpoint was copied."""
    recording.fork_runs(monkeypatch)
    directory = tmp_path / "branch"
    words = ["--at", "4", "--optimizer.name", "muon", "--output_dir", str(directory)]
    with pytest.raises(UsageError, match="has no place in this optimizer"):
        branch.branch(str(run.directory), words)
    assert not directory.exists()


def test_an_interrupted_branch_has_the_time_to_save(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[float] = []

    def interrupted(command: Sequence[str], log: Path, *, save_seconds: float, **_: object) -> None:
        asked.append(save_seconds)
        raise InterruptedRunError("SIGINT")

    monkeypatch.setattr(training, "run_once", interrupted)
    assert branch.branch(str(run.directory), ["--at", "4", "--output_dir", str(tmp_path / "branch")]) == 1
    assert asked == [branch.SAVE_SECONDS]
    assert "interrupted by SIGINT: the same command continues" in capsys.readouterr().err


def test_what_may_change() -> None:
    recorded_options = {"data.cache_dir": None, "data.path": "a", "optimizer.lr": 1e-3, "seed": 0}
    free = ("data.cache_dir",)
    changes.refuse_unchangeable({"data.cache_dir": "b", "optimizer.lr": 1e-4, "seed": 0}, recorded_options, free)
    with pytest.raises(UsageError, match=r"--data.path b: 'a' in the run"):
        changes.refuse_unchangeable({"data.path": "b"}, recorded_options, free)
    assert changes.label({"optimizer.lr": 3e-4, "optimizer.betas": [0.9, 0.99]}) == "lr-0.0003-betas-0.9-0.99"
    assert changes.label({}) == "unchanged"
    assert changes.directory_name("run", 8, {"seed": 1}) == "run-at8-seed-1"
    # The longest name that a file system takes, of letters of three bytes.
    name = changes.directory_name("験" * 85, 8, {})
    assert name == "験" * 66


def test_a_branch_has_the_batches_that_its_run_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own noise, under another learning rate, would lead to others."""
    recording.fork_runs(monkeypatch)
    run = recording.record("mmdit", tmp_path / "run", *recording.GROWING)
    sizes = [line["global_batch_size"] for _, line in sorted(run.train_lines().items())]
    assert sizes == [4] * 3 + [8] * 3 + [12] * 6
    directory = tmp_path / "branch"
    words = ["branch", str(run.directory), "--at", "4", "--output_dir", str(directory)]
    # A measurement is what the branch no longer makes, so it is refused before anything is trained.
    with pytest.raises(UsageError, match=r"noise_factor: 0.02, batch_schedule.steps \[3, 6\]: either the noise or"):
        cli._main([*words, "--batch_schedule.noise_factor", "0.02"])
    assert "changed from step" not in capsys.readouterr().out
    # The sizes in use may be repeated, and no mean of the gradient is needed without a measurement.
    repeated = ["--batch_schedule.steps", "3", "6", "--batch_schedule.sizes", "8", "12"]
    assert cli._main([*words, *repeated, "--optimizer.betas", "0.0", "0.95"]) == 0
    lines = finished(directory).train_lines()
    assert [line["global_batch_size"] for _, line in sorted(lines.items())] == sizes[4:]
    assert finished(directory).losses() != run.losses()[4:]
    assert "control: the recorded run itself" in capsys.readouterr().out
    options = recorded.open_run(str(directory)).saved["experiment"]
    assert options["batch_schedule.steps"] == [3, 6]
    assert options["batch_schedule.noise_factor"] == 0


def test_the_recipe_may_be_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the other commands, which take it there alone."""
    asked: list[tuple[str, list[str]]] = []

    def branch(run: str, words: list[str]) -> int:
        asked.append((run, words))
        return 0

    monkeypatch.setattr("accel_train.rerun.branch.branch", branch)
    assert cli._main(["branch", "--recipe", "own.py", "runs/a", "--at", "5"]) == 0
    assert cli._main(["branch", "runs/a", "--at", "5", "--recipe", "own.py"]) == 0
    assert asked == [("runs/a", ["--recipe", "own.py", "--at", "5"]), ("runs/a", ["--at", "5", "--recipe", "own.py"])]


def test_words_of_the_command_and_of_the_recipe() -> None:
    words = ["--at", "5", "--optimizer.betas", "0.9", "0.99", "--num-processes=2", "--ema.decay", "0.9"]
    own, others = branch.split_words(words, ["at", "num_processes"])
    assert own == ["--at", "5", "--num-processes=2"]
    assert others == ["--optimizer.betas", "0.9", "0.99", "--ema.decay", "0.9"]


def test_rows_have_the_steps_that_both_have(run: Finished) -> None:
    opened = recorded.open_run(str(run.directory))
    rows = {(row.metric, row.steps): row for row in branch_report.differences(opened, opened, 4, 12)}
    assert rows["loss", (5, 12)].found.a == pytest.approx(fmean(run.losses()[4:]))
    assert rows["loss", (9, 12)].found.count == 4
    # A mode trains one of the terms, so not every line has both.
    assert rows["l2t_nll", (8, 12)].found.count == 2
    text = "\n".join(branch_report.table(list(rows.values()), 4, 12))
    assert "equal bit for bit: " in text
    # With few logged steps, their range alone does not tell the last half from the whole.
    assert re.findall(r"^(loss(?:, last half)?) +(\d+-\d+)", text, re.M) == [
        ("loss", "5-12"),
        ("loss, last half", "9-12"),
    ]


def test_a_table_without_intervals_says_what_they_need() -> None:
    def text(count: int, b: float) -> str:
        found = branch_report.paired_difference([1.0] * count, [b] * count)
        return "\n".join(branch_report.table([branch_report.Row("loss", (1, count), found)], 0, count))

    needs = "an interval needs 20 values"
    assert needs in text(19, 2.0)
    assert needs not in text(20, 2.0)
    assert needs not in text(19, 1.0)  # equal


def test_a_run_that_logs_none_of_the_steps_of_a_branch_is_no_control(run: Finished, tmp_path: Path) -> None:
    """The branch logs its last step, at which the run, which went on, need not have a line."""
    sparse = recording.copied(run, tmp_path / "sparse")
    path = sparse.directory / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [record for record in records if record["event"] != "train" or record["step"] % 4 == 0]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in kept))

    def problem(steps: int, *flags: str) -> str | None:
        options = branch.BranchOptions(at=4, steps=steps)
        return branch._unusable_as_control(branch._open_fork(str(sparse.directory), options, flags, tmp_path))

    assert problem(3) == "the run logged none of the steps 5 to 7 that the branch logs"
    assert problem(4) is None
    assert problem(6) is None
    assert problem(6, "--log.log_every", "3") == "the run logged none of the steps 5 to 10 that the branch logs"
    assert problem(8, "--log.log_every", "3") is None


def test_a_branch_without_common_numbers_has_a_line_in_place_of_its_table() -> None:
    assert "nothing is compared" in "\n".join(branch_report.table([], 4, 7))


@pytest.mark.slow  # the end of an ordinary branch is quick
def test_a_killed_branch_leaves_its_parent_as_it_was_and_goes_on(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recording.tree(run.directory)
    directory = tmp_path / "branch"
    words = ["branch", str(run.directory), "--at", "4", "--steps", "16", "--output_dir", str(directory)]
    command = [sys.executable, "-m", "accel_train.cli", *words, "--optimizer.lr", "1e-4"]

    def steps() -> list[int]:
        return sorted(finished(directory).train_lines()) if (directory / "metrics.jsonl").exists() else []

    with subprocess.Popen(command, env=environment(), cwd=ROOT, start_new_session=True) as child:
        until(lambda: len(steps()) > 6)
        os.kill(child.pid, signal.SIGKILL)
    lock = directory / ".lock"
    until(lambda: _is_free(lock))
    assert recording.tree(run.directory) == before
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert recording.tree(run.directory) == before
    assert steps() == list(range(5, 21))
    recording.fork_runs(monkeypatch)
    whole = tmp_path / "whole"
    assert cli._main([*words[:-1], str(whole), "--optimizer.lr", "1e-4"]) == 0
    assert finished(directory).losses() == finished(whole).losses()
    assert_same_weights(finished(directory), finished(whole), 20)


def _is_free(lock: Path) -> bool:
    import fcntl

    with lock.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


@pytest.mark.slow  # minutes: the figures of docs/replay.md
def test_pairing_narrows_the_interval_of_a_changed_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording.fork_runs(monkeypatch)
    flags = ("--max_steps", "60", "--schedule.kind", "constant", "--schedule.warmup_steps", "5")
    a = recording.record("mmdit", tmp_path / "a", *flags)
    words = ["branch", str(a.directory), "--at", "8", "--optimizer.lr", "5e-4", "--output_dir", str(tmp_path / "b")]
    assert cli._main(words) == 0
    b = finished(tmp_path / "b")
    paired = paired_difference(a.losses()[8:], b.losses())
    # Another seed with the changed rate, as one would compare without a branch.
    other = recording.record("mmdit", tmp_path / "c", *flags, "--optimizer.lr", "5e-4", "--seed", "1")
    unpaired = paired_difference(a.losses()[8:], other.losses()[8:])
    assert paired.half_width is not None
    assert unpaired.unpaired_half_width is not None
    print(f"paired +-{paired.half_width:.3g}, two seeds +-{unpaired.unpaired_half_width:.3g}")
    assert math.isfinite(paired.difference)
    assert paired.half_width * 2 <= unpaired.unpaired_half_width
