"""``without_samples``: the same weights whether samples had weight 0 from the start or from a fork before their use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel_train import cli
from accel_train.data.sampler import StepSampler
from tests.distributed.launching import Finished
from tests.rerun import recording

COLLECTIONS = ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq")


def assert_equal(one: Finished, other: Finished, steps: tuple[int, int], *, equal: bool = True) -> None:
    for stem in COLLECTIONS:
        a, b = one.tensors(steps[0], stem), other.tensors(steps[1], stem)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a) == equal, stem


def test_a_branch_before_their_first_use_is_a_run_that_never_gave_them_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording.fork_runs(monkeypatch)
    run = recording.record("mmdit", tmp_path / "run")
    size = round(12 * 4 / run.train_lines()[12]["epoch"])
    order = StepSampler(size, 4, 0)
    # All of step 7, and some of two others; each for the first time after the checkpoint of step 4.
    samples = [draw.sample for draw in (*order.draws(6), *order.draws(8)[:2], *order.draws(10)[3:])]
    ids = [str(sample) for sample in samples]
    never = recording.record("mmdit", tmp_path / "never", "--without_samples", *ids, "--checkpoints.save_every", "1")
    assert cli._main(["branch", str(run.directory), "--at", "4", "--without_samples", *ids]) == 0
    (directory,) = [path for path in tmp_path.iterdir() if path.name.startswith("run-at4-without_samples")]
    branch = Finished(directory, "", 0)
    assert_equal(branch, never, (12, 12))
    assert_equal(run, never, (4, 4))
    assert_equal(run, never, (12, 12), equal=False)
    # No sample of step 7 has a weight, so momentum and weight decay must not move anything either.
    assert_equal(never, never, (6, 7))
    assert_equal(never, never, (7, 8), equal=False)
    assert never.train_lines()[7]["loss"] == 0
