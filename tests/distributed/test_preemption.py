"""A launcher's SIGTERM reaches every process of a run, the readers of its data too: one save, and the code 75."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accel_train.store import manifest
from tests.distributed.launching import RECIPE, ROOT, SMALL, environment
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.distributed
LITTLE_AHEAD = ("--loader.num_workers", "1", "--loader.prefetch_factor", "1", "--micro_batch_size", "1")
"""Eight micro-batches a step on each process, of which one or two have been read."""


def test_readers_go_on_until_the_step_is_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(RECIPE)]
    flags = ["demo", *SMALL, *LITTLE_AHEAD, "--output_dir", str(run)]
    given = environment() | {"ACCELERATE_USE_CPU": "true"}
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen([*command, *flags], cwd=ROOT, env=given, stdout=log, stderr=subprocess.STDOUT)
        metrics = run / "metrics.jsonl"

        def in_step_4() -> bool:
            assert child.poll() is None, (tmp_path / "log").read_text()
            return metrics.exists() and '"step": 3,' in metrics.read_text()

        until(in_step_4)
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=PATIENCE_SECONDS)
    said = (tmp_path / "log").read_text()
    assert "start the same command again to resume (exit code 75)" in said, said[-3000:]
    assert said.count("(what follows is a report of torchrun: it can be ignored, this run has stopped as it was") == 1
    assert "LoadingError" not in said
    assert len(manifest.committed(run / "checkpoints")) == 1
