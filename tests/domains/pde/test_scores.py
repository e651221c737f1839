"""Figures of fields against numbers made by hand, on any number of processes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from matplotlib import pyplot
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.pde import losses, pictures, scores
from accel_train.domains.pde.data import files
from accel_train.domains.pde.data.equations import PdeDataConfig
from accel_train.domains.pde.data.files import FieldHeader
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.data.rows import FieldData
from accel_train.domains.pde.fields import Scale
from accel_train.domains.pde.options import MOST_CANDIDATES, ConditioningConfig, EvaluationConfig
from accel_train.domains.pde.pictures import Panel, limits
from accel_train.domains.pde.pipeline import FieldPipeline
from accel_train.domains.pde.scoring import trajectories
from accel_train.domains.pde.scoring.chosen import scored_samples


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FieldData:
    cache = str(tmp_path_factory.mktemp("cache"))
    options = PdeDataConfig(
        train_samples=32, heldout_samples=8, resolution_1d=32, resolution_2d=8, snapshots=9, workers=0, cache_dir=cache
    )
    return prepare_pde(options)


def test_row_figures_are_those_of_the_physical_fields(data: FieldData) -> None:
    task, rows = data.tasks[0], data.heldout["advection"]
    batch = rows.batch([0, 1, 2, 3]) | {"weight": torch.tensor([1.0, 1.0, 1.0, 0.0])}
    prediction = batch["target"] + 0.1 * torch.randn(batch["target"].shape, generator=torch.Generator().manual_seed(0))
    found = scores.row_metrics(task, scores.row_sums(task, prediction, batch))

    true, made = (x.double().numpy() * task.target.std[0] + task.target.mean[0] for x in (batch["target"], prediction))
    given = batch["input"].double().numpy() * task.input.std[0] + task.input.mean[0]
    each = [np.sqrt(((made[i] - true[i]) ** 2).mean() / (true[i] ** 2).mean()) for i in range(3)]
    assert found["advection_nrmse"] == pytest.approx(np.mean(each), rel=1e-5)
    pooled = np.sqrt(((made[:3] - true[:3]) ** 2).sum() / (true[:3] ** 2).sum())
    assert found["advection_nrmse_pooled"] == pytest.approx(pooled, rel=1e-5)
    gaps = [abs(made[i].mean() - given[i].mean()) / np.abs(given[i]).mean() for i in range(3)]
    assert found["advection_conservation_gap"] == pytest.approx(np.mean(gaps), rel=1e-4)
    assert "darcy_conservation_gap" not in scores.row_metrics(data.tasks[1], torch.ones(7))


def test_what_a_steady_task_conserves_is_compared_in_units_of_input_and_target() -> None:
    scales = Scale((1.0,), (2.0,)), Scale((3.0,), (0.5,))
    task: Any = SimpleNamespace(common_scales=lambda: scales, conserved=True)
    physical = 3 + torch.rand(2, 1, 1, 8)
    given, target = (scale.normalise(physical) for scale in scales)
    *_, gap = scores.row_sums(task, target, {"input": given, "target": target, "weight": torch.ones(2)}).tolist()
    assert gap == pytest.approx(0, abs=1e-6)


def test_refined_figures_stand_beside_the_plain_ones(data: FieldData) -> None:
    plain = torch.tensor([4.0, 4.0, 0.8, 9.0, 9.0, 0.4, 0.1], dtype=torch.float64)
    refined = torch.tensor([4.0, 4.0, 0.6, 9.0, 9.0, 0.5, 0.1], dtype=torch.float64)
    found = scores.row_metrics(data.tasks[0], plain, refined)
    assert found["advection_nrmse"] == pytest.approx(0.2)
    assert found["advection_refined_nrmse"] == pytest.approx(0.15)
    assert found["advection_refined_spectral_error"] == pytest.approx(0.125)
    assert found["advection_refined_gain"] == pytest.approx(0.25)
    assert not [name for name in scores.row_metrics(data.tasks[0], plain) if "refined" in name]
    figures = {"advection_nrmse": 0.2, "darcy_nrmse": 0.1, "advection_refined_nrmse": 0.15}
    assert scores.table(data, figures) == [
        "advection: nRMSE 0.2000, refined 0.1500",
        "darcy: nRMSE 0.1000",
    ]


def exact(state: Tensor) -> Tensor:
    """Not advection: a step that keeps the integral and is easy to follow."""
    return state.roll(1, -1)


def sums_of(data: FieldData, world_size: int, conditioned: bool, batch_size: int = 64) -> Tensor:
    total = torch.zeros(4, 4, dtype=torch.float64)
    for rank in range(world_size):
        place = rank, world_size, torch.device("cpu")
        chosen = scored_samples(data, "advection", 5)
        batches = list(
            trajectories.rollout_batches(data.tasks[0], data.heldout["advection"], chosen, batch_size, place)
        )
        share = -(-5 // world_size)
        assert [len(paths.sample) for paths in batches][:-1] == [batch_size] * (-(-share // batch_size) - 1)
        for paths in batches:
            config = ConditioningConfig(candidates=3, beam=2, horizon=2)
            made = paths.conditioned(exact, config, seed=0) if conditioned else paths.plain(exact)
            assert made.shape == paths.truth[:, 1:].shape
            total += paths.sums(made)
    return total


@pytest.mark.parametrize("conditioned", [False, True])
def test_rollouts_are_the_same_on_any_number_of_processes(data: FieldData, conditioned: bool) -> None:
    one = sums_of(data, 1, conditioned)
    assert one[0].tolist() == [5.0] * 4
    for world_size, batch_size in ((1, 2), (2, 64), (2, 1), (3, 1)):
        torch.testing.assert_close(sums_of(data, world_size, conditioned, batch_size), one, rtol=1e-6, atol=1e-9)


def test_candidates_are_those_of_the_boundary_and_judged_by_all_of_their_steps(
    data: FieldData, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = 0, 1, torch.device("cpu")
    (paths,) = trajectories.rollout_batches(data.tasks[0], data.heldout["advection"], torch.arange(2), 64, place)
    seen: list[Any] = []
    monkeypatch.setattr(trajectories.rollout, "conditioned_rollout", lambda *given: seen.append(given))
    for boundary in ("periodic", "outflow"):
        paths.task = replace(data.tasks[0], boundary=boundary)
        paths.conditioned(exact, ConditioningConfig(), seed=0)
    noises = len(trajectories.NOISES)
    assert [len(proposals) for proposals, *_ in seen] == [1 + len(trajectories.SHIFTS) + noises, 1 + noises]
    _, _, score, first, *_ = seen[0]
    other = first + 1
    torch.testing.assert_close(score(first, torch.stack([first, other], 1)), score(first, other[:, None]) / 2)


def test_fields_of_a_rollout_are_shown_at_its_end() -> None:
    truth = torch.rand(1, 4, 1, 2, 3)
    predicted = torch.rand(1, 3, 1, 2, 3)
    task = SimpleNamespace(target=Scale((0.0,), (1.0,)), grid=(2, 3), target_channels=1)
    shown, prediction, _ = trajectories.Rollouts.panels(cast(Any, SimpleNamespace(task=task, truth=truth)), predicted)
    assert torch.equal(shown.values, truth[0, -1, 0])
    assert torch.equal(prediction.values, predicted[0, -1, 0])
    assert (shown.title, shown.first) == ("rollout: truth", 0)


def test_pictures_name_the_channel_and_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 0 is the input, which a rollout does not show, and the picture of a prediction does."""
    truth = torch.rand(1, 4, 2, 1, 3)
    predicted = torch.rand(1, 3, 2, 1, 3)
    task = SimpleNamespace(target=Scale((0.0, 0.0), (1.0, 1.0)), grid=(1, 3), target_channels=2, has_time=True)
    panels = trajectories.Rollouts.panels(cast(Any, SimpleNamespace(task=task, truth=truth)), predicted)
    assert [panel.title.split(" (")[0] for panel in panels] == [
        "rollout: truth, channel 0",
        "prediction, channel 0",
        "error, channel 0",
    ]
    assert {(panel.down, panel.first, len(panel.values)) for panel in panels} == {("step in time", 1, 3)}
    (sampled,) = FieldPipeline._panels(cast(Any, None), cast(Any, task), truth[0, 0], predicted[0])
    assert (sampled.title, sampled.down, sampled.first) == ("prediction, channel 0", "step in time", 0)
    assert torch.equal(sampled.values[1:], panels[1].values)
    ends: list[Any] = []
    close = pyplot.close
    monkeypatch.setattr(
        pyplot, "close", lambda figure: close(figure) or ends.extend(axis.get_ylim() for axis in figure.axes[:2])
    )
    pictures.write_fields(tmp_path / "fields.png", [("a", [panels[1], sampled])])
    assert ends == [(3.5, 0.5), (3.5, -0.5)]


