"""The peak that a simulation finds is that of torch's allocator on a GPU, and the time of a plan is that of a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.metrics.records import read_metrics
from accel_train.planning.candidates import Candidate
from accel_train.planning.devices import DEVICES, rated
from accel_train.planning.probe import probe_of
from tests.distributed.launching import ROOT, environment

MODEL = "--model.depth 6 --max_steps 4 --log.log_every 1 --evaluation.samples 8 --checkpoints.keep_last 1"
TEXT = "causal_lm_demo --data.packing false --max_steps 4 --log.log_every 1 --evaluation.samples 8 --precision bf16"
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
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def simulated(words: list[str]) -> dict[str, Any]:
    """Return what is counted in step 3."""
    simulate = (sys.executable, "-m", "accel_train.cli", "simulate")
    (found,) = json.loads(output(*simulate, *words, "--num_processes", "1", "--step", "3", "--json"))
    return found


def planned_seconds(found: dict[str, Any], torch_name: str) -> float | None:
    """Return the modelled seconds of the step, None for a device without a data sheet."""
    names = [name for name, device in DEVICES.items() if device.torch_name == torch_name]
    if not names:
        return None
    rates = rated(names[0], found["precision"], 1).rates
    return probe_of(Candidate("single", "none", found["rows"]), found["micro_batches"], found, rates).time.total


def measured(words: list[str], directory: Path) -> tuple[float, float]:
    """Return the bytes of the peak of a run, by torch's count, and the seconds of its fourth step."""
    recipe, *flags = words
    output(sys.executable, f"recipes/{recipe}.py", *flags, "--output_dir", str(directory))
    lines = [line for line in read_metrics(directory / "metrics.jsonl") if line["event"] == "train"]
    return lines[2]["memory_peak_gib"] * 2**30, lines[3]["elapsed_seconds"] - lines[2]["elapsed_seconds"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_simulated_peak_is_that_of_the_allocator(name: str, tmp_path: Path) -> None:
    words = CONFIGS[name].split()
    counted = simulated(words)
    expected = counted["peak_in_blocks"]
    found, seconds = measured(words, tmp_path)
    print(f"{name}: simulated {expected / 2**30:.3f} GiB, measured {found / 2**30:.3f}")
    # Only shown: a single step, with a log line behind it.
    print(f"{name}: planned {planned_seconds(counted, torch.cuda.get_device_name())} s, measured {seconds:.4f}")
    # The allocator's count has the workspaces of cuBLAS too, 64 MiB at most.
    assert found == pytest.approx(expected, rel=0.05, abs=64 * 2**20)


@pytest.mark.slow
def test_a_simulation_gives_peak_and_time() -> None:
    """The half of the test above that needs no GPU."""
    counted = simulated(CONFIGS["language model, full"].split())
    assert counted["peak_in_blocks"] > 0
    assert 0 < (planned_seconds(counted, "NVIDIA H200") or 0) < 1
    assert planned_seconds(counted, "an unknown device") is None


def test_each_configuration_is_one_that_a_recipe_takes() -> None:
    """On any machine: an option that was renamed would only show on a GPU."""
    from accel_train.commands.bundled import find_recipe, import_recipe
    from accel_train.options.loading import config_of

    for name, line in CONFIGS.items():
        recipe, *flags = line.split()
        assert config_of(import_recipe(find_recipe(recipe)).main, flags) is not None, name
