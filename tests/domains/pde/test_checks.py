"""Options of a latent operator that are refused, and the notices of stages that the run does not reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.config import UsageError, origin_of
from accel_train.domains.pde import checks
from accel_train.domains.pde.losses import TERMS
from accel_train.domains.pde.operator_learning import objective_of_step, trained_terms
from accel_train.domains.pde.options import ObjectiveConfig
from accel_train.domains.pde.shape import PdeModelConfig
from accel_train.options.loading import load_config
from accel_train.training.feedback.options import BalanceConfig
from accel_train.training.schedules import ScheduleConfig, check_lengths
from recipes import pde
from tests.trained import ADVECTION, DARCY

WARMUP = ScheduleConfig(warmup_steps=5)
ENDS = ScheduleConfig(warmup_steps=5, decay_steps=100)


@pytest.mark.parametrize(
    ("start", "depth", "others", "says"),
    [
        (None, 2, {}, r"residual_from None with model.residual_depth 2: .*Give both"),
        (50, 0, {}, r"residual_from 50 with model.residual_depth 0: .*Give both"),
        (100, 1, {}, r"residual_from 100: .*ends at step 100\. .* later --schedule\.decay_steps"),
        (200, 1, {}, r"residual_from 200: .*ends at step 100"),
        (96, 1, {}, r"warms up for 5 steps before and after"),
        (4, 1, {}, r"warms up for 5 steps before and after"),
        (
            50,
            1,
            {"patience": 2, "best_metric": "mean_nrmse"},
            r"checkpoints.patience 2 with objective.residual_from 50",
        ),
    ],
)
def test_a_stage_that_could_not_learn_is_refused(
    start: int | None, depth: int, others: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        checks.check_residual(ObjectiveConfig(residual_from=start), CheckpointConfig(**others), depth)
        checks.check_stages(ObjectiveConfig(residual_from=start), ENDS, 500, 100)


def test_a_stage_behind_the_schedule_is_refused_if_the_run_reaches_it_or_the_end_was_given() -> None:
    """A short trial decides the end of its schedule."""
    objective = ObjectiveConfig(residual_from=100)
    assert len(checks.check_stages(objective, WARMUP, 60, 60)) == 1
    for schedule, max_steps in ((WARMUP, 500), (replace(ENDS, decay_steps=60), 60)):
        with pytest.raises(UsageError, match="the schedule ends at step 60"):
            checks.check_stages(objective, schedule, max_steps, 60)


def test_a_constant_learning_rate_has_no_end_before_the_stage() -> None:
    objective = ObjectiveConfig(residual_from=100)
    schedule = ScheduleConfig(kind="constant", warmup_steps=5)
    assert len(checks.check_stages(objective, schedule, 60, 60)) == 1
    assert checks.check_stages(objective, schedule, 500, 60) == []  # a resume
    with pytest.raises(UsageError, match=r"warms up for 5 steps .*the run ends at step 105\. .* or raise max_steps"):
        checks.check_stages(objective, schedule, 105, 60)


@pytest.mark.parametrize(
    ("schedule", "start", "says"),
    [
        (
            {"kind": "wsd", "warmup_steps": 100},
            290,
            r"290 steps before and 110 after: .*wsd_decay_fraction: .*the 110 steps of a stage",
        ),
        ({"kind": "wsd", "warmup_steps": 100}, 110, r"110 steps before and 290 after: .*the 110 steps of a stage"),
        (
            {"kind": "cosine_restarts", "cycle_steps": 300},
            300,
            r"cycle_steps: 300: .*step 300, after the 100 steps of a stage",
        ),
    ],
)
def test_a_schedule_that_fits_the_run_must_fit_each_stage(schedule: dict[str, Any], start: int, says: str) -> None:
    config = ScheduleConfig(**schedule)
    check_lengths(config, 400, "max_steps")
    with pytest.raises(UsageError, match=says):
        checks.check_stages(ObjectiveConfig(residual_from=start), config, 400, 400)


def test_a_stage_that_can_learn_is_not_refused() -> None:
    check = checks.check_residual
    check(ObjectiveConfig(residual_from=94), CheckpointConfig(), 1)
    check(ObjectiveConfig(residual_from=94), CheckpointConfig(patience=2, best_metric="darcy_refined_nrmse"), 1)
    check(ObjectiveConfig(), CheckpointConfig(patience=2, best_metric="mean_nrmse"), 0)
    assert checks.check_stages(ObjectiveConfig(residual_from=94), WARMUP, 100, 100) == []
    assert checks.check_stages(ObjectiveConfig(), WARMUP, 100, 100) == []


def test_a_run_that_ends_before_the_stage_says_so() -> None:
    (words,) = checks.check_stages(ObjectiveConfig(residual_from=200), WARMUP, 100, 5000)
    assert words.startswith("objective.residual_from 200: the run ends before it, at step 100")
    both = checks.check_stages(ObjectiveConfig(autoencode_steps=100, residual_from=200), WARMUP, 100, 5000)
    assert both[0].startswith("objective.autoencode_steps 100: the operator learns only after it; the run ends before")
    assert both[1:] == [words]
    assert checks.check_stages(ObjectiveConfig(autoencode_steps=99), WARMUP, 100, 100) == []
    assert len(checks.check_stages(ObjectiveConfig(autoencode_steps=100), WARMUP, 100, 100)) == 1


def config_of(**objective: Any) -> pde.Config:
    model = PdeModelConfig(residual_depth=int("residual_from" in objective))
    return pde.Config(max_steps=9, objective=ObjectiveConfig(**objective), model=model)


@pytest.mark.parametrize(("name", "value"), [("flip", 0.5), ("boundary_weight", 1.0)])
def test_what_needs_the_centres_of_cells_is_refused_for_every_nth_point(name: str, value: float) -> None:
    """Of 32 points, every 4th are at 0.5 / 32, 4.5 / 32 ...: neither symmetric nor where the model has 8 points."""
    tasks = (ADVECTION, DARCY)
    strides = {"advection": 4, "darcy": 1}  # points of a periodic task have no edge
    checks.check_tasks(config_of(**{name: value}), tasks, strides, TERMS)
    strides["darcy"] = 4
    with pytest.raises(UsageError, match=rf"{name} {value:g}: with data.resolution_2d 8, one point in 4 .* of darcy"):
        checks.check_tasks(config_of(**{name: value}), tasks, strides, TERMS)
    checks.check_tasks(config_of(), tasks, strides, TERMS)


def test_every_nth_point_of_another_boundary_has_no_boundary_term() -> None:
    elsewhere = replace(DARCY, name="elsewhere", boundary="neumann")
    strides = {"darcy": 1, "elsewhere": 4}
    checks.check_tasks(config_of(boundary_weight=1.0), (DARCY, elsewhere), strides, TERMS)
    with pytest.raises(UsageError, match=r"flip 0\.5: with data\.resolution_2d 8, .* of elsewhere"):
        checks.check_tasks(config_of(flip=0.5), (DARCY, elsewhere), strides, TERMS)


@pytest.mark.parametrize(
    ("objective", "terms"),
    [
        ({"inverse_weight": 0.0}, 1),
        ({"inverse_weight": 0.0, "latent_weight": 0.1}, 2),
        ({"inverse_weight": 0.0, "boundary_weight": 0.1}, 2),
        ({"inverse_weight": 0.0, "autoencode_steps": 1}, 2),
        ({"inverse_weight": 0.0, "residual_from": 5}, 2),
        ({"inverse_weight": 0.1, "inverse_every": 4}, 3),
        ({"inverse_weight": 0.1, "inverse_every": 4, "autoencode_steps": 3}, 3),
    ],
)
def test_the_balance_of_a_single_term_is_refused(objective: dict[str, Any], terms: int) -> None:
    """Every step names all terms, most of them with coefficient 0."""
    config = replace(config_of(**objective), balance=BalanceConfig("ema"))
    tasks = (ADVECTION, DARCY)
    steps = [objective_of_step(config.objective, step, 0, task).terms for step in range(9) for task in tasks]
    found = trained_terms(config.objective, tasks)
    assert found == set().union(*steps)
    assert len(found) == terms
    strides = {task.name: 1 for task in tasks}
    if terms > 1:
        checks.check_tasks(config, tasks, strides, found)
    else:
        with pytest.raises(UsageError, match=r"balance\.kind: ema: at least 2 loss terms .* this run trains 1"):
            checks.check_tasks(config, tasks, strides, found)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--data.path x --data.tasks heat",
            r"\(heat 2; without a task: 1\).* --task_weights 1 .*from pde_demo: --task",
        ),
        ("--data.tasks darcy --task_weights 2", r"task_weights \[2\]: has no effect with the only task darcy"),
        (
            "--task_weights 3",
            r"task_weights \[3\]: 1 for 2 task\(s\) .*\(advection 3; without a weight: darcy\).* 1 1 or",
        ),
    ],
)
def test_weights_of_other_tasks_are_refused(flags: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_config(pde.Config, ["pde_demo", *flags.split()], presets=pde.PRESETS)


def test_drop_path_of_a_single_block_is_refused_and_that_of_a_preset_gives_way() -> None:
    for flags in ("--model.depth 1", "--model.operator pdet_unet --model.depths 1 --model.depth 4"):
        with pytest.raises(UsageError, match=r"objective\.drop_path: 0\.5: has no effect on a single block"):
            load_config(pde.Config, ["pde_demo", "--objective.drop_path", "0.5", *flags.split()], presets=pde.PRESETS)
    config = load_config(pde.Config, ["pde_stack_baseline", "--model.depth", "1"], presets=pde.PRESETS).config
    assert config.objective.drop_path == 0
    assert "gives way to --model.depth" in origin_of(config, "objective.drop_path")
