"""The loops of the real recipes read nothing from the device between two log points.

A run of twice as many steps reads as often: what a step reads is told apart by step, so one run shows it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launching import DEMOS, ROOT, Layout, command, fork

pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests" / "distributed" / "reads_worker.py"
STEPS = 16
SELDOM = (
    f"--max_steps {STEPS} --schedule.warmup_steps 3 --micro_batch_size 8 --log.log_every 1000 "
    "--checkpoints.save_every 1000"
).split()


@pytest.mark.parametrize("recipe", ["mmdit", pytest.param("pde", marks=pytest.mark.slow)])
def test_a_step_that_neither_logs_nor_saves_waits_for_nothing(recipe: str, tmp_path: Path) -> None:
    """Every mode, task and stage, two micro-batches a step. The first step and the last one are log points."""
    preset, small = DEMOS[recipe]
    argv = [recipe, preset, *small, *SELDOM, "--output_dir", str(tmp_path / "run")]
    single = Layout("single", 1)
    done = fork(single, command(single, argv, tmp_path, WORKER), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout[-4000:]
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "steps wait for the device at log points and saves only" in log
    found = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))
    print({k: v for k, v in found.items() if v})
    assert set(found) == {"loader", *map(str, range(1, STEPS + 1))}
    assert found["1"]  # the loss, which is how the count is known to count
    assert found[str(STEPS)]
    assert {step: places for step, places in found.items() if places and step.isdigit()}.keys() == {"1", str(STEPS)}
