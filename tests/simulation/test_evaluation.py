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
def test_it_takes_a_micro_batch_at_once_unless_told_otherwise(tmp_path: Path) -> None:
    def peak(name: str, *flags: str) -> int:
        found = real(Layout("single", 1, "causal_lm"), tmp_path / name, *FLAGS, *flags, program=PROGRAM)
        return found["evaluation"]

    by_default = peak("default", "--micro_batch_size", "4")
    assert by_default < peak("more", "--micro_batch_size", "4", "--evaluation.batch_size", "16")
    assert by_default > peak("fewer", "--micro_batch_size", "4", "--evaluation.batch_size", "1")
