"""The batch that grows by the measured noise of the gradient: the same on every layout, and after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.metrics.records import read_metrics
from tests.distributed.launching import Finished, Layout, every_day, relative_difference, run_recipe

pytestmark = pytest.mark.distributed
STEPS = 14
SIZES = [16] * 4 + [32] * 4 + [50] * 6
"""The third is indivisible, so that shares and micro-batches are uneven."""
GROWN = [[4, 32], [8, 50]]
MEASURED = (
    "--batch_schedule.noise_factor 0.02 --batch_schedule.noise_steps 4 --batch_schedule.noise_every 2 "
    "--batch_schedule.max_size 50 --batch_schedule.learning_rate sqrt --schedule.kind constant "
    "--schedule.warmup_steps 2 --checkpoints.save_every 3 --checkpoints.keep_last 0"
).split()
LAYOUTS = {
    "2 processes, ragged": (Layout("ddp", 2), ("--micro_batch_size", "5")),
    "1 process, ragged": (Layout("single", 1), ("--micro_batch_size", "7")),
    "FSDP2": (Layout("fsdp2", 2), ("--micro_batch_size", "5")),
    "HSDP": (Layout("hsdp", 4), ("--micro_batch_size", "5")),
    "ZeRO-2": (Layout("zero2", 2), ("--micro_batch_size", "5")),
    "ZeRO-3": (Layout("zero3", 2), ("--micro_batch_size", "5")),
}
QUICK = {("mmdit", "2 processes, ragged")}
"""Sharded losses are every day in test_feedback.py, and the norm of a sharded gradient in test_contract.py."""
ESTIMATES = ("noise_scale", "gradient_square", "noise_trace")


def train(layout: Layout, run: Path, *flags: str, ok: bool = True) -> Finished:
    return run_recipe(layout, run, "--max_steps", str(STEPS), *MEASURED, *flags, ok=ok)


def windows(run: Finished) -> list[dict[str, Any]]:
    lines = read_metrics(run.directory / "metrics.jsonl")
    return [line for line in lines if line["event"] == "noise_scale"]


def sizes(run: Finished) -> list[int]:
    return [line["global_batch_size"] for _, line in sorted(run.train_lines().items())]


def manifest(run: Finished, step: int) -> dict[str, Any]:
    return json.loads((run.checkpoint(step) / "manifest.json").read_text())


def state(run: Finished) -> dict[str, Any]:
    return json.loads((run.checkpoint(STEPS) / "trainer_state.json").read_text())["health"]["noise_scale"]


def assert_same_bits(again: Finished, whole: Finished, after: int = 0) -> None:
    assert [loss.hex() for loss in again.losses()] == [loss.hex() for loss in whole.losses()[after:]]
    assert sizes(again) == SIZES[after:]
    ours, theirs = again.tensors(STEPS, "model"), whole.tensors(STEPS, "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Of each recipe one process with whole batches, made when first asked for."""

    class Made(dict[str, Finished]):
        def __missing__(self, recipe: str) -> Finished:
            folder = tmp_path_factory.mktemp(recipe)
            self[recipe] = train(Layout("single", 1, recipe), folder / "run", "--micro_batch_size", "64")
            return self[recipe]

    return Made()


@pytest.mark.parametrize(("recipe", "name"), every_day(QUICK, ("mmdit", "causal_lm"), LAYOUTS))
def test_every_layout_measures_and_decides_alike(
    recipe: str, name: str, references: dict[str, Finished], tmp_path: Path
) -> None:
    layout, flags = LAYOUTS[name]
    reference = references[recipe]
    run = train(Layout(layout.strategy, layout.processes, recipe), tmp_path / "run", *flags)
    assert sizes(run) == SIZES
    assert run.losses() == pytest.approx(reference.losses(), rel=1e-5)
    assert len(windows(run)) == len(windows(reference)) == 3
    for found, expected in zip(windows(run), windows(reference), strict=True):
        assert found["observations"] == expected["observations"] == 2
        assert found["noise_trace"] == pytest.approx(expected["noise_trace"], rel=1e-5)
        # Where the noise is much the larger part, what is left for the gradient has the rounding of their sum.
        mean_square = expected["gradient_square"] + expected["noise_trace"] / expected["global_batch_size"]
        assert found["gradient_square"] == pytest.approx(expected["gradient_square"], rel=1e-5, abs=1e-6 * mean_square)
    for stem in ("model", "ema"):
        assert relative_difference(reference.tensors(STEPS, stem), run.tensors(STEPS, stem)) < 1e-4, stem


def test_lines_and_checkpoints_tell_the_sizes(references: dict[str, Finished]) -> None:
    run = references["mmdit"]
    assert sizes(run) == SIZES
    changes = [(w["step"], w["global_batch_size"], w["next_global_batch_size"]) for w in windows(run)]
    assert changes == [(4, 16, 32), (8, 32, 50), (12, 50, 50)]
    assert all(window["noise_trace"] > 0 for window in windows(run))
    lines = [line for _, line in sorted(run.train_lines().items())]
    rates = [line["lr"] / lines[3]["lr"] for line in lines[3:]]
    assert rates == pytest.approx([(size / 16) ** 0.5 for size in SIZES[3:]])
    assert len({round(line["epoch"] / sum(SIZES[: line["step"]]), 9) for line in lines}) == 1
    assert [manifest(run, step)["samples_seen"] for step in (3, 9, STEPS)] == [sum(SIZES[:n]) for n in (3, 9, STEPS)]
    assert [manifest(run, step).get("grown") for step in (3, 6, 9)] == [None, GROWN[:1], GROWN]
    assert "32 samples per step from here on" in run.output