def test_rollout_figures(data: FieldData) -> None:
    plain = torch.tensor([[2.0, 2.0], [2.0, 2.0], [0.2, 0.6], [0.02, 0.02]], dtype=torch.float64)
    better = torch.tensor([[2.0, 2.0], [2.0, 2.0], [0.1, 0.3], [0.0, 0.0]], dtype=torch.float64)
    found = trajectories.rollout_metrics(data.tasks[0], plain, better)
    assert found["advection_rollout_nrmse"] == pytest.approx(0.2)
    assert found["advection_rollout_nrmse_last"] == pytest.approx(0.3)
    assert found["advection_rollout_conservation_gap"] == pytest.approx(0.01)
    assert found["advection_conditioned_gain"] == pytest.approx(0.5)
    assert "advection_conditioned_gain" not in trajectories.rollout_metrics(data.tasks[0], plain, None)


def of_size(folder: Path, size: float) -> FieldData:
    """Prepare random fields of this size, the same but for it."""
    draws = np.random.default_rng(0)
    header = FieldHeader("heat", ("a",), input_channels=2, dt=0.1, boundary="periodic", conserved=True)
    folder.mkdir()
    for split in ("train", "heldout"):
        values = (draws.normal(0.3, 1.0, (12, 4, 2, 1, 16)) * [[[1.0]], [[0.1]]]).astype(np.float32)
        files.write_fields(folder / f"heat_{split}.h5", header, 12, [(values * np.float32(size), np.ones((12, 1)))])
    return prepare_pde(PdeDataConfig(path=str(folder), tasks=("heat",), cache_dir=str(folder / "cache")))


