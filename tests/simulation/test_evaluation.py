"""An evaluation needs no more memory than training, as a plan takes for granted: it has no figure of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import Layout
from tests.simulation.counting import REAL, real

PROGRAM = REAL.with_name("evaluating.py")
FLAGS = ("--max_steps", "2", "--schedule.warmup_steps", "1", "--evaluation.samples", "8")


@pytest.mark.slow  # ten seconds each
@pytest.mark.parametrize("recipe", ["mmdit", "pde", "causal_lm", "lora"])
def test_an_evaluation_takes_less_memory_than_a_step(recipe: str, tmp_path: Path) -> None:
    longer = ("--max_steps", "12") if recipe == "pde" else ()  # all of its stages
    found = real(Layout("single", 1, recipe), tmp_path, *FLAGS, *longer, program=PROGRAM)
    assert 0 < found["evaluation"] < found["training"]


@pytest.mark.slow
def test_more_samples_at_once_take_more(tmp_path: Path) -> None:
    layout = Layout("single", 1, "causal_lm")
    by_default = real(layout, tmp_path / "few", *FLAGS, program=PROGRAM)
    at_once = real(layout, tmp_path / "many", *FLAGS, "--evaluation.batch_size", "64", program=PROGRAM)
    assert by_default["evaluation"] < at_once["evaluation"]
