"""``accel-train blame``: planted samples are found on both demos, the step is the recorded one, the rule is robust."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel_train import cli
from accel_train.config import UsageError
from accel_train.data.loader import StepBatches
from accel_train.data.sampler import StepSampler
from accel_train.rerun import recorded
from accel_train.rerun.recorded import RecordedRun
from accel_train.rerun.samples import again, blame, measuring, suspects
from accel_train.store import strict_json
from tests.rerun import recording
from tests.rerun.samples import planted

BATCH = 200
STEP = 4
FLAGS = ("--global_batch_size", str(BATCH), "--micro_batch_size", "64")


def measure(run: Path, recipe: Path) -> dict[str, Any]:
    assert cli._main(["blame", str(run), "--step", str(STEP), "--recipe", str(recipe)]) == 0
    receipt = strict_json.read_object(run / "report" / f"blame-step-{STEP}.json")
    strict_json.check_seal(receipt)
    return receipt


def assert_planted_samples_are_found(recipe: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """Train without and with ten samples out of scale, and measure both. Return the receipt of the second."""
    file = planted.write_recipe(tmp_path / "clean.py", recipe, [])
    run = planted.record(file, recipe, tmp_path / "clean", *FLAGS, *flags)
    clean = measure(run.directory, file)
    assert (clean["suspects"], clean["without_suspects"]) == ([], None)
    # The order does not depend on the data, so these are in the step of the second run too.
    there = sorted({one["sample"] for one in clean["samples"]})
    ids = random.Random(0).sample(there, 10)
    file = planted.write_recipe(tmp_path / "poisoned.py", recipe, ids)
    run = planted.record(file, recipe, tmp_path / "poisoned", *FLAGS, *flags)
    before = recording.tree(run.directory)
    receipt = measure(run.directory, file)
    after = recording.tree(run.directory)
    # The receipt alone is new.
    assert after.pop(f"report/blame-step-{STEP}.json")
    assert after == before
    assert receipt["checkpoint"]["name"] == "checkpoint_00000002"
    assert receipt["as_recorded"]
    assert receipt["whole"]["loss"] == run.losses()[STEP - 1]
    found = set(receipt["suspects"])
    assert len(found & set(ids)) >= 9
    assert len(found - set(ids)) <= 1
    assert receipt["without_suspects"]["grad_norm"] < receipt["whole"]["grad_norm"] / 3
    return receipt


@pytest.mark.slow  # every day the sample that ended a step is found, below
def test_ten_latents_out_of_scale_are_found_among_two_hundred_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted.fork_observed(monkeypatch)
    # The cosine of the demo does not see the scale of a latent.
    receipt = assert_planted_samples_are_found("mmdit", tmp_path, *"--modes.weights 0 0 1 --latent.loss mse".split())
    output = capsys.readouterr().out
    assert "no suspects: no sample of this step stands out" in output
    assert f"suspects: {' '.join(map(str, receipt['suspects']))}" in output
    assert "have the bits that the run logged" in output
    # Every sample has the same weight in this term, so the mean of the own losses is that of the batch.
    own = [one["values"]["loss_latent"] for one in receipt["samples"]]
    assert len(own) == BATCH
    assert math.isclose(sum(own) / BATCH, receipt["whole"]["loss_latent"], rel_tol=1e-5)
    kept = [one["values"]["loss_latent"] for one in receipt["samples"] if one["sample"] not in receipt["suspects"]]
    assert math.isclose(sum(kept) / len(kept), receipt["without_suspects"]["loss_latent"], rel_tol=1e-5)


@pytest.mark.slow  # the same of mmdit is quick
def test_ten_fields_out_of_scale_are_found_among_two_hundred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fork_observed(monkeypatch)
    assert_planted_samples_are_found("pde", tmp_path, "--data.train_samples", "256")


@pytest.mark.parametrize("batch", [4, 2])
def test_the_step_that_ended_a_run_is_blamed_on_its_samples(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not finite, so the run wrote no line of it. In the batch of two, neither sample is finite."""
    planted.fork_observed(monkeypatch)
    flags = f"--modes.weights 0 0 1 --latent.loss mse --global_batch_size {batch} --log.log_every 5".split()
    flags += ["--micro_batch_size", str(batch)]
    file = planted.write_recipe(tmp_path / "clean.py", "mmdit", [])
    clean = planted.record(file, "mmdit", tmp_path / "clean", *flags)
    order = StepSampler(round(12 * batch / clean.train_lines()[12]["epoch"]), batch, 0)
    drawn = [draw.sample for draw in order.draws(6)]
    bad = sorted(drawn if batch == 2 else drawn[1:2])
    file = planted.write_recipe(tmp_path / "poisoned.py", "mmdit", bad, math.nan)
    run = planted.record(file, "mmdit", tmp_path / "poisoned", *flags, code=1)
    assert "of step 7 is not finite" in run.output
    words = ["blame", str(run.directory), "--recipe", str(file), "--step"]
    assert cli._main([*words, "7"]) == 0
    receipt = strict_json.read_object(run.directory / "report" / "blame-step-7.json")
    assert receipt["suspects"] == bad
    assert receipt["finite_weights"]
    assert receipt["whole"]["loss"] == "NaN"
    # Of the batch of two nothing is left without them.
    assert (receipt["without_suspects"] is None) == (batch == 2)
    assert capsys.readouterr().out.splitlines()[-2] == f"suspects: {' '.join(map(str, bad))}"
    with pytest.raises(UsageError, match=r"--step 8: .* ends at step 6; a step up to 7 is required"):
        cli._main([*words, "8"])


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1.0])
def test_weights_are_blamed_only_where_they_are_not_finite(weight: float, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[1, 0] = weight
    training: Any = SimpleNamespace(prepared=SimpleNamespace(model=model))
    batch = {"sample": torch.tensor([8, 5]), "position": torch.arange(2), "weight": torch.ones(2)}
    values = {"loss": math.nan, "grad_norm": math.nan}
    request = measuring.Request(7, 6.0, str(tmp_path / "observed.json"))
    for _ in measuring._measured(StepBatches(6, [batch], 0.0), training, request):
        training.measure(SimpleNamespace(fields=lambda: values))
    measured = strict_json.read_object(Path(request.path))
    run = RecordedRun("", tmp_path, {}, [], [])
    found = blame._read(blame.Request("", 7), run, measured)
    assert found.without_suspects is None
    if weight == 1.0:
        assert (found.finite_weights, found.suspects) == (True, [5, 8])
        assert blame.report(found, 8)[-2:] == [
            "every sample of step 7 is a suspect, with finite weights: if these samples are sound, the weights have "
            "grown too large, and a lower learning rate may help",
            "suspects: 5 8",
        ]
    else:
        assert (found.finite_weights, found.suspects) == (False, [])
        assert blame.report(found, 8)[-1] == (
            "no suspects: the weights before step 7 are not finite, so an earlier step is at fault"
        )


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_cannot_be_written_to_is_measured_all_the_same(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A file in the place of the receipt's folder: permissions would not stop root.
    (tmp_path / "report").write_text("in the way")
    (tmp_path / "recipe.py").write_text("")
    run = RecordedRun(str(tmp_path), tmp_path, {"run_id": "e6c2cc91e152"}, [], [])
    values = {"loss": 2.0, "grad_norm": 3.0}
    one = {"sample": 8, "position": 0, "values": values, "distance": 0.5}
    measured = {"samples": [one], "whole": values, "suspects": [], "without_suspects": None, "finite_weights": True}
    monkeypatch.setattr(recorded, "open_run", lambda place: run)
    monkeypatch.setattr(recorded, "recipe_of", lambda run, recipe: tmp_path / "recipe.py")
    # The training itself is tested above.
    monkeypatch.setattr(again, "observe", lambda *words: measured)
    assert blame.blame(blame.Request(str(tmp_path), 1, as_json=as_json)) == 0
    printed = capsys.readouterr()
    if as_json:
        assert strict_json.parse(printed.out.encode())["samples"][0]["sample"] == 8
    else:
        assert "no suspects can be identified: distances need at least 10 samples" in printed.out
    assert "receipt" not in printed.out
    assert printed.err == f"no receipt: {tmp_path}/report/blame-step-1.json cannot be written (File exists)\n"


def test_a_step_of_few_samples_says_that_it_has_no_distances() -> None:
    norms = [1.0, 1.0, 100.0, 0.0]
    samples = [
        blame.Sample(number, number, {"loss": 2.0, "grad_norm": norm}, distance)
        for number, (norm, distance) in enumerate(zip(norms, suspects.distances(norms), strict=True))
    ]
    found = blame.Blame(7, 6.0, None, {"loss": 2.0, "grad_norm": 3.0}, samples, [], None, finite_weights=True)
    lines = blame.report(found, 8)
    text = "\n".join(lines)
    assert "inf" not in text
    needed = "distances need at least 10 samples with a finite gradient above 0, but step 7 has 3"
    assert f"no distance: {needed}" in lines
    assert lines[-1] == f"no suspects can be identified: {needed}"
    assert "stands out" not in text


def test_distances_are_those_of_the_median_and_its_deviations() -> None:
    # Logarithms 0 to 10, whose median is 5 and whose absolute deviations have the median 3.
    norms = [math.exp(k) for k in range(11)]
    found = suspects.distances(norms)
    assert found[5] == 0
    assert math.isclose(found[10], 5 / (1.4826 * 3), rel_tol=1e-12)
    assert math.isclose(found[0], -5 / (1.4826 * 3), rel_tol=1e-12)


def test_what_has_no_logarithm_has_a_distance_all_the_same() -> None:
    assert suspects.distances([*[1.0] * 10, 0.0, math.nan, math.inf])[10:] == [-math.inf, math.inf, math.inf]
    # Equal norms have no spread, and a hundredth counts as one.
    assert suspects.distances([*[1.0] * 10, math.exp(0.05)])[10] == pytest.approx(5)
    # Of a few samples nothing is usual.
    assert suspects.distances([1.0, 1.0, 100.0]) == [-math.inf] * 3


def test_passed_over_checkpoints_are_not_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the receipt alone on standard output."""
    run = RecordedRun(str(tmp_path), tmp_path, {}, [], [(4, tmp_path / "checkpoint_00000004")])
    assert again.find_beginning(run, tmp_path, 4, "--step 5").checkpoint is None
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("passed over: ")


def test_wrong_usage_is_refused_with_the_numbers(tmp_path: Path) -> None:
    for words, expected in (
        ({"step": 0}, "--step 0: steps are counted from 1"),
        ({"step": 1, "top": 0}, "--top 0: at least 1"),
        ({"step": 1, "limit": 0.0}, "--limit 0.0: a distance above 0"),
    ):
        with pytest.raises(UsageError, match=expected):
            blame.Request(str(tmp_path), **words)  # pyright: ignore[reportArgumentType]