def figures_of(data: FieldData) -> dict[str, float]:
    (task,), rows = data.tasks, data.heldout["heat"]
    batch = rows.batch([0, 1, 2, 3]) | {"weight": torch.ones(4)}
    plain = scores.row_sums(task, wrong(batch["input"]), batch)
    place = 0, 1, torch.device("cpu")
    (paths,) = trajectories.rollout_batches(task, rows, torch.arange(5), 64, place)
    config = ConditioningConfig(candidates=3, beam=2, horizon=2)
    rolled = [paths.sums(made) for made in (paths.plain(wrong), paths.conditioned(wrong, config, seed=0))]
    return scores.row_metrics(task, plain) | trajectories.rollout_metrics(task, *rolled)


def wrong(state: Tensor) -> Tensor:
    """A step that changes the integral, so that the search has something to choose."""
    return state.roll(1, -1) * 0.9 + 0.1 * state.square()


def test_figures_do_not_depend_on_the_unit_of_the_fields(tmp_path: Path) -> None:
    usual = figures_of(of_size(tmp_path / "one", 1.0))
    assert usual["heat_nrmse"] > 0.5
    assert usual["heat_conservation_gap"] > 0.01
    for size in (2.0**-110, 2.0**-73, 2.0**66, 2.0**110):  # down to 1e-33 and up to 1e33
        assert figures_of(of_size(tmp_path / f"{size:g}", size)) == usual, size
    for size in (1e-30, 1e-22, 1e20, 1e30):
        assert figures_of(of_size(tmp_path / f"{size:g}", size)) == pytest.approx(usual, rel=1e-4), size


