"""The held-out samples that an evaluation scores, out of those of all files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from accelerate import Accelerator

from accel_train.domains.pde import losses, scores
from accel_train.domains.pde.data.equations import PdeDataConfig
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.data.rows import FieldData
from accel_train.domains.pde.options import ConditioningConfig, EvaluationConfig
from accel_train.domains.pde.scoring import trajectories
from accel_train.domains.pde.scoring.chosen import notices, scored_rows, scored_samples
from accel_train.metrics.evaluation import heldout_batches

SPEEDS = (0.1, 1.0, 4.0)
HELD_OUT = 12
"""Of each file."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FieldData:
    """A file of each speed, as PDEBench has them."""
    folder = tmp_path_factory.mktemp("pdebench")
    draws = np.random.default_rng(0)
    for speed in SPEEDS:
        with h5py.File(folder / f"1D_Advection_Sols_beta{speed}.hdf5", "w") as content:
            content["tensor"] = draws.normal(size=(10 * HELD_OUT, 5, 16)).astype(np.float32)
            content["x-coordinate"] = np.arange(16) / 16
            content["t-coordinate"] = np.arange(6) * 0.05
    return prepare_pde(
        PdeDataConfig(path=str(folder), tasks=("advection",), time_stride=1, cache_dir=str(folder / "cache"))
    )


def of_counts(samples: int, rows: int, generated: bool = False) -> Any:
    """Data without content: a choice is of the counts alone."""
    part = SimpleNamespace(samples=samples)
    heldout: Any = type("Rows", (SimpleNamespace,), {"__len__": lambda _: rows})(**vars(part))
    return SimpleNamespace(heldout={"t": heldout}, generated=generated)


def speeds_of(data: FieldData, parameters: torch.Tensor) -> list[float]:
    task = data.tasks[0]
    values = task.parameter.denormalise(parameters[:, :1], 0)
    return sorted(round(value, 4) for value in values.exp().flatten().tolist())


def test_some_samples_of_every_file_are_scored_by_the_model_and_the_baselines(
    data: FieldData, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(scores, "baselines", lambda train, heldout, *_, **__: seen.append(heldout) or {})
    for wanted in (6, 9, HELD_OUT):
        chosen = scored_rows(data, "advection", wanted)
        (batch,) = heldout_batches(Accelerator(cpu=True), chosen, len(chosen), wanted)
        assert speeds_of(data, batch["parameters"]) == sorted(SPEEDS * (wanted // 3))
        scores.baseline_metrics.__wrapped__(data, wanted)
        torch.testing.assert_close(seen[-1].batch(list(range(wanted)))["target"], batch["target"])


def test_trajectories_of_every_file_are_rolled_out_on_any_number_of_processes(data: FieldData) -> None:
    task, rows = data.tasks[0], data.heldout["advection"]
    chosen = scored_samples(data, "advection", 6)
    for world_size in (1, 2, 4):
        found: list[int] = []
        for rank in range(world_size):
            place = rank, world_size, torch.device("cpu")
            for paths in trajectories.rollout_batches(task, rows, chosen, 2, place):
                found += paths.sample[paths.weight > 0].tolist()
        assert sorted(found) == chosen.tolist()
    assert speeds_of(data, rows.parameters[chosen]) == sorted(SPEEDS * 2)


def test_an_evaluation_is_of_the_chosen_rows_and_trajectories(data: FieldData, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    real = trajectories.rollout_batches

    def rollout_batches(task: Any, rows: Any, chosen: torch.Tensor, *more: Any) -> Any:
        kept.append(chosen)
        return real(task, rows, chosen, *more)

    monkeypatch.setattr(trajectories, "rollout_batches", rollout_batches)
    # The input unchanged, which is what persistence predicts.
    monkeypatch.setattr(
        losses, "predict", lambda _, batch, *more: losses.Prediction(batch["input"], None, lambda *of: of)
    )
    options = EvaluationConfig(samples=9, trajectories=6, conditioning=ConditioningConfig(1, 1, 1))
    found, _ = scores.evaluate_task(Accelerator(cpu=True), lambda: None, data, 0, options, 4, 1, 0)
    assert kept[0].tolist() == scored_samples(data, "advection", 6).tolist()
    persistence = scores.baseline_metrics(data, 9)["advection_persistence_nrmse"]
    assert found["advection_nrmse"] == pytest.approx(persistence, rel=1e-5)


@pytest.mark.parametrize(("samples", "count"), [(36, 6), (37, 6), (780, 256), (5, 4), (2, 1)])
def test_one_sample_of_each_of_equal_runs_is_chosen(samples: int, count: int) -> None:
    chosen = scored_samples(of_counts(samples, samples * 4), "t", count)
    run = chosen * count / samples
    assert len(chosen) == count
    assert all(abs(place - number - 0.5) <= 0.5 + count / samples for number, place in enumerate(run.tolist()))
    assert chosen.diff().gt(0).all()


def test_samples_in_turn_of_a_few_parameters_are_not_all_of_one() -> None:
    chosen = scored_samples(of_counts(800, 800), "t", 100)
    counts = (chosen % 8).bincount(minlength=8)
    assert counts.min() >= 4


def test_no_sample_has_two_rows_more_than_another() -> None:
    for wanted, samples in ((3, 10), (10, 10), (24, 10), (40, 10), (99, 10)):
        chosen = scored_rows(of_counts(samples, 40), "t", wanted).chosen
        assert len(set(chosen.tolist())) == len(chosen) == min(wanted, 40)
        counts = (chosen % samples).bincount(minlength=samples)
        assert counts.max() - counts.min() <= 1


def test_of_generated_data_the_first_are_scored() -> None:
    data = of_counts(10, 40, generated=True)
    for wanted in (3, 10, 24, 99):
        assert scored_rows(data, "t", wanted).chosen.tolist() == list(range(min(wanted, 40)))
        assert scored_samples(data, "t", wanted).tolist() == list(range(min(wanted, 10)))


def test_how_many_are_scored_is_said_unless_all_are(data: FieldData) -> None:
    assert list(notices(data, EvaluationConfig(samples=36, trajectories=36))) == []
    assert list(notices(data, EvaluationConfig(samples=20, trajectories=8))) == [
        "advection: of 36 held-out samples 20 are scored (evaluation.samples) and 8 are rolled out "
        "(evaluation.trajectories), spread evenly over them"
    ]
    assert list(notices(data, EvaluationConfig(samples=36, trajectories=8))) == [
        "advection: of 36 held-out samples 8 are rolled out (evaluation.trajectories), spread evenly over them"
    ]