@pytest.mark.slow  # tests/distributed/test_batch_schedule.py has fixed schedules every day
def test_a_schedule_of_the_same_sizes_is_the_same_training(references: dict[str, Finished], tmp_path: Path) -> None:
    fixed = "--batch_schedule.noise_factor 0 --batch_schedule.noise_steps 500 --batch_schedule.noise_every 10".split()
    fixed += "--batch_schedule.max_size null --batch_schedule.steps 4 8 --batch_schedule.sizes 32 50".split()
    run = train(Layout("single", 1), tmp_path / "run", "--micro_batch_size", "64", *fixed)
    assert_same_bits(run, references["mmdit"])


# From step 6 on it passes all that comes after step 9.
@pytest.mark.parametrize("saved", [6, pytest.param(9, marks=pytest.mark.slow)])
def test_a_resume_has_the_same_bits(saved: int, references: dict[str, Finished], tmp_path: Path) -> None:
    """In the middle of a window, and behind the last change."""
    whole = references["mmdit"]
    shutil.copytree(whole.directory, tmp_path / "run")
    for step in (6, 9, 12, STEPS):
        if step > saved:
            shutil.rmtree(tmp_path / "run" / "checkpoints" / f"checkpoint_{step:08d}")
    again = train(Layout("single", 1), tmp_path / "run", "--micro_batch_size", "64")
    assert f"step {saved}" in again.output
    assert_same_bits(again, whole)
    estimates = [{key: w[key] for key in ESTIMATES} for w in windows(again)]  # each once, although made twice
    assert estimates == [{key: w[key] for key in ESTIMATES} for w in windows(whole)]
    assert state(again) == state(whole)


@pytest.mark.slow  # a resume, which is a quick test, reads the same parts of a checkpoint
def test_a_new_run_from_a_checkpoint_goes_on_alike(references: dict[str, Finished], tmp_path: Path) -> None:
    whole = references["mmdit"]
    start = ("--resume", str(whole.checkpoint(6)), "--micro_batch_size", "64")
    again = train(Layout("single", 1), tmp_path / "new", *start)
    assert_same_bits(again, whole, after=6)
    assert manifest(again, 9)["grown"] == GROWN
    assert manifest(again, 9)["samples_seen"] == sum(SIZES[:9])


def test_without_the_measurement_the_changes_so_far_must_be_named(
    references: dict[str, Finished], tmp_path: Path
) -> None:
    whole = references["mmdit"]
    off = "--batch_schedule.noise_factor 0 --batch_schedule.noise_steps 500 --batch_schedule.noise_every 10".split()
    off += ["--batch_schedule.max_size", "null", "--resume", str(whole.checkpoint(9)), "--allow", "batch_schedule"]
    constant = ("--batch_schedule.learning_rate", "constant")
    refused = train(Layout("single", 1), tmp_path / "refused", *off, *constant, ok=False)
    assert refused.code == 2
    named = "--batch_schedule.steps 4 8 --batch_schedule.sizes 32 50"
    assert f"give {named} --allow batch_schedule" in refused.output
    again = train(Layout("single", 1), tmp_path / "named", *off, *named.split(), "--micro_batch_size", "64")
    assert_same_bits(again, whole, after=9)
    # The way back: a measurement does not know of the changes that a schedule has made.
    back = ("--resume", str(again.checkpoint(12)), "--allow", "batch_schedule")
    refused = train(Layout("single", 1), tmp_path / "back", *back, ok=False)
    assert refused.code == 2
    assert "by step 12 batch_schedule.steps had led to 50 samples per step" in refused.output
    assert (
        f"begin with global_batch_size 16 again; leave out the options of the noise and give {named}" in refused.output
    )
    assert f"--init_from {tmp_path}" in refused.output
    assert "--global_batch_size 50" in refused.output


@pytest.mark.slow  # where it may not begin, it is refused above
def test_a_measurement_may_begin_before_the_first_change_of_a_schedule(tmp_path: Path) -> None:
    later = "--batch_schedule.steps 5 --batch_schedule.sizes 32 --max_steps 4 --checkpoints.save_every 2".split()
    planned = run_recipe(Layout("single", 1), tmp_path / "run", *later, "--schedule.kind", "constant")
    measuring = [*MEASURED, "--resume", str(planned.checkpoint(4)), "--allow", "batch_schedule", "schedule"]
    again = run_recipe(Layout("single", 1), tmp_path / "new", "--max_steps", "6", *measuring)
    assert sizes(again) == [16, 16]


def test_what_cannot_grow_is_refused(tmp_path: Path) -> None:
    refused = run_recipe(Layout("single", 1, "pde"), tmp_path / "pde", "--max_steps", "30", *MEASURED[:8], ok=False)
    assert refused.code == 2
    assert "batch_schedule.noise_factor 0.02: TaskSampler gives every step the same number of samples" in refused.output