def test_the_conservation_loss_does_not_depend_on_the_unit_of_the_fields(tmp_path: Path) -> None:
    found: list[float] = []
    for size in (1.0, 2.0**-73, 2.0**66):
        data = of_size(tmp_path / f"{size:g}", size)
        input = data.train.parts[0].batch([0, 1])["input"].flatten(2)
        output: Any = SimpleNamespace(prediction=input + 0.5)
        forward = losses.Forward({"query_input": input, "query_target": input}, data.tasks[0], output)
        found.append(float(losses.TERMS["conservation"].losses(forward).sum()))
    assert found[0] > 0.1
    assert found == [found[0]] * 3


@pytest.mark.parametrize("size", [1e-37, 1e37])
def test_fields_that_fp32_holds_only_in_part_are_refused(tmp_path: Path, size: float) -> None:
    with pytest.raises(UsageError, match=r"channel 0 of .*heat_train\.h5 has mean .* and standard deviation"):
        of_size(tmp_path / "x", size)


def test_what_needs_no_model_stands_beside_the_model(data: FieldData) -> None:
    others = scores.baseline_metrics(data, 8)
    assert {"advection_persistence_nrmse", "darcy_linear_fit_nrmse", "darcy_training_mean_nrmse"} <= set(others)
    assert "darcy_persistence_nrmse" not in others
    figures = others | {"advection_nrmse": 0.04, "darcy_nrmse": 0.01}
    lines = scores.table(data, figures)
    assert lines[0].startswith("advection: nRMSE 0.0400; ")
    assert f"persistence {others['advection_persistence_nrmse']:.4f}" in lines[0]
    assert scores.mean_nrmse(data, figures) == pytest.approx(0.02)


@pytest.mark.parametrize(("name", "metric"), [("advection_rollout", "advection_rollout_nrmse"), ("mean", "mean_nrmse")])
def test_tasks_whose_metrics_would_have_one_name_are_refused(data: FieldData, name: str, metric: str) -> None:
    assert len(set(scores.metric_names(data, refined=True))) == len(scores.metric_names(data, refined=True))
    tasks = (data.tasks[0], replace(data.tasks[1], name=name))
    rows = data.training | {name: data.training["darcy"]}
    renamed = replace(data, assets=replace(data.assets, tasks=tasks), training=rows)
    with pytest.raises(UsageError, match=f"data.tasks advection {name}: the metric {metric} would belong to two"):
        scores.metric_names(renamed, refined=True)


@pytest.mark.usefixtures("busy_machine")
def test_pictures_are_written_whole(tmp_path: Path, data: FieldData) -> None:
    task, rows = data.tasks[1], data.heldout["darcy"]
    batch = rows.batch([0])
    first = data.tasks[0], data, EvaluationConfig(trajectories=2), 2
    figures, panels = trajectories.evaluate_rollouts(Accelerator(cpu=True), *first, lambda _: exact, 0)
    rows = [("a", panels), ("d", scores.row_panels(task, batch, batch["target"]))]
    pictures.write_fields(tmp_path / "fields.png", rows)
    assert (tmp_path / "fields.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fields.json", "fields.png"]
    curve = json.loads((tmp_path / "fields.json").read_text())["a"]["rollout: error against time"]
    assert curve["at"] == pytest.approx([data.tasks[0].dt * n for n in (1, 2, 3, 4)])
    assert np.mean(curve["lines"]["rollout"]) == pytest.approx(figures["advection_rollout_nrmse"])
    assert curve["lines"]["rollout"][-1] == pytest.approx(figures["advection_rollout_nrmse_last"])
    assert np.mean(curve["lines"]["conditioned"]) == pytest.approx(figures["advection_conditioned_nrmse"])


