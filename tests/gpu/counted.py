"""Simulations and plans that runs on a GPU are compared with, from a file: they need no GPU and take longer than a run.

python -m tests.gpu.counted    # all of them again: three minutes on two cores
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import zygote
from tests.distributed.launching import environment
from tests.planning.plans_page import FIELDS

FILE = Path(__file__).with_name("counted.json")
STEP = 3
MODEL = "--model.depth 6 --evaluation.samples 8"
WIDE = "--model.hidden_size 1024 --model.intermediate_size 2816 --model.num_attention_heads 8 --precision bf16"
TEXT = f"causal_lm causal_lm_demo --data.packing false {WIDE} --evaluation.samples 8"
FULL = "--activation_checkpointing.mode full"
SELECTIVE = "--activation_checkpointing.mode selective"
LARGE = "--global_batch_size 512 --micro_batch_size 512"
ONE_MODE = "--modes.mode unconditional"
"""Every step computes the same, as a time that is compared with a plan's requires."""
BUSY = f"mmdit base {MODEL} {ONE_MODE} {LARGE}"
ROWS = f"{TEXT} --global_batch_size 1024"
SIMULATED = {
    "16 samples": f"mmdit base {MODEL} --global_batch_size 16 --micro_batch_size 16",
    "512 samples": BUSY,
    "accumulation": f"mmdit base {MODEL} {ONE_MODE} --global_batch_size 1024 --micro_batch_size 512",
    "full": f"{BUSY} {FULL}",
    "selective": f"{BUSY} {SELECTIVE}",
    "three of six blocks": f"{BUSY} {FULL} --activation_checkpointing.blocks 3",
    "fp32": f"{BUSY} --precision fp32",
    "without average": f"{BUSY} --ema.decay 0",
    "muon": f"{BUSY} --optimizer.name muon",
    "language model": f"{ROWS} --micro_batch_size 1024",
    "language model, accumulation": f"{ROWS} --micro_batch_size 512",
    "language model, full": f"{ROWS} --micro_batch_size 1024 {FULL}",
}
"""A recipe with its flags, by name. Small steps wait for the host, whose time for a kernel differs from one machine to
the next: but for the first all have so many samples that a kernel takes longer than that."""
TIMED = [name for name in SIMULATED if name != "16 samples"]
"""Those whose time is compared."""
RUN = "--log.log_every 2".split()
"""Further flags of the runs that are compared with these."""
PLANNED_BATCH = 64
SHORT = f"--global_batch_size {PLANNED_BATCH} --max_steps 3 --activation_checkpointing.mode none"
PLANNED = [
    *((f"mmdit base {MODEL} {SHORT}", gib) for gib in (7.2, 8.4, 9.6)),
    *((f"{TEXT} {SHORT}", gib) for gib in (2.15, 2.6, 3.2)),
]
"""A recipe with its flags, and the GiB of a GPU: from 6.64 with one sample to 10.39 with all, and from 1.79 to 3.66."""
READ = (*FIELDS, "rows")
"""What a plan reads of a simulation, and the micro-batch."""


def command(*words: str) -> str:
    """What ``accel-train`` prints with these words."""
    done = zygote.run((sys.executable, "-m", "accel_train.cli", *words), env=environment(), timeout=600, apart=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def simulate(line: str) -> dict[str, Any]:
    """Return what is counted in step 3 of a recipe with its flags."""
    (found,) = json.loads(command("simulate", *line.split(), *"--num_processes 1 --json --step".split(), str(STEP)))
    return {name: found[name] for name in READ}


def plan(line: str, gib: float) -> dict[str, Any]:
    """Return the plan of a recipe with its flags for one GPU of so many GiB."""
    # With so little host memory no offload fits, whether DeepSpeed is installed or not.
    words = f"--gpus 1 --vram_gib {gib} --margin_gib 0 --host_gib 1 --json"
    found = json.loads(command("plan", *line.split(), *words.split()))["plan"]
    return {name: found[name] for name in ("micro_batch_size", "blocks", "mode", "bytes_in_blocks")}


def entries() -> dict[str, tuple[str, float | None]]:
    """Return what the file has, by key: a line, and the GiB of a plan."""
    simulations: dict[str, tuple[str, float | None]] = {line: (line, None) for line in SIMULATED.values()}
    return simulations | {f"{gib} GiB: {line}": (line, gib) for line, gib in PLANNED}


def found_again(key: str) -> dict[str, Any]:
    """Return an entry of the file, simulated or planned now."""
    line, gib = entries()[key]
    return simulate(line) if gib is None else plan(line, gib)


def read() -> Mapping[str, Any]:
    """Return all entries by key."""
    return json.loads(FILE.read_text())


def main() -> None:
    """Write the file."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(entries(), pool.map(found_again, entries()), strict=True))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
