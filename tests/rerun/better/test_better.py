"""``accel-train better`` on runs of every recipe: the planted loser is named, a checkpoint equals itself."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_train import cli
from accel_train.compare.runs import RunFailedError
from accel_train.config import UsageError
from accel_train.data.tables.ledger import Span, write_ledger
from accel_train.rerun.better import better, sides
from accel_train.rerun.better.sides import Evaluated
from accel_train.store import commit, manifest, strict_json
from tests.distributed.launching import Finished, Layout, run_recipe
from tests.rerun import recording
from tests.rerun.samples import planted

SAMPLES = ("--evaluation.samples", "24")
FLAGS = {
    "mmdit": recording.TINY["mmdit"],
    "pde": [*recording.TINY["pde"], "--data.heldout_samples", "24"],
    "causal_lm": [],
    "lora": ["--data.heldout_fraction", "0.5"],
}


@pytest.fixture(autouse=True)
def _fork(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fork_observed(monkeypatch)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return record("mmdit", tmp_path_factory.mktemp("better") / "run")


def record(recipe: str, directory: Path) -> Finished:
    return run_recipe(Layout("single", 1, recipe), directory, *FLAGS[recipe], "--max_steps", "12", *SAMPLES)


def worse(run: Finished, directory: Path, factor: float) -> Finished:
    """A copy of a run whose newest weights are no longer what was trained, with all hashes written anew."""
    copy = recording.copied(run, directory)
    newest = copy.checkpoint(12)
    torch.manual_seed(0)
    files = dict(manifest.read(newest)["files"])
    for path in newest.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            # By the size of the weights, which is that of what training has made of them.
            tensors[name] = tensor + factor * tensor.float().square().mean().sqrt() * torch.randn_like(tensor)
        save_file(tensors, path, {"format": "pt"})
        files[path.name] = commit.seal_file(path)
    commit.rewrite_manifest(newest, {"files": files})
    return copy


def changed(run: Finished, directory: Path, **values: object) -> Path:
    """A copy of the newest checkpoint, outside of any run, whose experiment has other values."""
    shutil.copytree(run.checkpoint(12), directory)
    experiment = manifest.read(directory)["experiment"]
    commit.rewrite_manifest(directory, {"experiment": experiment | values})
    return directory


def judged(a: Path, b: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli._main(["better", str(a), str(b), "--json", *more])
    content = json.loads(capsys.readouterr().out)
    strict_json.check_seal(content)
    return code, content


def assert_the_better_one_is_named(
    recipe: str, run: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Compare a run with a damaged copy, and with itself under another seed. Return the first result."""
    before = recording.tree(run.directory)
    # Adapters of 12 steps are near zero, and so is what twice their size does to the base.
    other = worse(run, tmp_path / "worse", factor=50 if recipe == "lora" else 2)
    code, found = judged(other.directory, run.directory, capsys)
    assert (code, found["winner"]) == (0, "B"), found
    # Noise is keyed by the seed, and both are evaluated with that of A.
    same = changed(run, tmp_path / "checkpoint_00000012", seed=3)
    code, equal = judged(run.directory, same, capsys, "--recipe", recipe)
    assert (code, equal["winner"]) == (0, "equal")
    assert {one["difference"] for one in equal["metrics"]} == {0.0}
    # Metrics of few samples, such as a handful of rollouts, have no interval.
    assert {one["half_width"] for one in equal["metrics"]} <= {0.0, None}
    assert recording.tree(run.directory) == before
    return found


