"""A run that goes back from a step that is not finite equals one that never had its samples."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_train import train_state
from accel_train.data.sampler import StepSampler
from accel_train.data.tables.ledger import DataHistory
from accel_train.metrics.records import read_metrics
from accel_train.store.names import LEFT_OUT_FILE
from accel_train.training.health import rollback
from accel_train.training.health.evidence import BadStep
from accel_train.training.health.history import History
from accel_train.watching.html_report.events import events_of
from tests import zygote
from tests.distributed.launching import DEMOS, LAUNCH_FILES, ROOT, Finished, Layout, command, environment, fork

pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests" / "distributed" / "bad_sample_worker.py"
STEPS, SAVE_EVERY = 8, 3
SINGLE = Layout("single", 1)


def words_of(bad: str, directory: Path, *flags: str) -> list[str]:
    preset, small = DEMOS["mmdit"]
    words = [bad, preset, *small, "--max_steps", str(STEPS), "--checkpoints.save_every", str(SAVE_EVERY)]
    words += ["--micro_batch_size", "4"]
    return [*words, "--log.log_every", "1", "--output_dir", str(directory), *flags]


def train(bad: str, directory: Path, *flags: str) -> Finished:
    """Train the demo with NaN as the loss of the samples ``bad``."""
    words = words_of(bad, directory, "--health.non_finite", "rollback", *flags)
    done = fork(SINGLE, command(SINGLE, words, directory, WORKER), PYTHONPATH=str(ROOT))
    return Finished(directory, done.stdout, done.returncode)


def a_sample_of_step(run: Finished, step: int) -> int:
    """The first sample of a step, counted from 1."""
    order = StepSampler(size_of_the_demo(run.directory), 16, seed=0)
    return order.draws(step - 1)[0].sample


def size_of_the_demo(run: Path) -> int:
    lines = read_metrics(run / "metrics.jsonl")
    epoch, step, size = next((r["epoch"], r["step"], r["global_batch_size"]) for r in lines if r["event"] == "train")
    return round(step * size / epoch)


def rollbacks(run: Finished) -> list[tuple[int, list[int]]]:
    lines = read_metrics(run.directory / "metrics.jsonl")
    return [(line["step"], line["left_out"]) for line in lines if line["event"] == "rollback"]


def assert_same_bits(run: Finished, other: Finished) -> None:
    for stem in ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        expected, found = run.tensors(STEPS, stem), other.tensors(STEPS, stem)
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items()), stem


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = train("", tmp_path_factory.mktemp("undisturbed") / "run")
    assert run.code == 0, run.output[-4000:]
    assert not rollbacks(run)
    return run


@pytest.mark.fault("F53", injected="a sample whose loss is NaN, rollback", outcome="equals a run without its samples")
def test_it_equals_a_run_without_these_samples(tmp_path: Path, undisturbed: Finished) -> None:
    bad = a_sample_of_step(undisturbed, 5)
    run = train(str(bad), tmp_path / "run")
    assert run.code == 0, run.output[-4000:]
    ((step, left_out),) = rollbacks(run)
    assert (step, left_out) == (5, [bad])  # and no other of its micro-batch
    assert "starting again" in run.output
    assert f"of step 5, which was not finite ({run.directory / LEFT_OUT_FILE})" in run.output

    without = train(str(bad), tmp_path / "without", "--without_samples", *map(str, left_out))
    assert without.code == 0, without.output[-4000:]
    assert_same_bits(without, run)
    assert run.losses()[3:] == without.losses()[3:]
    assert run.losses()[:3] == undisturbed.losses()[:3]
    kinds = [event.kind for event in events_of(read_metrics(run.directory / "metrics.jsonl"))]
    assert "rollback" in kinds
    assert "crash" not in kinds

    # A copy of a checkpoint has no file beside it, and knows them all the same.
    copied = train(
        str(bad), tmp_path / "copied", "--resume", str(run.directory / "checkpoints" / "checkpoint_00000006")
    )
    assert copied.code == 0, copied.output[-4000:]
    assert_same_bits(run, copied)


def test_the_samples_of_other_data_are_not_left_out(tmp_path: Path) -> None:
    """Their indices are those of other samples there."""
    bad = BadStep(4, "loss", {"main": math.nan}, None, [[3, 5]], "fp32")
    first = rollback.next_rollback([], bad, 3, "first")
    assert isinstance(first, rollback.Rollback)
    other = rollback.next_rollback([first], bad, 3, "other")
    assert isinstance(other, rollback.Rollback)
    assert other.samples == [3, 5]
    assert rollback.next_rollback([first], bad, 3, "first") == (
        "going back would not help: every known sample of this step is already left out"
    )
    rollback.record(tmp_path, [first])
    rollbacks = rollback.recorded(tmp_path)
    assert rollbacks == [first]
    (same,), (changed,) = (rollback.notices(tmp_path, rollbacks, data) for data in ("first", "other"))
    assert same.startswith("without the samples 3, 5 of step 5")
    assert "refer to different data" in changed

    saved = train_state_of(tmp_path, "first", History(1), rollbacks)
    assert saved["left_out"] == [3, 5]
    for data, expected in (("first", [3, 5]), ("other", None)):
        resumed = History(1)
        resumed.load(saved)
        assert train_state_of(tmp_path, data, resumed, rollbacks).get("left_out") == expected


def train_state_of(
    directory: Path, data: str, history: History, rollbacks: Sequence[rollback.Rollback]
) -> Mapping[str, Any]:
    """What a checkpoint of a start with these data has, whose order leaves out what it says."""
    run = SimpleNamespace(rollbacks=rollbacks)
    config = SimpleNamespace(without_samples=())
    opened: Any = SimpleNamespace(config=config, run=run, history=DataHistory(data, 20))
    prepared: Any = SimpleNamespace(guard=SimpleNamespace(history=history))
    order = train_state.without_left_out(opened, prepared, StepSampler(20, 20, seed=0))
    without = {draw.sample for draw in order.draws(0) if not draw.weight}
    state = history.state()
    reads = {draw.sample for draw in order.draws(0)}
    assert reads == {*range(20)} - {*state.get("left_out", [])}
    assert bool(without) == ("left_out" in state)
    return state


@pytest.mark.slow  # the test above goes back as well
def test_the_number_of_rollbacks_is_limited(tmp_path: Path, undisturbed: Finished) -> None:
    bad = [a_sample_of_step(undisturbed, step) for step in (2, 4)]
    run = train(",".join(map(str, bad)), tmp_path / "run", "--health.max_rollbacks", "1")
    assert run.code == 1
    assert [step for step, _ in rollbacks(run)] == [2]
    assert "the run has gone back 1 times, and health.max_rollbacks allows 1" in run.output
    again = train(",".join(map(str, bad)), tmp_path / "run", "--health.max_rollbacks", "2")
    assert again.code == 0, again.output[-4000:]
    assert [step for step, _ in rollbacks(again)] == [2, 4]


@pytest.mark.slow
def test_a_damaged_record_is_no_empty_one(tmp_path: Path, undisturbed: Finished) -> None:
    bad = a_sample_of_step(undisturbed, 2)
    run = train(str(bad), tmp_path / "run")
    path = run.directory / LEFT_OUT_FILE
    assert [one["step"] for one in json.loads(path.read_text())["rollbacks"]] == [2]
    path.write_text("{}")
    damaged = train(str(bad), tmp_path / "run")
    assert damaged.code == 2
    assert f"{path}: cannot be read ('rollbacks'); it lists samples that this run leaves out" in damaged.output


@pytest.mark.slow  # one process shows the mechanism every day, and test_out_of_memory.py that several start again
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_several_processes_are_started_again(strategy: str, tmp_path: Path, undisturbed: Finished) -> None:
    bad = a_sample_of_step(undisturbed, 5)
    directory = tmp_path / "run"
    file = tmp_path / "two.yaml"
    file.write_text(f"num_machines: 1\nnum_processes: 2\n{LAUNCH_FILES[strategy]}")
    words = [sys.executable, "-m", "accel_train.cli", "rehearse", "--config_file", str(file), str(WORKER)]
    words += words_of(str(bad), directory, "--health.non_finite", "rollback")
    done = zygote.run(words, env=environment(PYTHONPATH=str(ROOT)))
    run = Finished(directory, done.stdout, done.returncode)
    assert run.code == 0, run.output[-4000:]
    ((step, left_out),) = rollbacks(run)
    assert (step, left_out) == (5, [bad])
    without = train(str(bad), tmp_path / "without", "--without_samples", *map(str, left_out))
    found = run.tensors(STEPS, "model")
    for name, expected in without.tensors(STEPS, "model").items():
        assert torch.allclose(expected, found[name], atol=1e-5), name
