"""A plan that only an offload fits: simulated, written, and started with real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from accel_train.launch_files.machine_config import read_machine_config
from accel_train.metrics.records import read_metrics
from accel_train.planning.candidates import LAUNCH_FILES, OFFLOADS
from accel_train.planning.writing import LAUNCH, PRESET
from tests import compiling, zygote
from tests.distributed.launching import PRESETS, RECIPE, environment
from tests.planning.test_command import plan
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.distributed
LARGE = "--model.width 1024 --model.depth 4 --model.heads 16 --precision bf16".split()
"""States of 20 bytes a parameter, in fp32, are more than weights of 2 and DeepSpeed's bucket of 1 GB."""


# Slow: a dozen simulations of DeepSpeed's engine, and a model of gigabytes.
@pytest.mark.slow
def test_what_only_an_offload_fits_is_planned_and_starts(tmp_path: Path) -> None:
    compiling.skip_without_deepspeed()
    files = tmp_path / "planned"
    limits = ("--vram_gib", "3", "--margin_gib", "0", "--host_gib", "32")
    done = plan(*LARGE, "--gpus", "1", *limits, "--json", "--write", str(files))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    chosen = found["plan"]
    assert chosen["strategy"] in OFFLOADS
    assert {probe["strategy"] for probe in found["others"] if probe["fits"]} <= set(OFFLOADS)
    assert chosen["needed_gib"] <= 3
    assert chosen["host_bytes"]["master weights"] > 4 * 2**27
    machine = read_machine_config(files / LAUNCH)
    assert machine.deepspeed == read_machine_config(PRESETS / LAUNCH_FILES[chosen["strategy"]]).deepspeed
    assert machine.num_processes == 1

    run = tmp_path / "run"
    words = ["rehearse", "--config_file", str(files / LAUNCH), str(RECIPE), str(files / PRESET), "--smoke"]
    head = [sys.executable, "-m", "accel_train.cli", *words, "--output_dir", str(run)]
    done = zygote.run(head, env=environment(), timeout=PATIENCE_SECONDS, kind="sharded")
    assert done.returncode == 0, done.stdout[-4000:]
    events = read_metrics(run / "metrics.jsonl")
    assert len([event for event in events if event["event"] == "train"]) == 2
