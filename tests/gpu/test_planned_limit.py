"""A plan runs under its limit on a GPU, and the next larger micro-batch runs out of memory there."""

from __future__ import annotations

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
from tests.gpu import counted
from tests.gpu.counted import PLANNED, PLANNED_BATCH

SHARE_OF_CASES = 0.8
(CONTEXT,) = (rule.gib for rule in RULES if rule.name == "CUDA context")


def plan(line: str, gib: float) -> dict[str, Any]:
    return counted.read()[f"{gib} GiB: {line}"]


def fits(line: str, gib: float, chosen: dict[str, Any], size: int, directory: Path) -> bool:
    """Train the plan's steps with a micro-batch of ``size`` on so much of this GPU."""
    recipe, *flags = line.split()
    # The share is that of torch's allocator, which has no part in the context.
    fraction = (gib - CONTEXT) * GIB / torch.cuda.get_device_properties(0).total_memory
    flags += ["--micro_batch_size", str(size), "--memory.fraction", f"{fraction:.6f}", "--out_of_memory", "stop"]
    if chosen["blocks"] is not None:
        flags += ["--activation_checkpointing.blocks", str(chosen["blocks"])]
    words = (sys.executable, f"recipes/{recipe}.py", *flags, "--output_dir", str(directory))
    done = zygote.run(words, env=environment(), timeout=500)
    if done.returncode == 0:
        return True
    assert "ran out of memory" in done.stdout, done.stdout[-4000:]
    return False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_plan_fits_and_the_next_larger_micro_batch_does_not(tmp_path: Path) -> None:
    sizes = divisors(PLANNED_BATCH)

    def exceeds(number: int) -> bool:
        line, gib = PLANNED[number]
        chosen = plan(line, gib)
        size = chosen["micro_batch_size"]
        assert fits(line, gib, chosen, size, tmp_path / f"planned-{number}"), f"{line}: {gib} GiB, {size} samples"
        larger = sizes[sizes.index(size) + 1]
        exceeded = not fits(line, gib, chosen, larger, tmp_path / f"larger-{number}")
        print(f"{gib} GiB, {line}: {size} fits, {larger} {'does not' if exceeded else 'fits as well'}")
        return exceeded

    # Beside one another: each has a share of the memory of its own, and no time is taken.
    with ThreadPoolExecutor(len(PLANNED)) as pool:
        exceeded = list(pool.map(exceeds, range(len(PLANNED))))
    assert sum(exceeded) >= SHARE_OF_CASES * len(PLANNED)


@pytest.mark.parametrize(("line", "gib"), PLANNED, ids=str)
def test_each_case_has_a_plan_below_the_whole_batch(line: str, gib: float) -> None:
    assert plan(line, gib)["micro_batch_size"] < PLANNED_BATCH
