"""Ten thousand steps of the demo: nothing becomes non-finite, and nothing grows."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from tests.distributed.launching import Layout, run_recipe

STEPS = 10_000
FLAGS = (
    f"--max_steps {STEPS} --log.log_every 100 --checkpoints.save_every 1000 --checkpoints.keep_last 2 "
    "--global_batch_size 8 --micro_batch_size 8 --model.width 32 --model.depth 2 --model.heads 2 --optimizer.lr 5e-4"
).split()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_steps_are_as_the_first_thousand(tmp_path: Path) -> None:
    run = run_recipe(Layout("single", 1), tmp_path / "run", *FLAGS, timeout=3500)
    lines = list(run.train_lines().values())
    assert len(lines) >= STEPS // 100
    assert all(math.isfinite(line[name]) for line in lines for name in ("loss", "grad_norm"))
    assert statistics.mean(line["loss"] for line in lines[-10:]) < lines[0]["loss"]

    memory = {line["step"]: line["process_rss_gib"] for line in lines}
    warm = memory[2000]  # two saves, so that the buffers of snapshot and writer are there
    assert memory[STEPS] <= warm * 1.05, memory

    # Time of the processor, not of the clock: other work on the machine does not move it.
    spent = {line["step"]: line["processor_seconds"] for line in lines}
    first = spent[3000] - spent[1000]
    last = spent[STEPS] - spent[STEPS - 2000]
    print(f"rss {warm:.3f} -> {memory[STEPS]:.3f} GiB, {first:.1f} -> {last:.1f} s of the processor for 2,000 steps")
    assert last <= 1.4 * first
