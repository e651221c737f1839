"""NaN on one rank of two, skipped by all, equals a run that skips that step: the same bits under every strategy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.metrics.records import read_metrics
from tests.distributed.launching import DEMOS, ROOT, Finished, Layout, command, fork

pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests" / "distributed" / "health_worker.py"
RECIPE = ROOT / "tests" / "distributed" / "bad_step_worker.py"


def work(layout: Layout, folder: Path, alternatives: list[dict[str, Any]], *flags: str) -> list[dict[str, Any]]:
    words = command(layout, [str(folder / "runs"), json.dumps(alternatives), *flags], folder, WORKER)
    done = fork(layout, words, PYTHONPATH=str(ROOT))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


ALTERNATIVES: dict[str, list[dict[str, Any]]] = {
    "ddp": [{}, {"on_device": True, "balance": "ema"}, {"optimizer": "muon"}],
    "fsdp2": [{}, {"on_device": True, "balance": "uncertainty"}, {"optimizer": "muon"}],
    "zero1": [{}],
    "zero2": [{"balance": "uncertainty"}, {"sync": "last"}],
    "zero3": [{}],
    "zero2_offload": [{}],
    "zero3_offload": [{}],
}


SELDOM = [strategy for strategy in ALTERNATIVES if strategy not in ("ddp", "fsdp2", "zero2")]


@pytest.mark.fault(
    "F53",
    injected="NaN in the loss or the gradient of one rank of two, skip, every strategy",
    outcome="equals a run without those steps, also after a resume",
)
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp2", "zero2", *(pytest.param(s, marks=pytest.mark.slow) for s in SELDOM)],  # as zero2
)
def test_nan_on_one_rank_of_two_equals_a_run_without_that_step(strategy: str, tmp_path: Path) -> None:
    for options, found in zip(
        ALTERNATIVES[strategy], work(Layout(strategy, 2), tmp_path, ALTERNATIVES[strategy]), strict=True
    ):
        assert not found["without"], options
        assert not found["resumed"], options
        assert found["counts"] in ([6.0], [])  # Muon keeps none for its matrices
        assert [bad[:2] for bad in found["bad"]] == [[2, "loss"], [5, "gradient"]]
        assert found["bad"][0][2][0] == []  # all samples of rank 0 were finite
        assert 13 in found["bad"][0][2][1]
        assert all("2 steps in a row were skipped" in message for message in found["messages"])
        if "on_device" in options:
            assert found["reads"] == {}


@pytest.mark.slow  # the quick one above has the same paths in fp32
@pytest.mark.parametrize("strategy", ALTERNATIVES)
def test_the_same_in_bf16(strategy: str, tmp_path: Path) -> None:
    (found,) = work(Layout(strategy, 2), tmp_path, [{}], "bf16")
    assert not found["without"]
    assert not found["resumed"]


def train(bad: str, directory: Path, *flags: str) -> Finished:
    """The language model's demo of 8 steps, with NaN in the steps ``bad``, counted from 0."""
    preset, small = DEMOS["causal_lm"]
    words = [bad, "causal_lm", preset, *small, "--max_steps", "8", "--checkpoints.save_every", "4"]
    words += ["--output_dir", str(directory), "--health.non_finite", "skip", *flags]
    done = fork(Layout("single", 1), command(Layout("single", 1), words, directory, RECIPE), PYTHONPATH=str(ROOT))
    return Finished(directory, done.stdout, done.returncode)


def bad_steps(run: Finished) -> list[tuple[int, str, bool, int]]:
    lines = [line for line in read_metrics(run.directory / "metrics.jsonl") if line["event"] == "bad_step"]
    return [(line["step"], line["reason"], line["skipped"], len(line["samples"][0])) for line in lines]


def test_a_recipe_skips_and_a_resume_after_it_has_the_same_bits(tmp_path: Path) -> None:
    whole = train("2,5", tmp_path / "whole")
    assert whole.code == 0, whole.output[-4000:]
    assert bad_steps(whole) == [(3, "loss", True, 16), (6, "loss", True, 16)]
    assert "warning: loss of step 3 is not finite ({'nll': nan}); skipped: nothing has moved" in whole.output
    assert [line["skipped_steps"] for line in whole.train_lines().values()] == [0, 0, 1, 1, 1, 2, 2, 2]
    shutil.copytree(whole.directory, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "checkpoint_00000008")
    resumed = train("2,5", tmp_path / "resumed")
    assert resumed.code == 0, resumed.output[-4000:]
    assert "resuming" in resumed.output or "resume" in resumed.output
    for stem in ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        expected, found = whole.tensors(8, stem), resumed.tensors(8, stem)
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert bad_steps(resumed) == bad_steps(whole)  # each once, although step 6 was done twice
    assert resumed.losses()[6:] == whole.losses()[6:]


@pytest.mark.slow  # the limit itself is tested in tests/training
def test_too_many_in_a_row_end_a_recipe_with_exit_code_1(tmp_path: Path) -> None:
    run = train("2,3,4", tmp_path / "run", "--health.max_skipped", "2")
    assert run.code == 1
    assert "3 steps in a row were skipped, and health.max_skipped allows 2" in run.output
    assert [step for step, *_ in bad_steps(run)] == [3, 4, 5]
    *_, end = read_metrics(run.directory / "metrics.jsonl")
    assert (end["event"], end["reason"]) == ("end", "NonFiniteError")
    again = train("2,3,4", tmp_path / "run", "--health.max_skipped", "3")
    assert again.code == 0, again.output[-4000:]
    assert [step for step, *_ in bad_steps(again)] == [3, 4, 5]
