"""A plan that only an offload fits: simulated, written, and started with real processes."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from accel_train.cost_model.rates import LINKS, Link, Rates
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.metrics.records import read_metrics
from accel_train.planning.candidates import LAUNCH_FILES, OFFLOADS, Candidate
from accel_train.planning.probe import probe_of
from accel_train.planning.writing import LAUNCH, PRESET
from tests import compiling, zygote
from tests.distributed.launching import PRESETS, RECIPE, Layout, environment
from tests.planning.test_command import plan
from tests.simulation.counting import counted
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


UNITS = Rates(
    products=math.inf,
    attention=math.inf,
    moved=math.inf,
    host_seconds=0.0,
    links=dict.fromkeys(LINKS, Link(0.0, math.inf)),
    on_host=math.inf,
    copied=math.inf,
)
"""Nothing takes time."""


# Slow: five simulations, three of them of DeepSpeed's engine, to show what the model of time says of each offload.
@pytest.mark.slow
@pytest.mark.parametrize(("plain", "processes"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_what_is_known_before_a_simulation_is_never_too_much(plain: str, processes: int, tmp_path: Path) -> None:
    compiling.skip_without_deepspeed()
    flags = ("--precision", "bf16", "--global_batch_size", "16", "--micro_batch_size", str(16 // processes))
    known = counted(Layout(plain, processes), tmp_path, *flags)
    for strategy in OFFLOADS:
        found = counted(Layout(strategy, processes), tmp_path, *flags)
        # One rate at a time; a second of the bound is at least half of a second.
        for name, share in (("products", 1.0), ("attention", 1.0), ("on_host", 0.5), ("copied", 0.3)):
            rates = replace(UNITS, **{name: 1.0})
            bound = probe_of(Candidate(plain, "none", 16 // processes), 1, known, rates).least_offloaded
            seconds = probe_of(Candidate(strategy, "none", 16 // processes), 1, found, rates).time.total
            assert share * seconds <= bound <= seconds * (1 + 1e-9), (strategy, name, bound / seconds)
