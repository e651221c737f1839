"""Batch sizes that change in the course of a run: the same on every layout, and after a resume between two of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed.launching import Finished, Layout, every_day, relative_difference, run_recipe

pytestmark = pytest.mark.distributed
STEPS = 7
SIZES = [16, 16, 24, 24, 33, 33, 33]
"""Indivisible at the end, so that shares and micro-batches are uneven."""
GROWING = "--batch_schedule.steps 2 4 --batch_schedule.sizes 24 33 --batch_schedule.learning_rate sqrt".split()
LAYOUTS = {
    "2 processes, ragged": (Layout("ddp", 2), ("--micro_batch_size", "5")),
    "1 process, ragged": (Layout("single", 1), ("--micro_batch_size", "7")),
    "FSDP2": (Layout("fsdp2", 2), ("--micro_batch_size", "5")),
    "ZeRO-2": (Layout("zero2", 2), ("--micro_batch_size", "5")),
}
QUICK = set[tuple[str, str]]()
"""Two processes whose batch grows are every day in test_noise_scale.py."""


def train(layout: Layout, run: Path, *flags: str, ok: bool = True) -> Finished:
    schedule = ("--schedule.kind", "constant", "--schedule.warmup_steps", "0")
    return run_recipe(layout, run, "--max_steps", str(STEPS), *schedule, *GROWING, *flags, ok=ok)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Of each recipe one process with whole batches, made when first asked for."""

    class Made(dict[str, Finished]):
        def __missing__(self, recipe: str) -> Finished:
            folder = tmp_path_factory.mktemp(recipe)
            flags = ("--micro_batch_size", "64", "--checkpoints.save_every", "3")
            self[recipe] = train(Layout("single", 1, recipe), folder / "run", *flags)
            return self[recipe]

    return Made()


@pytest.mark.parametrize(("recipe", "name"), every_day(QUICK, ("mmdit", "causal_lm", "lora"), LAYOUTS))
def test_every_layout_follows_the_same_trajectory(
    recipe: str, name: str, references: dict[str, Finished], tmp_path: Path
) -> None:
    layout, flags = LAYOUTS[name]
    reference = references[recipe]
    run = train(Layout(layout.strategy, layout.processes, recipe), tmp_path / "run", *flags)
    assert len(run.losses()) == STEPS
    worst = max(abs(a - b) / abs(a) for a, b in zip(reference.losses(), run.losses(), strict=True))
    assert worst < 1e-5, f"{name}: {worst:.1e}"
    for stem in ("model", "ema"):
        assert relative_difference(reference.tensors(STEPS, stem), run.tensors(STEPS, stem)) < 1e-4, stem


def test_lines_and_checkpoints_tell_the_size_of_each_step(references: dict[str, Finished]) -> None:
    run = references["mmdit"]
    lines = [line for _, line in sorted(run.train_lines().items())]
    assert [line["global_batch_size"] for line in lines] == SIZES
    rates = [line["lr"] / lines[0]["lr"] for line in lines]
    assert rates == pytest.approx([(size / 16) ** 0.5 for size in SIZES])
    per_sample = {round(line["epoch"] / sum(SIZES[: line["step"]]), 9) for line in lines}
    assert len(per_sample) == 1
    manifest = (run.checkpoint(3) / "manifest.json").read_text()
    assert '"samples_seen": 56' in manifest


def test_a_resume_between_two_changes_has_the_same_bits(references: dict[str, Finished], tmp_path: Path) -> None:
    whole = references["mmdit"]
    shutil.copytree(whole.directory, tmp_path / "run")
    for step in (6, 7):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"checkpoint_{step:08d}")
    again = train(Layout("single", 1, "mmdit"), tmp_path / "run", "--micro_batch_size", "64")
    assert [x.hex() for x in again.losses()] == [x.hex() for x in whole.losses()]
    ours, theirs = again.tensors(STEPS, "model"), whole.tensors(STEPS, "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_schedule_is_another_experiment(references: dict[str, Finished], tmp_path: Path) -> None:
    shutil.copytree(references["mmdit"].directory, tmp_path / "run")
    refused = train(Layout("single", 1, "mmdit"), tmp_path / "run", "--batch_schedule.sizes", "24", "32", ok=False)
    assert refused.code == 2
    assert "batch_schedule.sizes" in refused.output
