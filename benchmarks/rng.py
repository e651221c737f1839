"""Keyed draws against torch's own and against one torch.Generator per sample: the median time of each.

    python benchmarks/rng.py [--device cuda] [--threads 1] [--json results.json]

`per_sample_generator` is the usual way to the same independence of the batch; `torch` depends on its cut.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_train import rng

SHAPES = [(64, (32,)), (64, (1, 64)), (64, (1024,)), (16, (4, 64, 64)), (8, (16, 128, 128))]


def median_seconds(draw: Callable[[], object], device: torch.device, repeats: int) -> float:
    times: list[float] = []
    for repeat in range(repeats + 3):
        start = time.perf_counter()
        draw()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def generators(batch: int, shape: tuple[int, ...], device: torch.device, name: str) -> Tensor:
    draw = torch.rand if name == "uniform" else torch.randn
    each = [torch.Generator(device).manual_seed(sample) for sample in range(batch)]
    return torch.stack([draw(shape, generator=generator, device=device) for generator in each])


def measure(batch: int, shape: tuple[int, ...], name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    occurrence = torch.arange(batch, device=device)
    keyed, plain = (rng.uniform, torch.rand) if name == "uniform" else (rng.normal, torch.randn)
    seconds = {
        "keyed": lambda: keyed(rng.sample_keys(0, "benchmark", 1, occurrence), shape),
        "torch": lambda: plain((batch, *shape), device=device),
        "per_sample_generator": lambda: generators(batch, shape, device, name),
    }
    medians = {way: median_seconds(draw, device, repeats) for way, draw in seconds.items()}
    return {
        "draw": name,
        "shape": [batch, *shape],
        **{f"{way}_seconds": value for way, value in medians.items()},
        "keyed_over_torch": medians["keyed"] / medians["torch"],
        "keyed_over_per_sample_generator": medians["keyed"] / medians["per_sample_generator"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {options.threads} threads"
    print(f"{name}, torch {torch.__version__}, median of {options.repeats}")
    rows = [measure(b, shape, draw, device, options.repeats) for draw in ("uniform", "normal") for b, shape in SHAPES]
    for row in rows:
        print(
            f"{row['draw']:8} {row['shape']!s:22} keyed {row['keyed_seconds'] * 1e6:9.1f} us   "
            f"{row['keyed_over_torch']:5.2f} x torch   "
            f"{row['keyed_over_per_sample_generator']:5.2f} x per-sample generators"
        )
    if options.json:
        result = {"device": name, "torch": torch.__version__, "repeats": options.repeats, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
