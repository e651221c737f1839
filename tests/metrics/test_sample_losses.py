"""Losses by sample: the same step as with sums, means by timestep, and the file of single samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.metrics.details.by_sample import MOST_STEPS, SampleLosses
from accel_train.metrics.records import read_metrics, rewind
from accel_train.store import failpoints
from accel_train.store.names import METRICS_FILE, OF_A_RUN, SAMPLE_LOSSES_FILE
from accel_train.training.accumulation import Batch, GradientWindow
from accel_train.training.step_guard import NonFiniteError, StepResult
from tests.distributed.launching import Layout, run_recipe

COEFFICIENTS = {"main": 1.0, "aux": 0.3, "off": 0.0}
TIMESTEPS = {"main": "time"}


def batch(count: int = 13) -> Batch:
    generator = torch.Generator().manual_seed(0)
    weight = torch.ones(count)
    weight[-2:] = 0.0  # fills up the last micro-batch
    return {
        "x": torch.randn(count, 6, generator=generator),
        "y": torch.randn(count, 2, generator=generator),
        "time": torch.rand(count, generator=generator),
        "tokens": torch.randint(0, 4, (count,), generator=generator).float() * weight,
        "weight": weight,
        "sample": torch.arange(count) + 100,
        "occurrence": torch.arange(count),
    }


def losses(model: nn.Module, inputs: Batch) -> dict[str, Tensor]:
    out = model(inputs["x"])
    main = (out - inputs["y"]).square().sum(1) * inputs["weight"]
    return {"main": main, "aux": out.abs().sum(1) * inputs["tokens"], "off": main}


def weights(inputs: Batch) -> dict[str, Tensor]:
    return {"main": inputs["weight"], "aux": inputs["tokens"], "off": inputs["weight"]}


def a_step(accelerator: Accelerator, size: int, step: int = 7, *, summed: bool = False) -> tuple[StepResult, Tensor]:
    """One step in micro-batches of ``size``: its result and its gradient."""
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(6, 2))
    whole = batch()
    parts: list[tuple[Batch, dict[str, Tensor]]] = []
    for index in torch.arange(len(whole["x"])).split(size):
        inputs = {name: value[index] for name, value in whole.items()}
        found = weights(inputs)
        parts.append((inputs, {name: value.sum() for name, value in found.items()} if summed else found))
    window = GradientWindow(accelerator, model, parts, COEFFICIENTS, step)
    for inputs in window:
        found = losses(model, inputs)
        window.backward({name: value.sum() for name, value in found.items()} if summed else found)
    result = window.finish(0.0)
    return result, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("size", [13, 5])
def test_losses_of_samples_train_as_their_sums_do(accelerator: Accelerator, size: int) -> None:
    by_sample, gradient = a_step(accelerator, size)
    in_sums, same_gradient = a_step(accelerator, size, summed=True)
    assert torch.equal(gradient, same_gradient)
    assert by_sample.fields() == in_sums.fields()


@pytest.mark.parametrize("size", [13, 5, 1])
def test_the_mean_by_time_is_that_of_the_whole_batch(accelerator: Accelerator, size: int) -> None:
    found = SampleLosses(accelerator, TIMESTEPS, None, 0)
    result, _ = a_step(accelerator, size)
    found.add(result)
    found.add(result)  # a second step, the same
    torch.manual_seed(0)
    whole = batch()
    values = losses(nn.Linear(6, 2), whole)["main"].detach()
    expected: dict[str, float] = {}
    for band in range(4):
        inside = (whole["time"] >= band / 4) & (whole["time"] < (band + 1) / 4) & (whole["weight"] > 0)
        expected[f"main_at_{band / 4:.2f}"] = float(values[inside].mean())
    assert len(expected) == 4
    assert found.take() == pytest.approx(expected, rel=1e-6)
    assert found.take() == {}, "nothing since the last log point"


def test_a_time_of_one_is_in_the_last_band(accelerator: Accelerator) -> None:
    found = SampleLosses(accelerator, TIMESTEPS, None, 0)
    result, _ = a_step(accelerator, 13)
    for rows in result.evidence.rows:
        rows["time"].fill_(1.0)
    found.add(result)
    assert list(found.take()) == ["main_at_0.75"]


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / SAMPLE_LOSSES_FILE).read_text().splitlines()]


def test_each_sample_is_a_line(accelerator: Accelerator, tmp_path: Path) -> None:
    found = SampleLosses(accelerator, TIMESTEPS, tmp_path, 0)
    for step in (0, 1):
        found.add(a_step(accelerator, 5, step)[0])
    found.take()
    lines = lines_of(tmp_path)
    whole = batch()
    torch.manual_seed(0)
    values = {name: value.detach() for name, value in losses(nn.Linear(6, 2), whole).items()}
    assert [(line["step"], line["sample"]) for line in lines] == [(s, 100 + n) for s in (1, 2) for n in range(11)]
    for number, line in enumerate(lines[:11]):
        tokens = float(whole["tokens"][number])
        assert line["loss_main"] == pytest.approx(float(values["main"][number]), rel=1e-6)
        assert line["time_main"] == float(whole["time"][number])
        assert "loss_off" not in line
        assert ("loss_aux" in line) == (tokens > 0)
        if tokens > 0:
            assert line["weight_aux"] == tokens
            assert line["loss_aux"] == pytest.approx(float(values["aux"][number]) / tokens, rel=1e-6)

    # A resume at step 1 writes step 2 again.
    again = SampleLosses(accelerator, TIMESTEPS, tmp_path, 1)
    assert {line["step"] for line in lines_of(tmp_path)} == {1}
    again.add(a_step(accelerator, 13, 1)[0])
    again.take()
    assert [(line["step"], line["sample"]) for line in lines_of(tmp_path)] == [
        (line["step"], line["sample"]) for line in lines
    ]


def test_sums_alone_are_refused_where_samples_are_asked_for(accelerator: Accelerator, tmp_path: Path) -> None:
    result, _ = a_step(accelerator, 5, summed=True)
    with pytest.raises(UsageError, match=r"log\.per_sample: .* one value per sample, \(B,\)"):
        SampleLosses(accelerator, {}, tmp_path, 0).add(result)
    means = SampleLosses(accelerator, TIMESTEPS, None, 0)
    means.add(result)
    assert means.take() == {}


def test_terms_not_trained_since_the_last_log_point(accelerator: Accelerator) -> None:
    """On any device: what stands for such a term must be where the losses are."""
    meta = SimpleNamespace(device=torch.device("meta"), is_main_process=True)
    found = SampleLosses(meta, {"off": "time", "main": "time"}, None, 0)  # type: ignore[arg-type]
    result, _ = a_step(accelerator, 13)
    evidence = result.evidence
    there = replace(
        evidence,
        losses=[[loss.to("meta") for loss in losses] for losses in evidence.losses],
        weights=[{name: weight.to("meta") for name, weight in weights.items()} for weights in evidence.weights],
        rows=[{name: value.to("meta") for name, value in rows.items()} for rows in evidence.rows],
    )
    for _ in range(MOST_STEPS):
        found.add(replace(result, evidence=there))
    here = SampleLosses(accelerator, {"off": "time", "main": "time"}, None, 0)
    here.add(result)
    assert all(name.startswith("main_at_") for name in here.take())


def test_losses_of_something_else_than_samples_train_and_have_no_mean(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(6, 2))
    inputs = batch()
    both = inputs["weight"].repeat_interleave(2)
    window = GradientWindow(accelerator, model, [(inputs, both)], {"main": 1.0}, 0)
    for each in window:
        window.backward((model(each["x"]) - each["y"]).flatten())  # two for each sample
    result = window.finish(0.0)
    found = SampleLosses(accelerator, TIMESTEPS, None, 0)
    found.add(result)
    assert found.take() == {}
    (losses,) = result.evidence.losses
    losses[0][3] = torch.nan
    bad = replace(result.evidence, totals=torch.tensor([torch.nan])).examine().bad
    assert bad is not None
    assert bad.samples == [list(range(100, 113))], "which sample it is of is not known"


def test_a_missing_time_is_named(accelerator: Accelerator, tmp_path: Path) -> None:
    result, _ = a_step(accelerator, 5)
    found = SampleLosses(accelerator, {"main": "when"}, tmp_path, 0)
    found.add(result)
    expected = r"recipe\.timesteps: 'main': .* no 'when' with one value per sample, \(B,\); they have occurrence, "
    with pytest.raises(UsageError, match=expected):
        found.take()


def test_inputs_may_be_of_any_type(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(6, 2))
    inputs: dict[str, Any] = batch() | {"names": ["a"] * 13, "scale": 2.0}
    window = GradientWindow(accelerator, model, [(inputs, weights(inputs))], COEFFICIENTS, 0)
    for each in window:
        window.backward(losses(model, each))
    assert window.finish(0.0).evidence.rows[0].keys() == {"time", "tokens", "weight", "sample", "occurrence"}


def test_a_large_file_is_rewound_from_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / SAMPLE_LOSSES_FILE
    rewind(path, 3)
    assert not path.exists()
    lines = [json.dumps({"event": "sample", "step": step, "sample": n}) + "\n" for step in (1, 2, 3) for n in range(4)]
    whole = "".join(lines)
    for text, step, kept in (
        (whole, 3, 12),
        (whole, 2, 8),
        (whole, 0, 0),
        ("", 2, 0),
        (whole + lines[0][:9], 3, 12),  # torn by a crash
        (whole[:-1], 3, 12),
    ):
        path.write_text(text)
        rewind(path, step)
        assert path.read_text().splitlines() == whole.splitlines()[:kept]
    path.unlink()
    path.mkdir()
    rewind(path, 2)
    assert "could not be rewound" in caplog.text


@pytest.mark.distributed
def test_a_save_between_log_points_loses_no_line(tmp_path: Path) -> None:
    """Killed in its third save, it goes on from step 2, although nothing was logged by then. Two processes: below."""
    flags = ("--log.log_every", "6", "--checkpoints.save_every", "1", "--log.per_sample", "true")
    layout = Layout("single", 1, "mmdit")
    directory = tmp_path / "run"
    kill = {failpoints.VARIABLE: "after_snapshot#3"}
    run_recipe(layout, directory, "--max_steps", "6", *flags, ok=False, extra=kill)
    assert {line["step"] for line in lines_of(directory)} == {1, 2, 3}
    lines = run_lines(layout, directory, *flags)
    (resumed,) = [line["step"] for line in read_metrics(directory / METRICS_FILE) if line["event"] == "resume"]
    assert 0 < resumed < 3
    expected = run_lines(layout, tmp_path / "whole", *flags)
    assert lines == expected


def test_only_values_of_samples_are_kept(accelerator: Accelerator) -> None:
    """Kept until a log point, so neither the norm of every parameter nor a long row of tokens may be among them."""
    model = accelerator.prepare(nn.Linear(6, 2))
    inputs = batch() | {"flat": torch.zeros(1000)}
    window = GradientWindow(accelerator, model, [(inputs, weights(inputs))], COEFFICIENTS, 0)
    for each in window:
        window.backward(losses(model, each))
    (rows,) = window.finish(0.0).evidence.rows
    assert set(rows) == {"time", "tokens", "weight", "sample", "occurrence"}


def test_overwrite_deletes_the_file() -> None:
    assert SAMPLE_LOSSES_FILE in OF_A_RUN


@pytest.mark.parametrize("summed", [False, True])
def test_a_bad_step_names_the_samples_alone(accelerator: Accelerator, *, summed: bool) -> None:
    model = accelerator.prepare(nn.Linear(6, 2))
    whole = batch()
    whole["y"][[2, 7]] = torch.nan
    parts = [{name: value[index] for name, value in whole.items()} for index in torch.arange(13).split(5)]

    def given(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: value.sum() for name, value in values.items()} if summed else values

    window = GradientWindow(accelerator, model, [(part, given(weights(part))) for part in parts], COEFFICIENTS, 3)
    for inputs in window:
        window.backward(given(losses(model, inputs)))
    with pytest.raises(NonFiniteError) as caught:
        window.finish(0.0)
    assert caught.value.bad is not None
    # Of sums, the whole micro-batches are suspects.
    assert caught.value.bad.samples == [list(range(100, 110)) if summed else [102, 107]]


def run_lines(layout: Layout, directory: Path, *flags: str) -> list[dict[str, Any]]:
    steps = "16" if layout.recipe == "pde" else "6"  # of three stages
    run = run_recipe(layout, directory, "--max_steps", steps, "--log.per_sample", "true", *flags)
    return lines_of(run.directory)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "recipe", ["mmdit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pde", "lora", "causal_lm"))]
)
def test_the_file_is_the_same_on_any_layout(recipe: str, tmp_path: Path) -> None:
    expected = run_lines(Layout("single", 1, recipe), tmp_path / "one" / "run")
    flags = ("--micro_batch_size", "3", "--log.log_every", "4")
    found = run_lines(Layout("ddp", 2, recipe), tmp_path / "two" / "run", *flags)
    assert len(expected) >= 40
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert one.pop("event") == other.pop("event") == "sample"
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
