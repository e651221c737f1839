"""The peak that a simulation finds is that of torch's allocator on a GPU, and the time of a plan is that of a step.

Times are those of a GPU that does nothing else: run ``-k time`` without other processes. Peaks have no such need.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
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
from tests.gpu import counted
from tests.gpu.counted import RUN, SIMULATED, TIMED

WARM_UP = 2
"""Log lines of a run before what is measured of it."""
LINES = 8
"""Log lines after which a run is stopped: neither its evaluation nor its save is compared."""
SECONDS = 0.15
"""By how much the planned time of a step may differ from the measured one."""


def simulated(name: str) -> dict[str, Any]:
    """Return what is counted in step 3."""
    return counted.read()[SIMULATED[name]]


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
    counted.command("calibrate", "--output", str(file), "--precision", precision, "--seconds", "10")
    return str(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rates")


@cache
def measured(name: str, folder: Path) -> tuple[float, float]:
    """Return the bytes of the peak of a run, by torch's count, and the median of its steps' seconds."""
    recipe, *flags = SIMULATED[name].split()
    directory = folder / name.replace(" ", "_")
    words = (sys.executable, f"recipes/{recipe}.py", *flags, *RUN, "--output_dir", str(directory))
    output = folder / f"{name}.txt"
    child = zygote.start(words, output, env=environment())
    lines: list[dict[str, Any]] = []
    while len(lines) < LINES and child.poll() is None:
        time.sleep(0.05)
        lines = train_lines(directory / "metrics.jsonl")
    child.kill()
    child.wait()
    assert len(lines) >= LINES, output.read_text()
    # A log line waits for the device, so the time between two of them is that of their steps.
    seconds = [
        (after["elapsed_seconds"] - before["elapsed_seconds"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(lines[WARM_UP:LINES])
    ]
    return lines[WARM_UP]["memory_peak_gib"] * 2**30, statistics.median(seconds)


def train_lines(file: Path) -> list[dict[str, Any]]:
    """Return the log lines of a run's steps, of one that may be writing them."""
    if not file.exists():
        return []
    return [line for line in read_metrics(file) if line["event"] == "train"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SIMULATED)
def test_the_simulated_peak_is_that_of_a_run(name: str, folder: Path) -> None:
    expected = simulated(name)["peak_in_blocks"]
    found, _ = measured(name, folder)
    print(f"{name}: simulated {expected / 2**30:.3f} GiB, measured {found / 2**30:.3f}")
    # The allocator's count has the workspaces of cuBLAS too, 64 MiB at most.
    assert found == pytest.approx(expected, rel=0.05, abs=64 * 2**20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", TIMED)
def test_the_planned_time_is_that_of_a_run(name: str, folder: Path) -> None:
    found = simulated(name)
    _, seconds = measured(name, folder)
    sheet = data_sheet(torch.cuda.get_device_name())
    by_sheet = planned_seconds(found, sheet) if sheet else None
    planned = planned_seconds(found, calibrated(folder, found["precision"]))
    print(f"{name}: planned {planned:.4f} s by calibrate, {by_sheet} by the data sheet, measured {seconds:.4f}")
    assert planned == pytest.approx(seconds, rel=SECONDS)


def test_a_simulation_gives_a_time() -> None:
    """The half of the test above that needs no GPU."""
    name = data_sheet("NVIDIA H200")
    assert name is not None
    assert 0 < planned_seconds(simulated("language model, full"), name) < 1
    assert data_sheet("an unknown device") is None
