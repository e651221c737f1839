"""Which end of a metric is best, and which steps save."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import pytest

from accel_train.checkpoints.policy import CheckpointConfig, due
from accel_train.config import UsageError


@pytest.mark.parametrize(
    "name",
    [
        *("miou", "heldout_acc", "val_f1", "psnr", "t2l_cosine", "heldout_top1", "dice"),
        *("val/accuracy", "val-acc", "eval.f1", "val/AUROC", "test caption-exact"),
    ],
)
def test_the_smallest_of_what_is_better_the_larger_is_not_kept(name: str) -> None:
    with pytest.raises(UsageError, match=f"best_mode: min: {name} is better the larger it is"):
        CheckpointConfig(best_metric=name)
    assert CheckpointConfig(best_metric=name, best_mode="max").notices() == [
        f"checkpoints.best_metric: {name}: the highest is best (best_mode max)"
    ]


@pytest.mark.parametrize("name", ["heldout_err2", "lr2", "inaccuracy", "val/err2", "accuracy/loss"])
def test_a_name_that_only_ends_in_such_letters_has_the_direction_that_is_given(name: str) -> None:
    assert CheckpointConfig(best_metric=name).best_mode == "min"


def test_a_direction_that_the_recipe_declares_must_be_that_of_the_option() -> None:
    declared: dict[str, Literal["min", "max"]] = {"nrmse": "min", "quality": "max", "Elo": "max", "exact_Match": "max"}
    CheckpointConfig(best_metric="burgers_nrmse").refuse_other_direction(declared)
    CheckpointConfig(best_metric="burgers/nrmse").refuse_other_direction(declared)
    CheckpointConfig(best_metric="other").refuse_other_direction(declared)
    CheckpointConfig().refuse_other_direction(declared)
    with pytest.raises(UsageError, match="best_mode: min: for quality the recipe declares max"):
        CheckpointConfig(best_metric="quality").refuse_other_direction(declared)
    with pytest.raises(UsageError, match="best_mode: min: for val/quality the recipe declares max"):
        CheckpointConfig(best_metric="val/quality").refuse_other_direction(declared)
    for metric in ("Elo", "heldout_Elo", "val/elo", "val/exact_match"):
        with pytest.raises(UsageError, match=f"best_mode: min: for {metric} the recipe declares max"):
            CheckpointConfig(best_metric=metric).refuse_other_direction(declared)
    CheckpointConfig(best_metric="val/match_loss").refuse_other_direction(declared)
    with pytest.raises(UsageError, match="best_mode: max: for burgers_nrmse the recipe declares min"):
        CheckpointConfig(best_metric="burgers_nrmse", best_mode="max").refuse_other_direction(declared)


@pytest.mark.parametrize(("every", "steps_of_an_epoch"), [(0.1, 10), (0.3, 10), (1 / 3, 9), (0.7, 10), (2.0, 7)])
def test_no_save_by_epochs_is_lost_to_rounding(every: float, steps_of_an_epoch: int) -> None:
    config = CheckpointConfig(save_every_epochs=every)
    found = [step for step in range(1, 2001) if due(config, step, lambda step: step / steps_of_an_epoch)]
    exact = Fraction(every).limit_denominator(100) * steps_of_an_epoch
    assert found == [step for step in range(1, 2001) if step // exact > (step - 1) // exact]
