"""Keyed draws against torch's own and against one torch.Generator per sample, by median time.

    python -m benchmarks.rng [--device cuda] [--threads 2] --output benchmarks/results/rng_cpu.json

`per_sample_generator` is the usual way to make draws independent of the batch, as keyed draws are. Draws of `torch`
depend on how samples are split into batches.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel_train import rng
from benchmarks.method import parser_of, row, write_results

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


def parts(batch: int, shape: tuple[int, ...], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the time of each part of a normal draw with the same bits, over torch's whole draw, and their sum."""
    pairs = batch * math.prod(shape) // 2
    counters = torch.arange(pairs, dtype=torch.int64, device=device)
    uniform = torch.rand(pairs, device=device).clamp_min_(1e-6)
    radius = torch.rand(pairs, device=device)
    # New angles for each repeat: sine and cosine branch by quadrant, and a processor learns the branches of repeated
    # angles. Those of a training run never repeat.
    angles = iter(torch.rand(repeats + 3, pairs, device=device).mul_(2 * math.pi))
    keys = torch.arange(batch, device=device)

    def conversions() -> None:
        rng._counters(keys, pairs // batch)  # pyright: ignore[reportPrivateUsage]
        (counters & 0xFFFFFF).to(torch.float32).mul_(0.5)
        counters.bitwise_right_shift_(0).bitwise_and_(-1).bitwise_or_(1).to(torch.float32).mul_(0.5)

    ways = {
        "counters, shifts and conversions": conversions,
        "the hash of 64 bits": lambda: rng._mix(counters),  # pyright: ignore[reportPrivateUsage]
        "the radius": lambda: uniform.log().mul_(-2.0).sqrt_(),
        "sine and cosine": lambda: torch.polar(radius, next(angles)),
    }
    whole = median_seconds(lambda: torch.randn((batch, *shape), device=device), device, repeats)
    shares = {f"{name} alone": median_seconds(draw, device, repeats) / whole for name, draw in ways.items()}
    return {**shares, "all of these, the bound of the same bits": sum(shares.values())}


def main() -> int:
    """Measure every shape and write the rows. Always returns 0, because no row has a target."""
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, repeats = torch.device(options.device), 2 if options.tiny else options.rounds
    found = [measure(b, shape, draw, device, repeats) for draw in ("uniform", "normal") for b, shape in SHAPES]
    rows = []
    for f in found:
        shape = " x ".join(map(str, f["shape"]))
        for peer, text in (("torch", "torch"), ("per_sample_generator", "a generator per sample")):
            rows.append(row("rng", f"{f['draw']} {shape}: time over that of {text}", f[f"keyed_over_{peer}"]))
    shape = (64, (1024,))
    for name, share in parts(*shape, device, repeats).items():
        rows.append(row("rng", f"normal 64 x 1024: {name}, over the time of torch", share))
    return 0 if write_results(options.output, "Keyed draws", rows, {"draws": found}, gpu=device.type == "cuda") else 1


if __name__ == "__main__":
    sys.exit(main())
