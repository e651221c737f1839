"""Training, finished, stopped, silent, crashed: from files of every kind of end, at times that the test chooses."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.watching.alerts import alerts_of
from accel_train.watching.reading import find_directories, find_directory, read_files
from accel_train.watching.run_files import Condition, MetricsFile, RunFiles
from accel_train.watching.run_state import state_of
from accel_train.watching.status import SHORTEST_SECONDS, UNKNOWN_SECONDS, allowed_seconds, condition_of
from tests.watching.run_directory import BEGIN, RunDirectory, pid_of_the_dead


def read(run: RunDirectory, after: float = 1.0) -> RunFiles:
    """The files as somebody sees them ``after`` seconds behind the last line."""
    return read_files(run.path, MetricsFile(run.file), run.time + after)


def condition(run: RunDirectory, after: float = 1.0) -> Condition:
    return condition_of(read(run, after))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run", evaluation={"every": 20})
    run.steps(1, 10)
    return run


def test_a_run_with_fresh_lines_is_training(run: RunDirectory) -> None:
    assert condition(run) == Condition("training")


@pytest.mark.parametrize(
    ("reason", "status"), [("finished", "finished"), ("stopped", "stopped"), ("RuntimeError", "crashed")]
)
def test_the_end_line_tells_how_a_run_ended(run: RunDirectory, reason: str, status: str) -> None:
    run.add("end", 10, reason=reason)
    found = condition(run, after=1e6)
    assert found.status == status
    assert ("RuntimeError" in found.reason) == (status == "crashed")


def test_weights_that_differ_end_a_run_also_without_an_end_line(run: RunDirectory) -> None:
    run.add("replicas_differ", 11, parameters=["head.weight"], processes=[1])
    found = condition(run)
    assert (found.status, found.reason) == (
        "crashed",
        "the weights of processes [1] differed (head.weight); nothing was saved",
    )


def test_out_of_memory_is_no_crash_while_the_next_start_may_come(run: RunDirectory) -> None:
    run.add("out_of_memory", 11, micro_batch_size=8, next_micro_batch_size=4, process=1)
    # The main process failed in a reduction, and is gone.
    run.add("end", 10, reason="RuntimeError")
    run.lock(pid_of_the_dead(), at=BEGIN)
    found = condition(run)
    assert found.status == "starting"
    assert "step 11 ran out of memory; next micro-batch: 4" in found.reason
    # Nobody started it.
    assert condition(run, after=UNKNOWN_SECONDS).status == "silent"
    # The next start dies before its first line.
    run.lock(pid_of_the_dead(), at=run.time + 1)
    assert condition(run).status == "crashed"
    run.add("environment")
    run.add("end", 10, reason="RuntimeError")
    assert condition(run).status == "crashed"


def test_a_save_that_ran_out_of_memory_is_a_crash(run: RunDirectory) -> None:
    """Nobody starts it again, and the end line of the main process knows only that another one has gone."""
    run.add("out_of_memory", 10, during="save", micro_batch_size=8, process=1)
    run.add("end", 10, reason="RuntimeError")
    assert condition(run) == Condition(
        "crashed", "out of memory at step 10: in the save, process 1; logs/rank_1.log says what can be done"
    )


def test_a_run_without_records_is_known_by_its_checkpoints_alone(tmp_path: Path) -> None:
    """A script that has adopted ``Saver`` and no ``Recorder`` ends well without a line, and is no crash."""
    run = RunDirectory(tmp_path / "run")
    run.file.unlink()
    run.lock(pid_of_the_dead(), at=BEGIN)
    run.checkpoint(60)
    found = read(run, 1e6)
    reason = "no metrics.jsonl: its script has no Recorder, so only its checkpoints are known"
    assert condition_of(found) == Condition("unrecorded", reason)
    state = state_of(found, condition_of(found))
    assert (state.step, state.checkpoint_step, alerts_of(found, state)) == (60, 60, [])
    # Its process is there, however long that takes.
    run.lock(os.getpid(), at=time.time())
    assert condition_of(read(run, 1e6)) == Condition("training", reason)


def test_a_recipe_that_dies_before_its_first_record_has_crashed(tmp_path: Path) -> None:
    """It has a log, which a script without ``Recorder`` has only if it sets one up."""
    run = RunDirectory(tmp_path / "run")
    run.file.unlink()
    run.lock(pid_of_the_dead(), at=BEGIN)
    assert condition(run).status == "unrecorded"
    (run.path / "logs").mkdir()
    assert condition(run).status == "crashed"


def test_the_end_of_an_earlier_start_is_not_that_of_the_run(run: RunDirectory) -> None:
    run.add("end", 10, reason="stopped")
    run.add("environment")
    run.add("resume", 10)
    assert condition(run).status == "starting"
    run.train(11)
    assert condition(run).status == "training"


def test_a_run_is_silent_once_its_own_pace_is_broken(run: RunDirectory) -> None:
    assert condition(run, SHORTEST_SECONDS - 1).status == "training"
    found = condition(run, SHORTEST_SECONDS + 61)
    assert found == Condition("silent", "no line for 3:01; its lines so far suggest at most 2:00")


def test_a_slow_run_may_be_quiet_for_longer(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for step in range(1, 6):
        run.train(step, after=60.0)
    assert allowed_seconds(read(run)) == 600.0
    run.train(6, after=400.0)  # a save that blocked the loop
    assert allowed_seconds(read(run)) == 800.0


def test_a_due_evaluation_may_take_its_time(run: RunDirectory) -> None:
    run.steps(11, 20)
    assert allowed_seconds(read(run)) == UNKNOWN_SECONDS  # none was seen yet
    run.add("evaluation", 20, after=300.0, nll=1.0)
    assert allowed_seconds(read(run)) == SHORTEST_SECONDS
    run.steps(21, 39)
    assert allowed_seconds(read(run)) == SHORTEST_SECONDS
    run.train(40)
    assert allowed_seconds(read(run)) == 600.0


def test_an_evaluation_between_two_log_points_is_expected(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", evaluation={"every": 25}, log={"log_every": 10})
    run.train(10)
    run.train(20)
    assert allowed_seconds(read(run)) == UNKNOWN_SECONDS
    run.add("evaluation", 25, nll=1.0)
    run.train(30)
    assert allowed_seconds(read(run)) == SHORTEST_SECONDS


def test_before_the_first_line_there_is_time_to_load_and_compile(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", collective_timeout_seconds=4000)
    assert condition(run, 3999.0).status == "starting"
    assert condition(run, 4001.0).status == "silent"


def test_the_last_pushes_may_take_as_long_as_they_may(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", hub={"repo_id": "me/x", "finish_minutes": 90.0})
    run.steps(1, 100)
    run.add("evaluation", 100, nll=1.0)
    assert allowed_seconds(read(run)) == 5400.0


def test_a_killed_run_is_known_on_its_own_machine_only(run: RunDirectory) -> None:
    dead = pid_of_the_dead()
    run.lock(dead, at=BEGIN)
    found = condition(run)
    assert found == Condition("crashed", f"process {dead} on {os.uname().nodename} is gone and wrote no end line")
    run.lock(dead, host="elsewhere", at=BEGIN)
    assert condition(run).status == "training"
    run.lock(os.getpid(), at=time.time())  # before the last line, this process had not even begun
    run.time = time.time()
    run.train(11)
    assert condition(run).status == "training"


def test_a_number_that_another_process_has_now_is_not_alive(run: RunDirectory) -> None:
    run.lock(os.getpid(), at=BEGIN)  # years before this process
    assert condition(run).status == "crashed"


def test_a_new_start_is_seen_before_its_first_line(run: RunDirectory) -> None:
    run.add("end", 10, reason="stopped")
    run.lock(os.getpid(), at=time.time())
    run.time = time.time()
    assert condition(run).status == "starting"
    assert condition(run, UNKNOWN_SECONDS + 5).status == "silent"
    run.lock(pid_of_the_dead(), at=time.time())
    assert condition(run).status == "crashed"


def test_a_later_lock_of_a_dead_process_leaves_a_finished_run_finished(run: RunDirectory) -> None:
    """As ``cp -r`` makes it younger, and as a start on it was killed that had no step left."""
    run.add("end", 10, reason="finished")
    run.lock(pid_of_the_dead(), at=run.time + 1e5)
    assert condition(run, after=1e6) == Condition("finished")


def test_another_command_that_held_the_lock_is_no_trainer(run: RunDirectory) -> None:
    (run.path / ".lock").write_text(f"process 1 on {os.uname().nodename} (accel-train checkpoints prune)\n")
    assert read(run).process is None


def test_a_growing_file_is_read_once_and_a_replaced_one_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.steps(1, 3)
    metrics = MetricsFile(run.file)
    assert len(metrics.read()) == 5
    with run.file.open("a") as file:
        file.write('{"event": "train", "step": 4, "lo')
    assert len(metrics.read()) == 5  # torn: the writer is not done
    with run.file.open("a") as file:
        file.write('ss": 1.5}\n{"half\n{"event": "train", "step": 5, "loss": "NaN"}\n')
    assert [record.get("step") for record in metrics.read()][5:] == [4, 5]
    assert str(metrics.read()[-1]["loss"]) == "nan"
    kept = run.file.read_text().splitlines(keepends=True)[:3]
    run.file.with_name("new").write_text("".join(kept))
    run.file.with_name("new").replace(run.file)  # as a start that resumes does
    assert [record.get("step") for record in metrics.read()] == [None, None, 1]
    run.file.with_name("new").write_text('{"event": "train", "step": 2, "loss": 1.0}\n' * 40)
    run.file.with_name("new").replace(run.file)  # already longer than what was read of the one before
    assert len(metrics.read()) == 40
    run.file.unlink()
    assert metrics.read() == []


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "run.json"])
def test_a_run_that_has_only_begun_is_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    files = read_files(find_directory(str(tmp_path)), MetricsFile(tmp_path / "metrics.jsonl"), BEGIN)
    assert condition_of(files).status == "starting"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, says in (("none", "does not exist"), ("file", "is a file"), (".", r"not a run.*it contains file; give")):
        with pytest.raises(UsageError, match=says):
            find_directory(str(tmp_path / place))
    with pytest.raises(UsageError, match=r"run@best: names one checkpoint, .* a whole run; give .*/run$"):
        find_directory(str(tmp_path / "run@best"))


def test_what_is_no_run_is_skipped_among_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`accel-train compare` makes a directory of its own beside the runs."""
    (tmp_path / "compare-now").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    places = [str(path) for path in sorted(tmp_path.iterdir())]
    assert find_directories([*places, places[1]]) == [tmp_path / "run"]
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"skipped: {tmp_path}/compare-now: not a run, which has")
    with pytest.raises(UsageError, match="compare-now: not a run"):
        find_directories(places[:1])
    with pytest.raises(UsageError, match="none: does not exist"):
        find_directories([*places, str(tmp_path / "none")])


def test_a_directory_in_place_of_the_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"metrics\.jsonl: is not a file; a run writes one there: move this away"):
        find_directory(str(tmp_path))


def test_the_length_of_a_run_in_epochs_is_that_of_its_start(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", max_steps=None, max_epochs=3.0)
    assert read(run).max_steps() is None
    # 1,345 samples in batches of 64: ceil(3 * 1345 / 64) = 64
    run.train(7, epoch=7 * 64 / 1345)
    assert read(run).max_steps() == 64
    run.train(8, epoch=8 * 64 / 1280)  # a whole number of steps stays one
    assert read(run).max_steps() == 60