def test_errors_are_drawn_around_zero_with_their_nrmse(data: FieldData) -> None:
    batch = data.heldout["darcy"].batch([0])
    *_, truth, prediction, error = scores.row_panels(data.tasks[1], batch, batch["target"] + 0.5)
    nrmse = float((prediction.values - truth.values).norm() / truth.values.norm())
    assert error.title == f"error (nRMSE {nrmse:.3g})"
    assert error.signed
    assert not truth.signed
    assert not prediction.signed
    low, high = limits([error])
    assert low == -high
    assert high == pytest.approx(float(error.values.abs().max()))
    low, high = limits([truth, prediction])
    assert (low, high) == (float(truth.values.min()), float(prediction.values.max()))


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    pictures.write_fields(tmp_path / "file" / "report" / "fields.png", [("a", [Panel("t", torch.rand(2, 3), "u")])])
    assert "could not be written" in caplog.text


def test_a_field_that_cannot_be_moved_has_as_many_candidates_as_may_be_asked_for() -> None:
    assert 1 + len(trajectories.NOISES) >= MOST_CANDIDATES


WAVE = FieldHeader("wave", ("a",), input_channels=3, dt=0.1, boundary="periodic", conserved=False)
SIZES = np.array([1.0, 1e-3, 50.0])[:, None, None]


def waves(samples: int, seed: int) -> Any:
    """(N, T, C, H, W) of three channels that vary by very different amounts, with a mean."""
    return SIZES * np.random.default_rng(seed).normal(0.3, 1.0, (samples, 4, 3, 1, 16))


def prepared(folder: Path, train: Any, heldout: Any, header: FieldHeader = WAVE) -> FieldData:
    for split, values in (("train", train), ("heldout", heldout)):
        blocks = [(values.astype(np.float32), np.arange(len(values))[:, None] / len(values))]
        files.write_fields(folder / f"{header.task}_{split}.h5", header, len(values), blocks)
    options = PdeDataConfig(path=str(folder), tasks=(header.task,), time_stride=1, cache_dir=str(folder / "cache"))
    return prepare_pde(options)


def model(batch: dict[str, Tensor]) -> Tensor:
    """Predict something else than the target."""
    return 0.9 * batch["input"] + 0.1 * batch["parameters"][:, :, None, None]


