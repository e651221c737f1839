"""Evaluations that fail, hang or are stopped lose nothing, and their metrics join the checkpoint of their step."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_train.checkpoints.run import OWED
from accel_train.metrics.records import read_metrics
from accel_train.store import commit, manifest, run_file
from tests.faults.evaluator import INSTEAD
from tests.faults.harness import Trainers, checkpoints, debris, digests, first_difference

pytestmark = pytest.mark.distributed


def evaluated(out: Path) -> list[int]:
    """Steps whose evaluation has begun."""
    return [int(line) for line in (out / "evaluations.txt").read_text().split()]


Evaluated = Callable[[int], Path]


@pytest.fixture(scope="module")
def whole_with_evaluations(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """The run that nothing happened to, by its number of processes; each is trained once."""
    runs: dict[int, Path] = {}

    def whole(ranks: int) -> Path:
        if ranks not in runs:
            runs[ranks] = tmp_path_factory.mktemp("evaluated") / "run"
            assert set(trainers.run(runs[ranks], ranks=ranks, patch=INSTEAD).wait()) == {0}
        return runs[ranks]

    return whole


def same_end(trainers: Trainers, out: Path, ranks: int, whole: Path) -> None:
    """Start again, to the end; the last checkpoint has the bits of a run that nothing happened to."""
    again = trainers.run(out, ranks=ranks, patch=INSTEAD)
    assert set(again.wait()) == {0}, again.output()
    last = commit.checkpoint_name(20)
    ours, theirs = (digests(run / "checkpoints" / last) for run in (out, whole))
    assert first_difference(ours, theirs) is None
    assert debris(out) == []


@pytest.mark.fault("R3", injected="an evaluation raises, on one rank or on all", outcome="the step is saved; exit 1")
@pytest.mark.parametrize(("ranks", "raising"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, 1)])
def test_an_evaluation_that_raises_loses_nothing(
    trainers: Trainers, out: Path, ranks: int, raising: int, whole_with_evaluations: Evaluated
) -> None:
    fault = {"RAISE_AT": "10", "RAISE_RANK": str(raising)}
    save = ("--checkpoints.save_every", "10")
    run = trainers.run(out, *save, ranks=ranks, patch=INSTEAD, failpoint="before_file=sleep:0.5", **fault)
    assert 1 in run.wait()
    assert "the evaluation's own mistake" in run.output()
    assert checkpoints(out) == [10]
    same_end(trainers, out, ranks, whole_with_evaluations(ranks))


@pytest.mark.fault("R3", injected="the last evaluation raises, with no save_every", outcome="the run is saved; exit 1")
def test_the_last_evaluation_that_raises_loses_nothing(trainers: Trainers, out: Path) -> None:
    run = trainers.run(out, patch=INSTEAD, RAISE_AT="20")
    assert run.wait() == [1]
    assert checkpoints(out) == [20]


@pytest.mark.fault(
    "R3",
    injected="SIGTERM, SIGUSR1, SIGINT or STOP during an evaluation",
    outcome="the evaluation ends; saved; exit code 75",
)
@pytest.mark.parametrize(
    ("ranks", "told", "number"),
    [
        pytest.param(1, 0, signal.SIGTERM, marks=pytest.mark.slow),  # two processes are told of it below
        pytest.param(1, 0, signal.SIGINT, marks=pytest.mark.slow),
        (2, 1, signal.SIGTERM),
        pytest.param(2, 0, signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(2, 0, None, marks=pytest.mark.slow),  # a stop file is quick amid training
    ],
    ids=["one", "ctrl-c", "rank 1 of two", "usr1", "stop file"],
)
@pytest.mark.parametrize("save_every", ["0", pytest.param("10", marks=pytest.mark.slow)])
def test_a_stop_ends_an_evaluation_and_saves(
    trainers: Trainers,
    out: Path,
    ranks: int,
    told: int,
    number: signal.Signals | None,
    save_every: str,
    whole_with_evaluations: Evaluated,
) -> None:
    run = trainers.start(out, "--checkpoints.save_every", save_every, ranks=ranks, patch=INSTEAD, LAST_AT="10")
    run.until(out / "evaluations.txt", "5\n10\n")
    if number is None:
        (out / "STOP").touch()
    else:
        run.kill(number, rank=told)
    assert set(run.wait()) == {75}, run.output()
    assert "the evaluation after step 10 is interrupted" in run.output()
    assert checkpoints(out) == [10]
    assert commit.verify(out / "checkpoints" / commit.checkpoint_name(10)).manifest["metrics"] == {}
    same_end(trainers, out, ranks, whole_with_evaluations(ranks))


@pytest.mark.fault(
    "R3",
    injected="SIGTERM during the last evaluation",
    outcome="saved; exit code 75; the next start repeats the evaluation",
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_next_start_makes_up_for_a_last_evaluation_that_was_stopped(
    trainers: Trainers, out: Path, ranks: int
) -> None:
    run = trainers.start(out, ranks=ranks, patch=INSTEAD, LAST_AT="20")
    run.until(out / "evaluations.txt", "5\n10\n15\n20\n")
    run.kill(signal.SIGTERM)
    assert set(run.wait()) == {75}, run.output()
    assert "stopped after the last step, 20, which is saved" in run.output()
    assert "start the same command again to evaluate it" in run.output()
    assert checkpoints(out) == [20]

    again = trainers.run(out, ranks=ranks, patch=INSTEAD)
    assert set(again.wait()) == {0}, again.output()
    assert "running it now" in again.output()
    assert evaluated(out) == [5, 10, 15, 20, 20]
    manifest_of_it = commit.verify(out / "checkpoints" / commit.checkpoint_name(20)).manifest
    assert manifest_of_it["metrics"]["worst_at_ten"] == -10.0
    assert json.loads((out / "report" / "evaluation.json").read_text())["step"] == 20
    steps = [line["step"] for line in read_metrics(out / "metrics.jsonl") if line["event"] == "evaluation"]
    assert steps == [5, 10, 15, 20]

    finished = trainers.run(out, ranks=ranks, patch=INSTEAD)
    assert set(finished.wait()) == {0}
    assert "the run is finished: step 20 of 20" in finished.output()
    assert evaluated(out) == [5, 10, 15, 20, 20]


def test_an_evaluation_made_up_for_is_of_the_run_whatever_has_become_of_its_data(trainers: Trainers, out: Path) -> None:
    assert trainers.run(out, patch=INSTEAD).wait() == [0]
    allow = ("--allow", "data_fingerprint")
    of_the_run = (out / "report" / "evaluation.json").read_bytes()
    asked = trainers.run(out, "--evaluate_only", *allow, patch=INSTEAD, DATA="others")
    assert asked.wait() == [0], asked.output()
    other = out / "report" / "other_data"
    assert json.loads((other / "evaluation.json").read_text())["measured_on"] == {"data_fingerprint": "others"}
    assert (out / "report" / "evaluation.json").read_bytes() == of_the_run

    shutil.rmtree(out / "report")
    commit.rewrite_manifest(out / "checkpoints" / commit.checkpoint_name(20), {"metrics": {}})
    run_file.write_run(out, run_file.load(out) | {OWED: 20})
    again = trainers.run(out, *allow, patch=INSTEAD, DATA="others")
    assert again.wait() == [0], again.output()
    assert not other.exists()
    assert json.loads((out / "report" / "evaluation.json").read_text())["worst_at_ten"] == -10.0
    assert commit.verify(out / "checkpoints" / commit.checkpoint_name(20)).manifest["metrics"]["worst_at_ten"] == -10.0
    assert run_file.load(out)[OWED] is None


def test_without_state_to_resume_from_the_advice_is_another(trainers: Trainers, out: Path) -> None:
    run = trainers.start(out, "--checkpoints.no_save_state", patch=INSTEAD, LAST_AT="20")
    run.until(out / "evaluations.txt", "5\n10\n15\n20\n")
    run.kill(signal.SIGTERM)
    assert run.wait() == [75], run.output()
    assert "start again with --evaluate_only to evaluate it" in run.output()
    again = trainers.run(out, "--evaluate_only", patch=INSTEAD)
    assert again.wait() == [0], again.output()
    assert json.loads((out / "report" / "evaluation.json").read_text())["step"] == 20


def test_metrics_join_the_checkpoint_of_their_step_and_the_best_is_kept(trainers: Trainers, out: Path) -> None:
    best = (
        "--checkpoints.keep_best",
        "1",
        "--checkpoints.best_metric",
        "worst_at_ten",
        "--checkpoints.best_mode",
        "max",
    )
    run = trainers.run(out, *best, "--checkpoints.save_every", "5", "--checkpoints.keep_last", "1", patch=INSTEAD)
    assert run.wait() == [0], run.output()
    assert evaluated(out) == [5, 10, 15, 20]
    assert checkpoints(out) == [10, 20]
    held = {step: commit.verify(path).manifest["metrics"] for step, path in manifest.committed(out / "checkpoints")}
    assert held[10]["worst_at_ten"] == 0.0
    assert held[20]["worst_at_ten"] == -10.0
    assert held[10]["distance"] != held[20]["distance"]


def test_an_early_end_saves_its_step_with_its_metrics(trainers: Trainers, out: Path) -> None:
    run = trainers.run(out, patch=INSTEAD, END_AT="10")
    assert run.wait() == [0], run.output()
    assert checkpoints(out) == [10]
    assert commit.verify(out / "checkpoints" / commit.checkpoint_name(10)).manifest["metrics"]["worst_at_ten"] == 0.0
    # Nothing is left to resume, and nobody is told to.
    assert read_metrics(out / "metrics.jsonl")[-1]["reason"] == "finished"


CALLS = ("set_learning_rate", "training.report", "training.save_if_due", "prepared.ema.update")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        *((call, f"step 1: the loop did not call {call}") for call in CALLS),
        ("optimizer.step", "step 1: optimizer.step was called 0 times"),
        ("second optimizer.step", "step 1: optimizer.step was called 2 times"),
        ("window.finish", "optimizer.step was called before window.finish"),
        ("second window.finish", "optimizer.step was called before window.finish"),
    ],
)
def test_a_call_that_the_loop_forgets_is_named(trainers: Trainers, out: Path, call: str, says: str) -> None:
    run = trainers.run(out, patch=INSTEAD, FORGOTTEN=call)
    assert run.wait() == [1]
    assert says in run.output()


@pytest.mark.parametrize(("ranks", "save_every"), [pytest.param(1, "10", marks=pytest.mark.slow), (2, "5")])
def test_a_best_metric_that_the_first_evaluation_lacks_ends_the_run_with_its_step_saved(
    trainers: Trainers, out: Path, ranks: int, save_every: str
) -> None:
    """The recipe declares no metrics; the evaluation is after step 5, where a save may be due or not."""
    best = ("--checkpoints.save_every", save_every, "--checkpoints.keep_last", "1", "--checkpoints.keep_best", "1")
    run = trainers.run(out, *best, "--checkpoints.best_metric", "worst_at_tn", ranks=ranks, patch=INSTEAD)
    assert set(run.wait()) == {2}, run.output()
    assert "'worst_at_tn' is not reported by this run's evaluation (did you mean 'worst_at_ten'?)" in run.output()
    assert checkpoints(out) == [5]
    manifest = commit.verify(out / "checkpoints" / commit.checkpoint_name(5)).manifest
    assert manifest["metrics"].keys() == {"distance", "worst_at_ten"}
    right = (*best, "--checkpoints.best_metric", "worst_at_ten", "--checkpoints.best_mode", "max")
    again = trainers.run(out, *right, ranks=ranks, patch=INSTEAD)
    assert set(again.wait()) == {0}, again.output()
    assert checkpoints(out) == [10, 20]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_declared_metric_that_an_evaluation_lacks_ends_a_run_with_patience_once_its_step_is_saved(
    trainers: Trainers, out: Path, ranks: int
) -> None:
    lacking = ("--checkpoints.best_metric", "worst_at_ten", "--checkpoints.best_mode", "max")
    patient = (*lacking, "--checkpoints.patience", "9")
    run = trainers.run(out, *patient, ranks=ranks, patch=INSTEAD, LACKS_AT="10")
    assert set(run.wait()) == {2}, run.output()
    assert "Traceback" not in run.output()
    assert "'worst_at_ten' is not reported by this run's evaluation; it reports distance" in run.output()
    assert checkpoints(out) == [10]
    # Where nothing counts evaluations, a best checkpoint is chosen among those that have the metric.
    again = trainers.run(out, *lacking, "--checkpoints.keep_best", "1", ranks=ranks, patch=INSTEAD, LACKS_AT="15")
    assert set(again.wait()) == {0}, again.output()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])  # two end together above
def test_a_best_metric_that_an_evaluation_before_the_first_step_lacks_saves_nothing(
    trainers: Trainers, out: Path, ranks: int
) -> None:
    lacking = ("--checkpoints.best_metric", "worst_at_tn", "--checkpoints.keep_best", "1")
    run = trainers.run(out, *lacking, ranks=ranks, patch=INSTEAD, BASELINE="1")
    assert set(run.wait()) == {2}, run.output()
    assert "Traceback" not in run.output()
    assert "'worst_at_tn' is not reported by this run's evaluation" in run.output()
    assert checkpoints(out) == []
    again = trainers.run(out, ranks=ranks, patch=INSTEAD, BASELINE="1")
    assert set(again.wait()) == {0}, again.output()
    assert evaluated(out) == [0, 0, 5, 10, 15, 20]
