"""G0 to G8: the performance of one GPU, in parts, each with a result file of its own.

    python -m benchmarks.gpu                                # about twelve minutes; into benchmarks/results
    python -m benchmarks.gpu --only saving --directory /tmp/check
    python -m benchmarks.gpu --tiny --directory /tmp/check  # on a CPU: does the script work

A part is written as soon as it ends. A part that fails, or for which too little time or memory is left, is named with
the reason, keeps the rows it has, and does not stop the others. It never replaces a file with more rows that have a
target. Results of another device in the directory are refused. Contenders that fit on the device together take turns.
Those of 2 B parameters do not fit and run one after the other. diffusers and torchao are used if installed, and named
as absent otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import gpu_parts, gpu_saving, gpu_training, performance_page
from benchmarks.device import Machine
from benchmarks.gpu_contenders import Found, has_diffusers, in_words
from benchmarks.method import RESULTS, write_results
from benchmarks.sd3 import Shape

VALUES = 2.03e9
"""Parameters of SD3-medium."""
STATE = 20 * VALUES
"""Bytes of weights, gradients, both moments of AdamW and the EMA, in fp32."""
COMPILED, EAGER = 1.5e6, 1.8e6
"""Bytes per token that the forward keeps for the backward, rounded up from 1.46 and 1.77 MB on an H200."""


@dataclass(frozen=True)
class Part:
    """A part of the suite, which fills one file."""

    title: str
    measure: Callable[[Machine, float, Found], None]
    seconds: float
    """Time in seconds that must be left for the part to start."""
    bytes: Callable[[Machine], float] = lambda _: 0.0
    """Device memory that must be free, for our own run. A peer that needs more fails when it runs out."""


def training(machine: Machine) -> float:
    """Return the bytes needed for compiled training at the large shape."""
    return STATE + COMPILED * tokens(machine.large())


def long_training(machine: Machine) -> float:
    return STATE + COMPILED * max(tokens(machine.long()), tokens(machine.wide_heads()))


def offloaded(machine: Machine) -> float:
    """Return the bytes needed for the baseline: eager training, state on the device, accumulated gradients."""
    return STATE + 4 * VALUES + EAGER * tokens(machine.large())


def stepping(_: Machine) -> float:
    """Return the bytes needed for the optimizers alone, one of which has temporary tensors of all values."""
    return STATE + 8 * VALUES


def tokens(shape: Shape) -> int:
    """Return the number of tokens in a batch."""
    return shape.batch * (shape.image_tokens + shape.text_tokens)


PARTS = {
    "ceilings": Part("G0: ceilings of the device", gpu_parts.g0, 20.0),
    "large": Part("G1 and G2: a step of 2 B parameters", gpu_training.g1_large, 120.0, training),
    "trace": Part("G1: where the time of the large step goes", gpu_training.trace, 110.0, training),
    "small": Part("G1 and G2: a launch-bound step", gpu_training.g1_small, 60.0),
    "optimizer": Part("G5: the optimizer", gpu_parts.g5, 20.0, stepping),
    "checkpointing": Part("G4: activation checkpointing", gpu_training.g4, 40.0),
    "long": Part("G1: 4096 tokens, and wide heads", gpu_training.g1_long, 60.0, long_training),
    "data": Part("G7: data wait", gpu_parts.g7, 25.0),
    "saving": Part("G3: saving", gpu_saving.g3, 150.0),
    "compile": Part("G6: compile times", gpu_training.g6, 60.0),
    "float8": Part("G1: float8", gpu_training.g1_float8, 60.0, training),
    "offload": Part("G8: optimizer state in host memory", gpu_parts.g8, 60.0, offloaded),
}
"""Parts by name, the most important first."""


def lacking(name: str, machine: Machine) -> str | None:
    """Return why a part cannot start, time or memory with the numbers, or None if it can."""
    part = PARTS[name]
    if machine.left < part.seconds:
        return (
            f"TimeoutError: {machine.left:.0f} s were left of {machine.limit_seconds:.0f}, it needs {part.seconds:.0f}"
        )
    needed, free = part.bytes(machine), machine.free_bytes()
    if not machine.tiny and free < needed:
        return f"needs {needed / 1e9:.0f} GB of the device, {free / 1e9:.0f} are free"
    return None


def measure(machine: Machine, name: str, rate: float) -> Found:
    """Measure one part; return rows, details, and what did not run, with the reason. Errors are recorded."""
    found = Found()
    if (reason := lacking(name, machine)) is not None:
        found.fails(name, reason)
        return found
    if not has_diffusers():
        found.absent["diffusers"] = "not installed: the peers train our model on torch's own attention"
    began = time.perf_counter()
    try:
        PARTS[name].measure(machine, rate, found)
    except (
        Exception
    ) as error:  # whatever a kernel, a driver or a peer raises, the other parts are still worth measuring
        found.fails(f"the rest of {name}" if found.rows else name, in_words(error))
    machine.release()
    print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def write(machine: Machine, name: str, found: Found, rates: tuple[float, float], directory: Path) -> bool:
    """Write the file of a part and return True if it is complete and misses no target.

    Without rows, only the reason is printed. An existing file with more rows that have a target is kept, and the new
    one goes to the folder ``incomplete``. ``rates`` are the FLOP/s of a product before and after the part.
    """
    if not found.rows:
        print(f"not measured: {found.absent}", flush=True)
        return False
    title = PARTS[name].title + (", a dry run: these figures mean nothing" if machine.tiny else "")
    # these show if the device grew hot or was shared
    details = found.details | {"product_flops": dict(zip(("before", "after"), rates, strict=True))}
    path = directory / f"gpu_{name}.json"
    before, now = targets_in(path), sum(found_row.target is not None for found_row in found.rows)
    if now < before:
        path = directory / "incomplete" / path.name
        print(f"gpu_{name}.json has {before} rows with a target, and here are {now}: it stays; see {path}", flush=True)
    met = write_results(path, title, found.rows, details, found.absent, gpu=not machine.tiny)
    return met and not found.failed


def targets_in(path: Path) -> int:
    """Return the number of rows with a target in a file; 0 if it does not exist."""
    if not path.exists():
        return 0
    return sum(stored["target"] is not None for stored in json.loads(path.read_text())["rows"])


def of_another_device(directory: Path, name: str, parts: Sequence[str]) -> list[str]:
    """Return the result files of devices other than ``name`` that a run of ``parts`` would not overwrite."""
    found: list[str] = []
    for path in sorted([*directory.glob("gpu_*.json"), *directory.glob("one_gpu.json")]):
        own = performance_page.device(json.loads(path.read_text())["environment"])
        if own != name and path.stem.removeprefix("gpu_") not in parts:
            found.append(f"{path.name} ({own})")
    return found


def main() -> int:
    """Measure, print and write the parts. Returns 1 if one is incomplete or misses a target, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, to test that the script works; results mean nothing"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit_seconds", type=float, default=1200.0)
    parser.add_argument("--compile_once", choices=("regional", "full"), help="print the compile time as JSON and stop")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device here; --tiny shows that the script works")
    if options.tiny and options.directory == RESULTS:
        parser.error("--tiny: its figures mean nothing; give another --directory than benchmarks/results")
    if not options.tiny and not options.compile_once:
        device = torch.cuda.get_device_name(0)
        if others := of_another_device(options.directory, device, options.only):
            parser.error(
                f"--directory {options.directory}: results there are of another device than this {device}: "
                f"{', '.join(others)}; give a directory of its own, or delete them first"
            )
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
