"""Predicting with a trained operator: units, rollouts, refinement, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import accel_train
from accel_train import cli
from accel_train.config import UsageError
from accel_train.domains.pde import losses
from accel_train.domains.pde.pipeline import FieldPipeline
from tests.trained import ADVECTION, DARCY, REFINED, field_run

SPEED = torch.tensor([0.3])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return field_run(tmp_path_factory.mktemp("fields") / "run")


@pytest.fixture(scope="module")
def pipeline(run: Path) -> FieldPipeline:
    return accel_train.load(run, pipeline=FieldPipeline)


@pytest.fixture(scope="module")
def refined(tmp_path_factory: pytest.TempPathFactory) -> FieldPipeline:
    return accel_train.load(field_run(tmp_path_factory.mktemp("refined") / "run", REFINED), pipeline=FieldPipeline)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 1', r"config\.json: cannot be read \(it is not JSON.*restore it from a copy"),
        ('{"format": 1}', r"config\.json: sampler.residual_steps: a whole number is required"),
        ('{"format": 1, "sampler": []}', r"config\.json: sampler.residual_steps: a whole number is required"),
        ('{"format": 1, "sampler": {"residual_steps": null}}', r"a whole number is required, as recipes/pde\.py"),
        ('{"format": 1, "sampler": {"residual_steps": "two"}}', r"a whole number is required, as recipes/pde\.py"),
    ],
)
def test_a_description_without_the_steps_of_the_residual_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        FieldPipeline.from_directory(tmp_path)


def test_a_rollout_is_the_model_applied_to_its_own_fields_in_physical_units(pipeline: FieldPipeline) -> None:
    fields = torch.randn(3, 1, 1, 16)
    found = pipeline(fields, SPEED, task="advection", steps=2)
    parameters = pipeline.assets.normalise_parameters("advection", SPEED.expand(3, 1))
    step = losses.stepper(pipeline.model, parameters, ADVECTION.dt, 0, ADVECTION.grid)
    first = step(ADVECTION.input.normalise(fields))
    expected = torch.stack([ADVECTION.target.denormalise(first), ADVECTION.target.denormalise(step(first))], dim=1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(pipeline(fields[:, :, 0], SPEED, task="advection", steps=2), found)
    assert pipeline(torch.randn(2, 1, 8, 8), task="darcy").shape == (2, *(1, 8, 8))


def test_one_field_has_one_prediction_in_any_company(refined: FieldPipeline) -> None:
    """Also with noise, of which the residual of two steps has some."""
    fields = torch.randn(4, 1, 1, 16)
    together = refined(fields, SPEED, task="advection", steps=3, seed=1)
    torch.testing.assert_close(refined(fields[2:3], SPEED, task="advection", steps=3, seed=1)[0], together[2])
    assert not torch.allclose(refined(fields, SPEED, task="advection", steps=3, seed=2), together)
    plain = refined(fields, SPEED, task="advection", steps=3, refine=False)
    assert not torch.allclose(plain, together)
    assert torch.equal(refined(fields, SPEED, task="advection", steps=3, seed=2, refine=False), plain)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda p: p(torch.zeros(1, 1, 16), SPEED), "task None: this model was trained on advection, darcy"),
        (
            lambda p: p(torch.zeros(1, 1, 15), SPEED, task="advection"),
            r"advection reads \(B, 1, 1, 16\), or \(B, 1, 16\)",
        ),
        (lambda p: p(torch.zeros(1, 2, 8, 8), task="darcy"), r"darcy reads \(B, 1, 8, 8\), on the grid"),
        (lambda p: p(torch.full((1, 1, 8, 8), torch.inf), task="darcy"), "input: NaN or infinity"),
        (lambda p: p("a", task="darcy"), "input 'a': is of type str; a tensor of numbers is required"),
        (lambda p: p(3, task="darcy"), r"input of shape \(\): darcy reads"),
        (lambda p: p(torch.zeros(1, 1, 16), torch.nan * SPEED, task="advection"), "parameters: NaN or infinity"),
        (lambda p: p(torch.full((1, 1, 8, 8), 1j), task="darcy"), r"input: complex numbers .* real ones are required"),
        (lambda p: p(torch.zeros(1, 1, 16), 1j * SPEED, task="advection"), "parameters: complex numbers"),
        (
            lambda p: p(torch.zeros(2, 1, 16), task="advection"),
            r"none given; advection takes shape \(2, 1\), a row of speed for each sample, or \(1,\) for all",
        ),
        (lambda p: p(torch.zeros(1, 1, 8, 8), SPEED, task="darcy"), "darcy takes no parameters, so leave them out"),
        (
            lambda p: p(torch.zeros(1, 1, 8, 8), task="darcy", steps=2),
            "steps 2: a whole number, 1 or more, is required",
        ),
        (lambda p: p(torch.zeros(1, 1, 16), SPEED, task="advection", steps=0), "steps 0"),
        (lambda p: p(torch.zeros(1, 1, 16), SPEED, task="advection", steps=2.0), r"steps 2\.0: a whole number"),
        (
            lambda p: p(torch.tensor([[[0.0] * 16], [[3e38, 0.0] * 8]]), SPEED, task="advection"),
            r"step 1 from sample 1 contains NaN or infinity; its values are up to \S+e\+3\d standard deviations",
        ),
    ],
)
def test_wrong_inputs_are_refused(call: Any, reason: str, pipeline: FieldPipeline) -> None:
    with pytest.raises(UsageError, match=reason):
        call(pipeline)


def sample(*words: str | Path) -> int:
    return cli._main(["sample", *map(str, words)])


def test_the_command_writes_fields_and_a_picture(run: Path, pipeline: FieldPipeline, tmp_path: Path) -> None:
    fields = torch.randn(2, 1, 16)
    save_file({"input": fields}, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    words = ("--task", "advection", "--parameters", "0.3", "--steps", "2", "--output", out)
    assert sample(run, "--input", tmp_path / "in.safetensors", *words) == 0
    torch.testing.assert_close(load_file(out)["fields"], pipeline(fields, SPEED, task="advection", steps=2))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    save_file({"input": fields, "parameters": SPEED.expand(2, 1).contiguous()}, tmp_path / "both.safetensors")
    again = tmp_path / "again.safetensors"
    assert sample(run, "--input", tmp_path / "both.safetensors", *words[:2], "--steps", "2", "--output", again) == 0
    assert torch.equal(load_file(again)["fields"], load_file(out)["fields"])
    with pytest.raises(UsageError, match="contains parameters as well"):
        sample(run, "--input", tmp_path / "both.safetensors", *words)
    np.save(tmp_path / "darcy.npy", np.zeros((1, 1, 8, 8), np.float32))
    steady = tmp_path / "steady.safetensors"
    assert sample(run, "--input", tmp_path / "darcy.npy", "--task", "darcy", "--output", steady) == 0
    expected = pipeline(torch.zeros(1, 1, 8, 8), task="darcy")
    torch.testing.assert_close(load_file(steady)["fields"], expected)
    assert DARCY.name == "darcy"
    assert steady.with_suffix(".png").exists()


def test_the_picture_cannot_take_the_name_of_the_fields(run: Path, tmp_path: Path) -> None:
    save_file({"input": torch.randn(2, 1, 16)}, tmp_path / "in.safetensors")
    out = tmp_path / "out.png"
    words = ("--input", tmp_path / "in.safetensors", "--task", "advection", "--parameters", "0.3", "--output", out)
    with pytest.raises(UsageError, match=r"out\.png: is the name of the picture beside the predicted fields"):
        sample(run, *words)
    assert not out.exists()


def test_files_that_cannot_be_read_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"input: no file .*--input fields\.safetensors.*: advection \(B, \d+, 1, \d+\) or \(B, \d"
    ):
        sample(run, "--task", "darcy")
    with pytest.raises(UsageError, match=r"none\.npy: cannot be read"):
        sample(run, "--task", "darcy", "--input", "none.npy")
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"contains other; a tensor `input` is required: advection \(B, "):
        sample(run, "--task", "darcy", "--input", tmp_path / "other.safetensors")
    np.save(tmp_path / "object.npy", np.array([{"a": 1}], dtype=object))  # pickle
    with pytest.raises(UsageError, match=r"object\.npy: cannot be read"):
        sample(run, "--task", "darcy", "--input", tmp_path / "object.npy")
    np.save(tmp_path / "words.npy", np.array(["1.0", "2.0"]))
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, input=np.zeros((1, 1, 8, 8), np.float32))
    for name in ("words.npy", "several.npy"):
        with pytest.raises(UsageError, match=rf"{name}: cannot be read \(.*a \.safetensors or \.npy file"):
            sample(run, "--task", "darcy", "--input", tmp_path / name)
    (tmp_path / "empty.npy").touch()
    with pytest.raises(UsageError, match=r"empty\.npy: cannot be read"):
        sample(run, "--task", "darcy", "--input", tmp_path / "empty.npy")
