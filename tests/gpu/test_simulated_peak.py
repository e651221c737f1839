"""The peak that a simulation finds is that of torch's allocator on a GPU, and the time of a plan is that of a step.

Times are those of a GPU that does nothing else: run ``-k time`` without other processes. Peaks have no such need.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.cost_model.devices import DEVICES, rated
from accel_train.metrics.records import read_metrics
from accel_train.planning.candidates import Candidate
from accel_train.planning.probe import probe_of
from tests import zygote
from tests.distributed.launching import environment

STEPS, WARM_UP = 16, 3
"""Steps of a run, and those before what is measured of it."""
SECONDS = 0.15
"""By how much the planned time of a step may differ from the measured one."""
MODEL = f"--model.depth 6 --max_steps {STEPS} --log.log_every 1 --evaluation.samples 8 --checkpoints.no_save_state"
TEXT = (
    f"causal_lm_demo --data.packing false --max_steps {STEPS} --log.log_every 1 --evaluation.samples 8 "
    "--precision bf16 --checkpoints.no_save_state"
)
WIDE = f"{TEXT} --model.hidden_size 1024 --model.intermediate_size 2816 --model.num_attention_heads 8"
CONFIGS = {
    "16 samples": f"mmdit base {MODEL} --global_batch_size 16 --micro_batch_size 16",
    "64 samples": f"mmdit base {MODEL} --global_batch_size 64 --micro_batch_size 64",
    "accumulation": f"mmdit base {MODEL} --global_batch_size 64 --micro_batch_size 16",
    "full": f"mmdit base {MODEL} --global_batch_size 64 --micro_batch_size 64 --activation_checkpointing.mode full",
    "selective": f"mmdit base {MODEL} --global_batch_size 64 --micro_batch_size 64 "
    "--activation_checkpointing.mode selective",
    "three of six blocks": f"mmdit base {MODEL} --global_batch_size 64 --micro_batch_size 64 "
    "--activation_checkpointing.mode full --activation_checkpointing.blocks 3",
    "fp32": f"mmdit base {MODEL} --global_batch_size 32 --micro_batch_size 32 --precision fp32",
    "without average": f"mmdit base {MODEL} --global_batch_size 32 --micro_batch_size 32 --ema.decay 0",
    "muon": f"mmdit base {MODEL} --global_batch_size 32 --micro_batch_size 32 --optimizer.name muon",
    "language model": f"causal_lm {WIDE} --global_batch_size 128 --micro_batch_size 128",
    "language model, accumulation": f"causal_lm {WIDE} --global_batch_size 128 --micro_batch_size 32",
    "language model, full": f"causal_lm {WIDE} --global_batch_size 128 --micro_batch_size 128 "
    "--activation_checkpointing.mode full",
}


def output(*words: str) -> str:
    done = zygote.run(words, env=environment(), timeout=500, apart=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@cache
def simulated(name: str) -> dict[str, Any]:
    """Return what is counted in step 3."""
    simulate = (sys.executable, "-m", "accel_train.cli", "simulate", *CONFIGS[name].split())
    (found,) = json.loads(output(*simulate, "--num_processes", "1", "--step", "3", "--json"))
    return found


def data_sheet(torch_name: str) -> str | None:
    """Return the name that a plan knows the device by, None for one without a data sheet."""
    return next((name for name, device in DEVICES.items() if device.torch_name == torch_name), None)


def planned_seconds(found: dict[str, Any], device: str) -> float:
    """Return the modelled seconds of the step by the rates of a device, or of a file of ``accel-train calibrate``."""
    rates = rated(device, found["precision"], 1).rates
    return probe_of(Candidate("single", "none", found["rows"]), found["micro_batches"], found, rates).time.total


@cache
def calibrated(folder: Path, precision: str) -> str:
    """Return the file of this GPU's own rates."""
    file = folder / f"{precision}.json"
    calibrate = (sys.executable, "-m", "accel_train.cli", "calibrate")
    output(*calibrate, "--output", str(file), "--precision", precision, "--seconds", "10")
    return str(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rates")


@cache
def measured(name: str, folder: Path) -> tuple[float, float]:
    """Return the bytes of the peak of a run, by torch's count, and the median of its steps' seconds."""
    recipe, *flags = CONFIGS[name].split()
    directory = folder / name.replace(" ", "_")
    output(sys.executable, f"recipes/{recipe}.py", *flags, "--output_dir", str(directory))
    lines = [line for line in read_metrics(directory / "metrics.jsonl") if line["event"] == "train"]
    assert len(lines) == STEPS
    # A log line waits for the device, so the time between two of them is that of a step.
    ends = [line["elapsed_seconds"] for line in lines[WARM_UP:]]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return lines[WARM_UP]["memory_peak_gib"] * 2**30, statistics.median(seconds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_simulated_peak_is_that_of_a_run(name: str, folder: Path) -> None:
    expected = simulated(name)["peak_in_blocks"]
    found, _ = measured(name, folder)
    print(f"{name}: simulated {expected / 2**30:.3f} GiB, measured {found / 2**30:.3f}")
    # The allocator's count has the workspaces of cuBLAS too, 64 MiB at most.
    assert found == pytest.approx(expected, rel=0.05, abs=64 * 2**20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_planned_time_is_that_of_a_run(name: str, folder: Path) -> None:
    counted = simulated(name)
    _, seconds = measured(name, folder)
    sheet = data_sheet(torch.cuda.get_device_name())
    by_sheet = planned_seconds(counted, sheet) if sheet else None
    planned = planned_seconds(counted, calibrated(folder, counted["precision"]))
    print(f"{name}: planned {planned:.4f} s by calibrate, {by_sheet} by the data sheet, measured {seconds:.4f}")
    assert planned == pytest.approx(seconds, rel=SECONDS)


@pytest.mark.slow
def test_a_simulation_gives_peak_and_time() -> None:
    """The half of the test above that needs no GPU."""
    counted = simulated("language model, full")
    assert counted["peak_in_blocks"] > 0
    name = data_sheet("NVIDIA H200")
    assert name is not None
    assert 0 < planned_seconds(counted, name) < 1
    assert data_sheet("an unknown device") is None


def test_each_configuration_is_one_that_a_recipe_takes() -> None:
    """On any machine: an option that was renamed would only show on a GPU."""
    from accel_train.commands.bundled import find_recipe, import_recipe
    from accel_train.options.loading import config_of

    for name, line in CONFIGS.items():
        recipe, *flags = line.split()
        assert config_of(import_recipe(find_recipe(recipe)).main, flags) is not None, name
