"""Program that measures on this process's device, together with the other processes of its launcher.

    torchrun --nproc_per_node 2 program.py --output FILE

``accel-train calibrate`` launches it as if it were a recipe.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train.calibration.flags import STOPPED, Options, add_flags, is_launched, options_of
from accel_train.config import UsageError, refuse_unwritable
from accel_train.launch_files.processes import device_of_process
from accel_train.runtime.early_stop import stoppable
from accel_train.runtime.exiting import exit_with

if TYPE_CHECKING:
    import torch

    from accel_train.cost_model.record import Calibration


def main(argv: Sequence[str]) -> int:
    """Measure with the flags of the command line."""
    parser = argparse.ArgumentParser(prog="accel-train calibrate", allow_abbrev=False)
    add_flags(parser)
    options = options_of(parser.parse_args(list(argv)))
    with stoppable(STOPPED):
        return run(options)


def run(options: Options) -> int:
    """Measure on this process's device and return the exit code. The main process prints and writes the result."""
    # Imported late: --help and wrong flags need no torch.
    import torch
    import torch.distributed as dist

    from accel_train.calibration import measuring, report
    from accel_train.cost_model import record
    from accel_train.runtime.threads import resolve_threads

    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        record.refuse_other_file(options.output)
    device = _device()
    precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    if precision == "fp16" and device.type == "cpu":
        raise UsageError("precision: fp16: a GPU is required, and there is none; give --precision bf16 or fp32")
    load = measuring.load_before()
    # On a CPU the rates depend on the number of threads: use as many as a run would.
    threads = resolve_threads(device.type)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and is_launched(os.environ)
    if several:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        torch.manual_seed(0)
        calibration = measuring.measure(measuring.Place(device, precision, load), options.seconds)
        if is_main:
            # Printed first, so that the measurement is not lost if the file cannot be written.
            print(f"{threads}\n{report.describe(calibration)}\n", flush=True)
            _write(options.output, calibration)
    finally:
        if several:
            dist.destroy_process_group()
    return 0


def _write(path: Path, calibration: Calibration) -> None:
    from accel_train.cost_model import record

    with refuse_unwritable(f"output: {path}"):
        record.write(path, calibration)
    print(f"written: {path}", flush=True)


def _device() -> torch.device:
    import torch

    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" or not torch.cuda.is_available():
        return torch.device("cpu")
    index = device_of_process(os.environ, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


if __name__ == "__main__":
    exit_with(main)
