"""Flags of ``accel-train simulate``, given before or after the recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from accel_train.config import UsageError, flags_behind
from accel_train.cost_model.networks import GPUS_PER_MACHINE, NETWORKS, machines_of

REQUEST = "request.json"
REPORT = "report.json"
"""Files by which the command and the simulating process communicate."""

DeviceType = Literal["cuda", "cpu"]
"""Device type whose autocast is simulated. Everything else is computed as on a CPU."""
DEVICE_TYPE: DeviceType = "cuda"


@dataclass(frozen=True)
class Options:
    """Flags of the command itself."""

    config_file: str | None
    num_processes: tuple[int | None, ...]
    step: int | None
    micro_batches: int | None
    as_json: bool
    picture: str | None
    device_type: DeviceType | None = None
    """None: that of ``device``, else cuda."""
    largest: int | None = None
    """Maximum number of the step's micro-batches to run, the largest ones. Not a flag: ``accel-train plan`` sets it."""
    device: str | None = None
    """Device whose rates give the step time. None: no step time."""
    link: str | None = None
    """Link between machines."""
    gpus_per_machine: int | None = None
    """None: those of a launch file for several machines, else ``GPUS_PER_MACHINE``."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("--config_file", help="accelerate launch file; default: the same as for `accelerate launch`")
    parser.add_argument(
        "--num_processes",
        metavar="N[,N...]",
        help="processes over all machines; several numbers give a table; default: from the file",
    )
    parser.add_argument("--step", type=int, help="number of the step, from 1; default: the middle of the run")
    parser.add_argument(
        "--micro_batches",
        type=int,
        help="micro-batches of each process, instead of global_batch_size: the same work for any number of processes",
    )
    parser.add_argument(
        "--device_type",
        choices=get_args(DeviceType),
        help="whose autocast decides what is kept in fp32; default: cuda, or cpu with the calibration of a CPU",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="model of the GPU, such as h100-sxm, or a file of calibrate: step times"
    )
    parser.add_argument("--link", metavar="NAME", help=f"link between machines: {', '.join(NETWORKS)}; with --device")
    parser.add_argument(
        "--gpus_per_machine",
        type=int,
        help="GPUs of a machine, which its own link connects; with --device; default: those of a launch file for "
        f"several machines, else {GPUS_PER_MACHINE}",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with the curve of memory")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the memory by category over the step; efficiency")


def read_arguments(words: Sequence[str], earlier: argparse.Namespace) -> tuple[list[str], Options]:
    """Take the command's own flags out of the words after the recipe. ``earlier`` holds the flags before it."""
    flags, rest = flags_behind("simulate", add_flags, words, earlier)
    counts = (None,) if flags.num_processes is None else _numbers(flags.num_processes)
    if flags.micro_batches is not None and flags.micro_batches < 1:
        raise UsageError(f"micro_batches: {flags.micro_batches}: at least 1 is required; give --micro_batches 1")
    _refuse_machines(flags.device, flags.link, flags.gpus_per_machine)
    return rest, Options(
        config_file=flags.config_file,
        num_processes=counts,
        step=flags.step,
        micro_batches=flags.micro_batches,
        as_json=flags.json,
        picture=flags.picture,
        device_type=flags.device_type,
        device=flags.device,
        link=flags.link,
        gpus_per_machine=flags.gpus_per_machine,
    )


def _refuse_machines(device: str | None, link: str | None, gpus: int | None) -> None:
    """Raise ``UsageError`` for flags that need ``--device``, for less than one GPU, and for an unknown link."""
    for name, value in (("link", link), ("gpus_per_machine", gpus)):
        if value is not None and device is None:
            raise UsageError(
                f"{name}: {value}: it is used for step times, which require a device; give --device h100-sxm as "
                f"well, or leave --{name} out"
            )
    if gpus is not None and gpus < 1:
        raise UsageError(f"gpus_per_machine: {gpus}: at least 1 is required; give --gpus_per_machine 8")
    machines_of(link, gpus or GPUS_PER_MACHINE)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise UsageError(
            f"num_processes: {text}: whole numbers above 0, with commas, are required; give --num_processes 8,64,512"
        )
    # Each number once: repeated ones would add nothing to the scaling.
    return tuple(dict.fromkeys(map(int, numbers)))
