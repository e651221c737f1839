"""What a run prints, by the scaffold of ``accel-train init``: what a person needs to see, and each thing once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_train.metrics.records import read_metrics
from tests import zygote
from tests.distributed.launching import ROOT, environment

SCAFFOLD = ROOT / "recipes" / "scaffold" / "recipe.py"
FLAGS = ["--max_steps", "2", "--schedule.warmup_steps", "1", "--output_dir", "run"]


def printed(folder: Path, *flags: str) -> list[str]:
    command = [sys.executable, str(SCAFFOLD), *FLAGS, *flags]
    done = zygote.run(command, cwd=folder, env=environment(PYTHONPATH=str(ROOT)), apart=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.distributed
def test_the_console_has_what_was_asked_for_and_the_log_has_every_choice(tmp_path: Path) -> None:
    lines = printed(tmp_path, "--sync", "last")
    preamble = lines[: next(i for i, line in enumerate(lines) if line.startswith("step 1/"))]
    log = tmp_path / "run" / "logs" / "rank_0.log"
    assert preamble == [
        f"fresh start in {tmp_path / 'run'}",
        "single: 1 process(es) on cpu",
        "as requested: gradients are reduced on the last micro-batch",
        f"automatic choices, with reasons: {log}",
    ]
    assert sum("heldout_loss" in line for line in lines) == 1

    text = log.read_text()
    facts = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert facts["choices"].keys() >= {"attention", "compile.mode", "optimizer.name", "sync", "step_guard"}
    for choice in (*facts["choices"].values(), "torch thread(s)", "loader: 0 workers"):
        assert choice in text