@pytest.fixture
def predicting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `model` predict."""

    def predict(_: Any, batch: dict[str, Tensor], *more: Any) -> losses.Prediction:
        return losses.Prediction(model(batch), None, None)

    monkeypatch.setattr(losses, "predict", predict)


def evaluated(data: FieldData, options: EvaluationConfig, at_once: int = 7) -> dict[str, float]:
    found, _ = scores.evaluate_task(Accelerator(cpu=True), exact, data, 0, options, at_once, 1, 0)
    return found


@pytest.mark.usefixtures("predicting")
def test_the_error_of_each_channel_is_that_of_its_physical_fields(tmp_path: Path) -> None:
    heldout = waves(5, 1)
    heldout[1, 2, 0] = 0  # one channel of one target
    data = prepared(tmp_path, waves(9, 0), heldout)
    found = evaluated(data, EvaluationConfig(samples=15, trajectories=1))
    (task,), rows = data.tasks, data.heldout["wave"]
    batch = rows.batch(list(range(15)))
    std, mean = (np.array(values)[:, None, None] for values in (task.target.std, task.target.mean))
    made = model(batch).double().numpy() * std + mean
    true = np.concatenate([heldout[sample, 1:] for sample in range(5)])
    order = [sample * 3 + (number + sample) % 3 for number in range(3) for sample in range(5)]
    true = true[order]
    with np.errstate(invalid="ignore", divide="ignore"):
        each = np.sqrt(((made - true) ** 2).mean((2, 3)) / (true**2).mean((2, 3)))
    each[~np.isfinite(each)] = np.nan
    assert np.isnan(each).sum() == 1
    expected = np.nanmean(each, 0)
    channels = [found[f"wave_nrmse_channel{channel}"] for channel in range(3)]
    assert channels == pytest.approx(expected, rel=1e-4)
    assert found["wave_nrmse_channels"] == pytest.approx(expected.mean(), rel=1e-4)
    together = np.sqrt(((made - true) ** 2).mean((1, 2, 3)) / (true**2).mean((1, 2, 3))).mean()
    assert found["wave_nrmse"] == pytest.approx(together, rel=1e-4)

    baselines = scores.baseline_metrics(data, 15)
    given = np.concatenate([heldout[sample, :-1] for sample in range(5)])[order]
    each = np.sqrt(((given - true) ** 2).mean((2, 3)) / np.where(each > 0, (true**2).mean((2, 3)), np.nan))
    persistence = [baselines[f"wave_persistence_nrmse_channel{channel}"] for channel in range(3)]
    assert persistence == pytest.approx(np.nanmean(each, 0), rel=1e-4)

    text = " ".join(f"{channel:.4f}" for channel in channels)
    assert scores.table(data, found) == [f"wave: nRMSE {together:.4f} (of each channel {text})"]
    names = scores.metric_names(data, refined=False)
    assert sorted([*found, *baselines, scores.MEAN]) == sorted(names)


def test_channels_are_numbered_as_in_the_files(data: FieldData) -> None:
    steady = replace(data.tasks[1], input_channels=2, target_channels=2)
    found = scores.row_metrics(steady, torch.ones(7), channels=torch.ones(2, 2))
    assert {"darcy_nrmse_channel2", "darcy_nrmse_channel3"} <= set(found)


@pytest.mark.usefixtures("predicting")
def test_targets_of_zeros_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the model, of the baselines and of rollouts alike."""
    caplog.set_level("INFO")
    kept = waves(5, 1)
    with_zeros = np.insert(kept, 2, 0.0, axis=0)
    figures: list[dict[str, float]] = []
    for name, heldout in (("kept", kept), ("zeros", with_zeros)):
        caplog.clear()
        (tmp_path / name).mkdir()
        data = prepared(tmp_path / name, waves(9, 0), heldout)
        # The parameter, which the model reads, is that of the sample's place.
        data.heldout["wave"].parameters.zero_()
        found = evaluated(data, EvaluationConfig())
        figures.append({**found, **scores.baseline_metrics(data, 256)})
    of_kept, of_both = figures
    names = [name for name in of_kept if "pooled" not in name]
    assert [of_both[name] for name in names] == pytest.approx([of_kept[name] for name in names], rel=1e-4)
    assert of_both["wave_evaluated_samples"] == 15
    assert "wave: 3 of 18 scored targets are 0 everywhere" in caplog.text
    assert "wave: 3 of 18 fields of the rollouts are 0 everywhere" in caplog.text


@pytest.mark.usefixtures("predicting")
def test_where_all_is_zeros_there_is_no_error_and_nothing_fails(tmp_path: Path) -> None:
    """The last snapshots of a decay, as single precision holds it, and all rows that are scored."""
    heldout = waves(5, 1)
    heldout[:, 3] = 0
    data = prepared(tmp_path, waves(9, 0), heldout)
    found = evaluated(data, EvaluationConfig())
    assert found["wave_evaluated_samples"] == 10
    assert math.isnan(found["wave_rollout_nrmse_last"])
    assert found["wave_rollout_nrmse"] > 0
    sums = torch.tensor([[4.0, 4.0, 4.0], [4.0, 4.0, 0.0], [2.0, math.nan, 0.0], [0.0, 0.0, 0.0]])
    assert math.isnan(
        trajectories.rollout_metrics(data.tasks[0], sums, None)["wave_rollout_nrmse"]
    )  # one that diverges
    nothing = torch.tensor([4.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    metrics = scores.row_metrics(data.tasks[0], nothing)
    assert math.isnan(metrics["wave_nrmse"])
    assert math.isnan(scores.mean_nrmse(data, metrics))
