"""A plan runs under its limit on a GPU, and the next larger micro-batch runs out of memory there."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.planning.candidates import divisors
from accel_train.planning.memory import GIB, RULES
from tests import zygote
from tests.distributed.launching import environment

BATCH = 64
SHORT = f"--global_batch_size {BATCH} --max_steps 3 --log.log_every 1 --evaluation.samples 8 --checkpoints.keep_last 1"
MMDIT = f"mmdit base --model.depth 6 {SHORT}"
WIDE = "--model.hidden_size 1024 --model.intermediate_size 2816 --model.num_attention_heads 8 --precision bf16"
TEXT = f"causal_lm causal_lm_demo --data.packing false {WIDE} {SHORT}"
MODE = "--activation_checkpointing.mode"
CASES = [
    *((f"{MMDIT} {MODE} none", gib) for gib in (7.2, 8.4, 9.6)),
    *((f"{TEXT} {MODE} none", gib) for gib in (2.15, 2.6, 3.2)),
]
"""A recipe with its flags, and the GiB of a GPU: from 6.64 with one sample to 10.39 with all, and from 1.79 to 3.66."""
SHARE_OF_CASES = 0.8
(CONTEXT,) = (rule.gib for rule in RULES if rule.name == "CUDA context")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return zygote.run(words, env=environment(), timeout=500, apart=True)


def plan(line: str, gib: float) -> dict[str, Any]:
    words = ("--gpus", "1", "--vram_gib", str(gib), "--margin_gib", "0", "--json")
    done = run(sys.executable, "-m", "accel_train.cli", "plan", *line.split(), *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["plan"]


def fits(line: str, gib: float, chosen: dict[str, Any], size: int, directory: Path) -> bool:
    """Train the plan's steps with a micro-batch of ``size`` on so much of this GPU."""
    recipe, *flags = line.split()
    # The share is that of torch's allocator, which has no part in the context.
    fraction = (gib - CONTEXT) * GIB / torch.cuda.get_device_properties(0).total_memory
    flags += ["--micro_batch_size", str(size), "--memory.fraction", f"{fraction:.6f}", "--out_of_memory", "stop"]
    if chosen["blocks"] is not None:
        flags += ["--activation_checkpointing.blocks", str(chosen["blocks"])]
    done = run(sys.executable, f"recipes/{recipe}.py", *flags, "--output_dir", str(directory))
    if done.returncode == 0:
        return True
    assert "ran out of memory" in done.stdout + done.stderr, done.stdout[-4000:] + done.stderr[-4000:]
    return False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_plan_fits_and_the_next_larger_micro_batch_does_not(tmp_path: Path) -> None:
    sizes = divisors(BATCH)

    def exceeds(number: int) -> bool:
        line, gib = CASES[number]
        chosen = plan(line, gib)
        size = chosen["micro_batch_size"]
        assert size < BATCH, f"{line}: all of it fits into {gib} GiB"
        assert fits(line, gib, chosen, size, tmp_path / f"planned-{number}"), f"{line}: {gib} GiB, {size} samples"
        larger = sizes[sizes.index(size) + 1]
        exceeded = not fits(line, gib, chosen, larger, tmp_path / f"larger-{number}")
        print(f"{gib} GiB, {line}: {size} fits, {larger} {'does not' if exceeded else 'fits as well'}")
        return exceeded

    # Beside one another: each has a share of the memory of its own, and no time is taken.
    with ThreadPoolExecutor(len(CASES)) as pool:
        exceeded = list(pool.map(exceeds, range(len(CASES))))
    assert sum(exceeded) >= SHARE_OF_CASES * len(CASES)


@pytest.mark.slow  # half a dozen plans
@pytest.mark.parametrize(("line", "gib"), CASES, ids=str)
def test_each_case_has_a_plan_below_the_whole_batch(line: str, gib: float) -> None:
    """The half of the test above that needs no GPU."""
    assert plan(line, gib)["micro_batch_size"] < BATCH
