"""G0 to G8: what one GPU reaches, in parts, each of them a file of its own.

    python -m benchmarks.gpu                                # about twelve minutes; into benchmarks/results
    python -m benchmarks.gpu --only saving --directory /tmp/check
    python -m benchmarks.gpu --tiny --directory /tmp/check  # on a CPU: does the script work

A part is written as soon as it ends; a part that fails or for which no time is left is named with the reason, keeps the
rows that it has, and does not stop the others. Contenders that fit on the device together take turns; those of 2 B
parameters do not, and run one after the other. diffusers and torchao are used where they are installed, and named as
absent elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import gpu_parts, gpu_saving, gpu_training, performance_page
from benchmarks.device import Machine
from benchmarks.gpu_contenders import Found, has_diffusers
from benchmarks.method import RESULTS, write_results


@dataclass(frozen=True)
class Part:
    """What one file holds."""

    title: str
    measure: Callable[[Machine, float, Found], None]
    seconds: float
    """That must be left for it to begin."""


PARTS = {
    "ceilings": Part("G0: ceilings of the device", gpu_parts.g0, 20.0),
    "large": Part("G1 and G2: a step of 2 B parameters", gpu_training.g1_large, 120.0),
    "trace": Part("G1: where the time of the large step goes", gpu_training.trace, 110.0),
    "small": Part("G1 and G2: a launch-bound step", gpu_training.g1_small, 60.0),
    "optimizer": Part("G5: the optimizer", gpu_parts.g5, 20.0),
    "checkpointing": Part("G4: activation checkpointing", gpu_training.g4, 40.0),
    "long": Part("G1: 4096 tokens, and wide heads", gpu_training.g1_long, 60.0),
    "data": Part("G7: data wait", gpu_parts.g7, 25.0),
    "saving": Part("G3: saving", gpu_saving.g3, 110.0),
    "compile": Part("G6: compile times", gpu_training.g6, 60.0),
    "float8": Part("G1: float8", gpu_training.g1_float8, 60.0),
    "offload": Part("G8: optimizer state in host memory", gpu_parts.g8, 60.0),
}
"""By name, in the order of their weight."""


def measure(machine: Machine, name: str, rate: float) -> Found:
    """One part: its rows, details, and what of it did not run, with the reason."""
    part, found = PARTS[name], Found()
    if machine.left < part.seconds:
        found.absent[name] = (
            f"{machine.left:.0f} s were left of {machine.limit_seconds:.0f}, it needs {part.seconds:.0f}"
        )
        return found
    if not has_diffusers():
        found.absent["diffusers"] = "not installed: the peers train our model on torch's own attention"
    began = time.perf_counter()
    try:
        part.measure(machine, rate, found)
    except Exception as error:  # whatever a kernel, a driver or a peer raises: the others are still worth measuring
        what = f"the rest of {name}" if found.rows else name
        found.absent[what] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    machine.release()
    print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def write(machine: Machine, name: str, found: Found, rates: tuple[float, float], directory: Path) -> bool:
    """The file of a part, or what kept it from being measured; returns whether no target was missed."""
    if not found.rows:
        print(f"not measured: {found.absent}", flush=True)
        return False
    title = PARTS[name].title + (", a dry run: these figures mean nothing" if machine.tiny else "")
    # a device that grew hot or was shared shows in these
    details = found.details | {"product_flops": dict(zip(("before", "after"), rates, strict=True))}
    return write_results(directory / f"gpu_{name}.json", title, found.rows, details, found.absent, gpu=not machine.tiny)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--tiny", action="store_true", help="sizes at which figures mean nothing: does the script work")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit_seconds", type=float, default=1200.0)
    parser.add_argument("--compile_once", choices=("regional", "full"), help="print the compile time as JSON and stop")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device here; --tiny shows that the script works")
    if options.tiny and options.directory == RESULTS:
        parser.error("--tiny: its figures mean nothing; give another --directory than benchmarks/results")
    machine = Machine(torch.device("cpu" if options.tiny else "cuda:0"), options.tiny, options.limit_seconds)
    if options.compile_once:
        print(json.dumps(gpu_training.compile_once(options.compile_once, machine)))
        return 0
    size = 128 if machine.tiny else 8192
    rate = gpu_parts.product_rate(machine, size, size, size)
    met = True
    for name in options.only:
        found = measure(machine, name, rate)
        after = gpu_parts.product_rate(machine, size, size, size)
        met = write(machine, name, found, (rate, after), options.directory) and met
    if options.directory == RESULTS:
        performance_page.PAGE.write_text(performance_page.page(RESULTS))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