def test_the_better_one_is_named_and_a_checkpoint_equals_itself(
    run: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = assert_the_better_one_is_named("mmdit", run, tmp_path, capsys)
    rows = {one["metric"]: one for one in found["metrics"]}
    assert [name for name, one in rows.items() if one["better"]] == ["l2t_nll", "t2l_cosine"]
    # What the recipe itself reports of the same samples, in batches.
    report = json.loads((run.directory / "report" / "evaluation.json").read_text())
    for name in ("l2t_nll", "unconditional_nll", "t2l_cosine"):
        assert rows[name]["b"] == pytest.approx(report[name], rel=1e-5, abs=1e-5)
    assert rows["l2t_nll"]["samples"] == 24


def test_a_checkpoint_from_before_the_data_changed_is_compared_on_those_of_now(
    run: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = changed(run, tmp_path / "checkpoint_00000012", **{"data.changed": "allow"})
    fingerprint = manifest.read(before)["experiment"]["data_fingerprint"]
    write_ledger(before / "assets", [Span(0, fingerprint, 5), Span(8, "of other data", 6)])
    ledger = {"assets/ledger.json": commit.seal_file(before / "assets" / "ledger.json")}
    commit.rewrite_manifest(before, {"files": manifest.read(before)["files"] | ledger})
    code, found = judged(before, run.directory, capsys, "--recipe", "mmdit", "--metric", "l2t_nll")
    assert (code, found["winner"]) == (0, "equal")


@pytest.mark.slow  # a planted difference is quick
def test_a_longer_training_is_told_apart_by_paired_intervals_half_as_wide(
    run: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Its schedule has another length, which is no matter of the data.
    longer = run_recipe(Layout("single", 1, "mmdit"), tmp_path / "run", *FLAGS["mmdit"], "--max_steps", "36", *SAMPLES)
    code, found = judged(run.directory, longer.directory, capsys, "--metric", "l2t_nll")
    assert (code, found["winner"]) == (0, "B")
    row = next(one for one in found["metrics"] if one["metric"] == "l2t_nll")
    assert row["half_width"] <= row["unpaired_half_width"] / 2
    # Few samples have no interval.
    few = ("--evaluation.samples", "8", "--metric", "l2t_nll")
    assert cli._main(["better", str(run.directory), str(longer.directory), *few]) == 3
    assert "verdict: no difference shown: 8 sample(s) of l2t_nll have no interval" in capsys.readouterr().out


@pytest.mark.slow  # the same of mmdit is quick
@pytest.mark.parametrize("recipe", ["pde", "causal_lm", "lora"])
def test_the_better_one_is_named_in_every_recipe(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(recipe, tmp_path / "run")
    found = assert_the_better_one_is_named(recipe, run, tmp_path, capsys)
    deciding = [one["metric"] for one in found["metrics"] if one["better"]]
    expected = {"pde": "advection_nrmse", "causal_lm": "nll", "lora": "loss"}
    assert expected[recipe] in deciding
    if recipe == "lora":
        assert {"loss_band_1", "loss_band_4"} <= {one["metric"] for one in found["metrics"]}


def test_what_cannot_be_compared_is_refused(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sides.training, "train", lambda *_: pytest.fail("nothing may be evaluated"))

    def refused(b: Path, message: str, *more: str) -> None:
        with pytest.raises(UsageError, match=message):
            cli._main(["better", str(run.directory), str(b), *more])

    recipe = ("--recipe", "mmdit")
    refused(tmp_path / "nothing", "does not exist")
    refused(changed(run, tmp_path / "data", data_fingerprint="0"), "their held-out samples differ", *recipe)
    other = changed(run, tmp_path / "evaluation", **{"evaluation.samples": 16, "evaluation.every": 7})
    refused(other, r"the evaluations differ.*\n  --evaluation.samples: 24 in A, 16 in B$", *recipe)
    refused(other, "does not record its recipe")
    refused(run.directory, "--optimizer.lr: the checkpoints were trained with it", "--optimizer.lr", "1")
    refused(run.directory, "min or max is required", "--metric", "l2t_nll:best")
    monkeypatch.setattr(sides.recorded, "recipe_of", lambda of, _: Path(f"{of.place}.py"))
    refused(run.checkpoint(12), "trained by .* B by")
    # A lost log is no obstacle, and neither is another seed, for both are evaluated with that of A.
    assert not capsys.readouterr().out


def test_an_evaluation_without_the_metric_that_decides_is_refused() -> None:
    calls = [[{"loss": float(value), "n": 1.0} for value in range(12)]]
    side = Evaluated({"loss": 5.5, "gain": 0.3}, calls)
    (found,) = better._compare(side, side, {}, {"loss": "min"})
    assert (found.metric, found.equal) == ("loss", True)
    # A metric that a person names is compared or refused, also beside another.
    for given in ({"gain": "max"}, {"gain": "max", "loss": "min"}, {"los": "min"}):
        with pytest.raises(
            UsageError, match=r"--metric: (gain|los) is not a mean over .*; it has loss; give one of these"
        ):
            better._compare(side, side, given, {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="--metric: nll is not a mean"):
        better._compare(side, side, {}, {"nll": "min"})
    diverged = Evaluated({"loss": math.nan}, calls)
    with pytest.raises(RunFailedError, match="loss of B is nan: no difference can be tested"):
        better._compare(side, diverged, {}, {"loss": "min"})
    with pytest.raises(RunFailedError, match="no sums over held-out samples"):
        better._compare(Evaluated({}, []), side, {}, {"loss": "min"})
    with pytest.raises(RunFailedError, match="different numbers of samples"):
        better._compare(side, Evaluated({"loss": 5.5}, [calls[0][:5]]), {}, {"loss": "min"})
