"""G0 to G8: what one GPU reaches, in at most ten minutes.

    python -m benchmarks.gpu --output benchmarks/results/gpu.json
    python -m benchmarks.gpu --tiny                              # on a CPU: does the script work

Rows come in the order of their weight. A part that fails or for which no time is left is named with the reason, keeps
the rows that it has, and does not stop the others. Contenders that fit on the device together take turns; those of 2 B
parameters do not, and run one after the other. diffusers and torchao are used where they are installed, and named as
absent elsewhere.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import gpu_parts, gpu_saving, gpu_training
from benchmarks.device import Machine
from benchmarks.gpu_contenders import Found, has_diffusers
from benchmarks.method import Row, parser_of, write_results

PARTS: dict[str, tuple[Callable[[Machine, float, Found], None], float]] = {
    "G0": (gpu_parts.g0, 20.0),
    "G1 and G2, 2 B parameters": (gpu_training.g1_large, 120.0),
    "G1 and G2, launch-bound": (gpu_training.g1_small, 60.0),
    "G5": (gpu_parts.g5, 20.0),
    "G4": (gpu_training.g4, 40.0),
    "G1, 4096 tokens": (gpu_training.g1_long, 60.0),
    "G7": (gpu_parts.g7, 25.0),
    "G3": (gpu_saving.g3, 110.0),
    "G6": (gpu_training.g6, 60.0),
    "G1, float8": (gpu_training.g1_float8, 60.0),
    "G8": (gpu_parts.g8, 60.0),
}
"""What runs, and the seconds that must be left for it to begin."""


def measure(machine: Machine, names: list[str]) -> tuple[list[Row], dict[str, Any], dict[str, str]]:
    """Every part in turn; rows, details, and what did not run, with the reason."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    absent: dict[str, str] = {}
    if not has_diffusers():
        absent["diffusers"] = "not installed: the peers train our model on torch's own attention"
    size = 128 if machine.tiny else 8192
    rate = gpu_parts.product_rate(machine, size, size, size)
    for name in names:
        part, needed = PARTS[name]
        if machine.left < needed:
            absent[name] = f"{machine.left:.0f} s were left of {machine.limit_seconds:.0f}, it needs {needed:.0f}"
            continue
        began, found = time.perf_counter(), Found()
        try:
            part(machine, rate, found)
        except Exception as error:  # whatever a kernel, a driver or a peer raises: the others are still worth measuring
            what = f"the rest of {name}" if found.rows else name
            absent[what] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        rows += found.rows
        absent |= found.absent
        details[name] = found.details
        machine.release()
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    last = gpu_parts.product_rate(machine, size, size, size)
    details["product_flops"] = {"first": rate, "last": last}  # a device that grew hot or was shared shows here
    return rows, details, absent


def main() -> int:
    """Measure and print."""
    parser = parser_of(__doc__, rounds=0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit_seconds", type=float, default=590.0)
    parser.add_argument("--compile_once", choices=("regional", "full"), help="print the compile time as JSON and stop")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device here; --tiny shows that the script works")
    machine = Machine(torch.device("cpu" if options.tiny else "cuda:0"), options.tiny, options.limit_seconds)
    if options.compile_once:
        print(json.dumps(gpu_training.compile_once(options.compile_once, machine)))
        return 0
    rows, details, absent = measure(machine, options.only)
    title = "G0 to G8: one GPU" + (", a dry run: these figures mean nothing" if options.tiny else "")
    met = write_results(options.output, title, rows, details, absent)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
