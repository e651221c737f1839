"""The names of its metrics that a recipe declares before it trains: those that its evaluation reports, no more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_train import experiment
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.config import UsageError
from accel_train.hub.options import HubConfig
from accel_train.metrics.gates import GATES_VARIABLE, refuse_unknown_gates
from accel_train.train_state import Experiment
from recipes import mmdit, pde

TEXTS = (
    "demo --data.path {}/texts.jsonl --data.vocab_size 300 --data.latent_dim 4 --data.heldout_fraction 0.2 "
    "--model.width 32 --model.depth 1 --model.heads 2 --schedule.warmup_steps 0 --log.progress_bar off "
    "--evaluation.samples 4 --evaluation.timesteps 1 --evaluation.shown 1 --evaluation.text.steps 1 "
    "--evaluation.latent.steps 1 --global_batch_size 4 --micro_batch_size 4"
).split()
PDE = (
    "pde_demo --data.train_samples 16 --data.heldout_samples 4 --data.resolution_1d 16 --data.resolution_2d 16 "
    "--data.snapshots 4 --data.workers 0 --model.width 32 --model.depth 2 --model.heads 2 --model.decoder_width 32 "
    "--global_batch_size 4 --micro_batch_size 4 --objective.autoencode_steps 0 --schedule.warmup_steps 0 "
    "--evaluation.samples 4 --evaluation.trajectories 2 --evaluation.conditioning.candidates 2 --log.progress_bar off"
).split()
RUNS: dict[str, tuple[Any, Sequence[str], str, str]] = {
    "mmdit": (mmdit, TEXTS, "l2t_nl", r"did you mean 'l2t_nll'\?\); it reports l2t_nll, .*unigram_nll"),
    "pde": (pde, PDE, "mean_nrms", r"did you mean 'mean_nrmse'\?\); it reports advection_nrmse, .*darcy_nrmse"),
    "pde-refined": (
        pde,
        [*PDE, "--model.residual_depth", "1", "--objective.residual_from", "1", "--objective.residual_steps", "2"],
        "mistakes",
        r"; it reports .*darcy_refined_gain",
    ),
}


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "the old king rode north with seven grey horses and a small bright lantern under rain".split()
    lines = (" ".join(words[(i * 7 + j * (1 + i % 5)) % len(words)] for j in range(6)) for i in range(60))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"{x} {i}"}) + "\n" for i, x in enumerate(lines)))
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def flags_of(name: str, folder: Path) -> list[str]:
    given = [word.replace("{}", str(folder)) for word in RUNS[name][1]]
    return [*given, "--max_steps", "2", "--output_dir", str(folder / "run")]


@pytest.mark.parametrize("name", ["mmdit", "pde", pytest.param("pde-refined", marks=pytest.mark.slow)])
def test_what_is_declared_is_what_an_evaluation_reports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of it is in the manifest, from which the best is chosen."""
    declared: list[Sequence[str]] = []
    real = experiment.open_experiment

    def open_experiment(*arguments: Any, metrics: Sequence[str], **named: Any) -> Experiment:
        declared.append(metrics)
        return real(*arguments, metrics=metrics, **named)

    monkeypatch.setattr(experiment, "open_experiment", open_experiment)
    run = tmp_path / "run"
    assert RUNS[name][0].main(flags_of(name, tmp_path)) == 0
    reported = json.loads((run / "report" / "evaluation.json").read_text()).keys() - {"step"}
    assert sorted(declared[0]) == sorted(reported)
    manifest = json.loads((run / "checkpoints" / "checkpoint_00000002" / "manifest.json").read_text())
    assert manifest["metrics"].keys() == reported


@pytest.mark.fault(
    "R6", injected="a best_metric that no evaluation reports", outcome="exit 2, with the names of those it reports"
)
@pytest.mark.parametrize("name", RUNS)
def test_a_best_metric_that_no_evaluation_reports_is_refused(name: str, tmp_path: Path) -> None:
    recipe, _, wrong, says = RUNS[name]
    asked = ["--checkpoints.keep_best", "1", "--checkpoints.best_metric", wrong]
    with pytest.raises(UsageError, match=rf"checkpoints\.best_metric: '{wrong}' is not reported by .*{says}"):
        recipe.main([*flags_of(name, tmp_path), *asked])
    assert not (tmp_path / "run" / "run.json").exists()


def test_push_best_without_a_metric_is_refused_before_anything_starts() -> None:
    hub = HubConfig(repo_id="me/model", push="best")
    with pytest.raises(UsageError, match=r"set checkpoints\.best_metric"):
        experiment.ExperimentConfig(max_steps=1, hub=hub)
    experiment.ExperimentConfig(max_steps=1, hub=hub, checkpoints=CheckpointConfig(best_metric="loss"))


@pytest.mark.parametrize(
    ("gates", "says"),
    [
        ("speedup>1\nnll_delta<=3%\nnll<1\nloss_text_delta<1\nevaluation_nll<3\nmfu_ratio>1\nmy_delta_delta<1", None),
        ("nl_delta<=1", r"nl_delta is not known \(did you mean 'nll_delta'\?.*step_seconds.*nll"),
        ("speedup>1\nsped>1", r"sped is not known \(did you mean 'speedup'"),
        ("step_secnds_ratio<1", "did you mean 'step_seconds_ratio'"),
        ("nll_text<1", "nll_text is not known"),
        ("", None),
    ],
)
def test_a_run_of_a_comparison_refuses_gates_on_what_it_will_not_report(
    gates: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GATES_VARIABLE, gates)
    if says is None:
        refuse_unknown_gates(["nll", "my_delta"])
    else:
        with pytest.raises(UsageError, match=says):
            refuse_unknown_gates(["nll", "my_delta"])
