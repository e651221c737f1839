"""The guard under strategies with real processes: the same training, no reads, and one error on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import ROOT, Layout, command, fork

pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests" / "distributed" / "guard_worker.py"


def work(layout: Layout, folder: Path) -> dict[str, Any]:
    done = fork(layout, command(layout, [], folder, WORKER), PYTHONPATH=str(ROOT))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_guarded_training_on_several_processes(strategy: str, tmp_path: Path) -> None:
    found = work(Layout(strategy, 2), tmp_path)
    assert found["guarded"]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-5)
    for guarded, plain in zip(found["guarded"]["weights"], found["plain"]["weights"], strict=True):
        assert guarded == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert found["reads"] == {}
    assert len(found["messages"]) == 2
    assert all(m and "loss of step 8 is not finite" in m and "rank 1" in m for m in found["messages"])
    assert found["unmoved"]
    assert "1 parameter(s)" in found["late"]
    assert "were frozen after the first step" in found["late"]


def test_zero_keeps_its_own_check(tmp_path: Path) -> None:
    found = work(Layout("zero2", 2), tmp_path)
    assert "DeepSpeed's engine clips and steps by itself" in found["reason"]
    assert found["guarded"]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-6)
    assert "were frozen after the first step" in found["late"]
