"""What follows the losses, in real runs: the same on every layout, after a resume, and beside the schedule."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.metrics.records import read_metrics
from accel_train.training.schedules import ScheduleConfig, learning_rate_factor
from tests.distributed.launching import Finished, Layout, every_day, relative_difference, run_recipe

pytestmark = pytest.mark.distributed
STEPS = 12
LR = 1.5e-3
WARM_UP = 2
PLATEAU = (
    "--plateau.factor 0.5 --plateau.steps 2 --plateau.patience 1 --plateau.min_improvement 0.05 "
    f"--schedule.kind cosine --schedule.warmup_steps {WARM_UP} --optimizer.lr {LR} --checkpoints.save_every 5"
).split()
"""Few windows of the demo are better by a twentieth, so the learning rate falls several times. Those of PDE are."""
PDE = "--objective.autoencode_steps 4 --objective.residual_from 8 --plateau.min_improvement 0.4".split()
KINDS = {"mmdit": "uncertainty", "pde": "ema"}
LAYOUTS = {
    "2 processes": (Layout("ddp", 2), ("--micro_batch_size", "5")),
    "3 processes": (Layout("ddp", 3), ("--micro_batch_size", "4")),
    "FSDP2": (Layout("fsdp2", 2), ("--micro_batch_size", "5")),
    "ZeRO-2": (Layout("zero2", 2), ("--micro_batch_size", "5")),
}
QUICK = {("mmdit", "FSDP2")}


def train(layout: Layout, run: Path, *flags: str, ok: bool = True) -> Finished:
    own = PDE if layout.recipe == "pde" else []
    balance = ("--balance.kind", KINDS[layout.recipe])
    return run_recipe(layout, run, "--max_steps", str(STEPS), *balance, *PLATEAU, *own, *flags, ok=ok)


def changes(run: Finished) -> list[tuple[int, float]]:
    """Step and factor of each change of the learning rate."""
    lines = read_metrics(run.directory / "metrics.jsonl")
    return [(line["step"], line["factor"]) for line in lines if line["event"] == "plateau"]


def state(run: Finished, step: int = STEPS) -> dict[str, Any]:
    return json.loads((run.checkpoint(step) / "trainer_state.json").read_text())["health"]


def factors(run: Finished) -> list[dict[str, float]]:
    """The factors of the terms in each line."""
    lines = [line for _, line in sorted(run.train_lines().items())]
    return [{name: value for name, value in line.items() if name.startswith("balance_")} for line in lines]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Of each recipe one process with whole batches, made when first asked for."""

    class Made(dict[str, Finished]):
        def __missing__(self, recipe: str) -> Finished:
            self[recipe] = train(Layout("single", 1, recipe), tmp_path_factory.mktemp(recipe) / "run")
            return self[recipe]

    return Made()


@pytest.mark.parametrize(("recipe", "name"), every_day(QUICK, KINDS, LAYOUTS))
def test_every_layout_has_the_same_factors(
    recipe: str, name: str, references: dict[str, Finished], tmp_path: Path
) -> None:
    layout, flags = LAYOUTS[name]
    reference = references[recipe]
    run = train(Layout(layout.strategy, layout.processes, recipe), tmp_path / "run", *flags)
    assert len(run.losses()) == STEPS
    assert run.losses() == pytest.approx(reference.losses(), rel=1e-5)
    assert changes(run) == changes(reference)
    assert len(changes(run)) > 1
    for found, expected in zip(factors(run), factors(reference), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert len({value for line in factors(run) for value in line.values()}) > STEPS / 2
    for stem in ("model", "ema"):
        assert relative_difference(reference.tensors(STEPS, stem), run.tensors(STEPS, stem)) < 1e-4, stem


@pytest.mark.parametrize("recipe", ["mmdit", pytest.param("pde", marks=pytest.mark.slow)])
def test_a_resume_in_the_middle_of_a_window_has_the_same_bits(
    recipe: str, references: dict[str, Finished], tmp_path: Path
) -> None:
    whole = references[recipe]
    shutil.copytree(whole.directory, tmp_path / "run")
    for step in (10, STEPS):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"checkpoint_{step:08d}")
    assert state(whole, 5)["plateau"]["window"]
    again = train(Layout("single", 1, recipe), tmp_path / "run")
    assert "step 5" in again.output
    assert [x.hex() for x in again.losses()] == [x.hex() for x in whole.losses()]
    assert changes(again) == changes(whole)  # each once, although those behind step 5 were made twice
    assert factors(again) == factors(whole)
    assert state(again) == state(whole)
    ours, theirs = again.tensors(STEPS, "model"), whole.tensors(STEPS, "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_schedule_does_not_overwrite_the_factor_of_a_plateau(references: dict[str, Finished]) -> None:
    run = references["mmdit"]
    schedule = ScheduleConfig("cosine", warmup_steps=WARM_UP)
    fallen = dict(changes(run))
    factor = 1.0
    for step, line in sorted(run.train_lines().items()):
        expected = LR * learning_rate_factor(schedule, step - 1, STEPS) * factor
        assert line["lr"] == pytest.approx(expected, rel=1e-9, abs=1e-15), step
        factor = fallen.get(step, factor)  # from the step after it on
    assert factor < 0.5
    step, first = changes(run)[0]
    assert f"step {step}: a plateau: 1 windows of 2 steps in a row have not lowered the best mean loss" in run.output
    assert f"learning rate is {first:.3g} times that of the schedule" in run.output


def test_another_balance_is_another_experiment(references: dict[str, Finished], tmp_path: Path) -> None:
    shutil.copytree(references["mmdit"].directory, tmp_path / "run")
    for flags in (("--balance.kind", "ema"), ("--plateau.patience", "2")):
        refused = train(Layout("single", 1), tmp_path / "run", *flags, ok=False)
        assert refused.code == 2
        assert flags[0].removeprefix("--") in refused.output
