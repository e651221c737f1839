"""``without_samples``: the same weights whether samples had weight 0 from the start or from a fork before their use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel_train import cli
from accel_train.config import UsageError
from accel_train.data.leaving_out import without_samples
from accel_train.data.options import BatchScheduleConfig
from accel_train.data.sampler import StepSampler
from accel_train.rerun import changes, recorded
from accel_train.rerun.samples.first_use import first_use
from tests.distributed.launching import Finished
from tests.rerun import recording
from tests.rerun.samples import planted

COLLECTIONS = ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq")


def assert_equal(one: Finished, other: Finished, steps: tuple[int, int], *, equal: bool = True) -> None:
    for stem in COLLECTIONS:
        a, b = one.tensors(steps[0], stem), other.tensors(steps[1], stem)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a) == equal, stem


def test_a_sample_that_is_left_out_already_is_not_used() -> None:
    order = StepSampler(16, 4, 0)
    early, late = order.draws(0)[0].sample, order.draws(2)[1].sample
    assert first_use(order, [late, early], 4) == 1
    left = without_samples(order, [early])
    assert first_use(left, [early], 4) is None
    assert first_use(left, [late, early], 4) == 3


def test_what_forgets_them_is_a_run_that_never_gave_them_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording.fork_runs(monkeypatch)
    planted.fork_observed(monkeypatch)
    run = recording.record("mmdit", tmp_path / "run")
    size = round(12 * 4 / run.train_lines()[12]["epoch"])
    order = StepSampler(size, 4, 0)
    # All of step 7, and some of two others; each for the first time after the checkpoint of step 4.
    samples = [draw.sample for draw in (*order.draws(6), *order.draws(8)[:2], *order.draws(10)[3:])]
    ids = [str(sample) for sample in samples]
    never = recording.record("mmdit", tmp_path / "never", "--without_samples", *ids, "--checkpoints.save_every", "1")
    before = recording.tree(run.directory)
    assert cli._main(["forget", str(run.directory), *ids]) == 0
    assert recording.tree(run.directory) == before
    assert "first use of these samples: step 7" in capsys.readouterr().out
    (directory,) = [path for path in tmp_path.iterdir() if path.name.startswith("run-at4-without_samples")]
    branch = Finished(directory, "", 0)
    assert_equal(branch, never, (12, 12))
    assert_equal(run, never, (4, 4))
    assert_equal(run, never, (12, 12), equal=False)
    # No sample of step 7 has a weight, so momentum and weight decay must not move anything either.
    assert_equal(never, never, (6, 7))
    # Nor does the optimizer count it, and a resume after it goes on with the optimizer's own count.
    checkpoint = never.directory / "checkpoints" / "checkpoint_00000008"
    flags = ("--resume", str(checkpoint), "--without_samples", *ids, "--checkpoints.save_every", "1")
    assert_equal(recording.record("mmdit", tmp_path / "again", *flags), never, (12, 12))
    assert_equal(never, never, (7, 8), equal=False)
    assert never.train_lines()[7]["loss"] == 0
    # Used before every checkpoint, never or nowhere.
    early = order.draws(2)[0].sample
    with pytest.raises(UsageError, match=r"first used in step 3, and .* has the checkpoints 4, 8, 12, none before it"):
        cli._main(["forget", str(run.directory), str(early)])
    with pytest.raises(UsageError, match=f"samples {size}: the training split has {size}, 0 to {size - 1}"):
        cli._main(["forget", str(run.directory), str(size)])
    late = order.draws(20)[0].sample
    assert cli._main(["forget", str(run.directory), str(late)]) == 0
    assert "the run already excludes them" in capsys.readouterr().out


@pytest.mark.slow  # measured batches of a branch are a quick test, and so is the first use with a size that stays
def test_the_first_use_in_a_run_whose_batch_grew_by_its_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the sizes of its steps, by which a sample comes earlier."""
    recording.fork_runs(monkeypatch)
    planted.fork_observed(monkeypatch)
    run = recording.record("mmdit", tmp_path / "run", *recording.GROWING)
    lines = run.train_lines()
    sizes = [lines[step]["global_batch_size"] for step in sorted(lines)]
    assert sizes == [4] * 3 + [8] * 3 + [12] * 6
    size = round(sum(sizes) / lines[12]["epoch"])
    order = StepSampler(size, 4, 0, schedule=BatchScheduleConfig((3, 6), (8, 12)))
    # With four samples in every step, the run would never come to them.
    ids = [draw.sample for draw in order.draws(9)[:2]]
    assert first_use(StepSampler(size, 4, 0), ids, 12) is None
    opened = recorded.open_run(str(run.directory))
    options = recorded.options_at(opened, None)
    for manifest in (opened.newest_manifest(), {}):
        fixed = changes.measured_batches(options, manifest, opened.lines("noise_scale"))
        assert (list(fixed["steps"]), list(fixed["sizes"])) == ([3, 6], [8, 12])
    before = recording.tree(run.directory)
    assert cli._main(["forget", str(run.directory), *map(str, ids)]) == 0
    assert recording.tree(run.directory) == before
    assert "first use of these samples: step 10" in capsys.readouterr().out
    (directory,) = [path for path in tmp_path.iterdir() if path.name.startswith("run-at8-without_samples")]
    branch = Finished(directory, "", 0)
    assert branch.losses()[0] == run.losses()[8]
    assert_equal(branch, run, (12, 12), equal=False)
