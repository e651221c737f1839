"""The script for one GPU: dry-run on CPU always, for real where there is a device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.launching import ROOT, environment


def run(tmp_path: Path, *arguments: str) -> dict[str, dict[str, object]]:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.one_gpu", "--output", str(output), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())["runs"]


@pytest.mark.slow
@pytest.mark.distributed
def test_dry_run_on_cpu(tmp_path: Path) -> None:
    runs = run(tmp_path, "--dry_run", "--only", "single_gpu", "zero2_offload")
    assert set(runs) == {f"{n} {p}" for n in ("single_gpu", "zero2_offload") for p in ("bf16", "fp32")}
    assert all(len(r["losses"]) == 3 for r in runs.values())  # type: ignore[arg-type]
    difference = runs["zero2_offload fp32"]["loss_difference_to_one_process"]
    assert isinstance(difference, float)
    assert difference < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_preset_on_one_gpu(tmp_path: Path) -> None:
    runs = run(tmp_path)
    for name, result in runs.items():
        assert "skipped" in result or result["losses"], name
    assert "fused" in str(runs["single_gpu bf16"]["optimizer"])
    assert "memory_peak_gib" in runs["single_gpu bf16"]
