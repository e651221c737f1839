"""Decoding pictures into buckets, and the saving by cached latents: a second epoch against the first.

    python -m benchmarks.pictures [--rounds 5] [--output results.json]

JPEGs of 1024 x 768 are decoded, turned upright and rendered into buckets of 256. The encoder is diffusers'
AutoencoderKL with random weights and narrow channels. It is far cheaper than that of SDXL, with which a cache saves
more. The first epoch decodes, encodes and writes; the second reads and draws. Times are processor time of the process,
on one thread.
"""

from __future__ import annotations

import io
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from accel_train.domains.images.dataset import PictureDataset, prepare_pictures
from accel_train.domains.images.latent_cache import (
    CachedPictures,
    EncoderIdentity,
    Filling,
    Latents,
    cached_latents,
    draw,
    latents_of,
    weights_hash,
)
from accel_train.domains.images.options import PictureDataConfig
from benchmarks.method import Row, in_turns, parser_of, row, write_results

BATCH = 8
FIRST, SECOND, UNCACHED, DECODED = "first epoch", "second epoch", "epoch without a cache", "pixels alone"


@dataclass(frozen=True)
class Sizes:
    """Number and sizes of the pictures, and channels of the encoder."""

    pictures: int = 8
    picture: tuple[int, int] = (1024, 768)
    resolution: int = 256
    channels: tuple[int, ...] = (32, 64, 64, 64)


TINY = Sizes(4, (96, 64), 64, (8, 8, 8, 8))


def folder_of(folder: Path, sizes: Sizes) -> Path:
    """Write smooth random pictures as JPEG, with captions, and return the folder."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for number in range(sizes.pictures):
        coarse = Image.fromarray(generator.integers(0, 255, (24, 32, 3), np.uint8))
        stream = io.BytesIO()
        coarse.resize(sizes.picture, Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
        (folder / f"{number:04d}.jpg").write_bytes(stream.getvalue())
        (folder / f"{number:04d}.txt").write_text(f"picture {number}")
    return folder


def encoder_of(sizes: Sizes) -> tuple[Callable[[Tensor], Latents], EncoderIdentity]:
    """Return the encoder of a diffusers VAE with random weights, and its identity for the cache."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae: Any = AutoencoderKL(
        block_out_channels=sizes.channels,
        down_block_types=("DownEncoderBlock2D",) * len(sizes.channels),
        up_block_types=("UpDecoderBlock2D",) * len(sizes.channels),
        layers_per_block=1,
        norm_num_groups=8,
    )

    def encode(pixels: Tensor) -> Latents:
        with torch.no_grad():
            found = vae.encode(pixels).latent_dist
        return Latents(found.mean, found.logvar)

    return encode, EncoderIdentity("random", None, weights_hash(vae))


def ways_of(folder: Path, data: PictureDataset, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Return each way to read all pictures once, by name."""
    encode, identity = encoder_of(sizes)
    caches = (folder / f"cache{number}" for number in itertools.count())
    filling = Filling(batch_size=BATCH)
    cached = CachedPictures(data, cached_latents(data, encode, identity, next(caches), filling=filling))
    batches = [list(range(n, min(n + BATCH, len(data)))) for n in range(0, len(data), BATCH)]

    def second() -> None:
        for batch in batches:
            latents = [latents_of(cached[index]) for index in batch]
            stacked = Latents(*(torch.stack([pair[part] for pair in latents]) for part in range(2)))
            draw(stacked, 0, 0, torch.tensor(batch))

    def uncached() -> None:
        for batch in batches:
            latents = encode(torch.stack([data[index]["pixels"] for index in batch]))
            draw(latents, 0, 0, torch.tensor(batch))

    return {
        FIRST: lambda: cached_latents(data, encode, identity, next(caches), filling=filling),
        SECOND: second,
        UNCACHED: uncached,
        DECODED: lambda: [data[index]["pixels"] for index in range(len(data))],
    }


def measure(folder: Path, sizes: Sizes, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Time all ways in turns; return rows and details."""
    config = PictureDataConfig(
        str(folder_of(folder / "pictures", sizes)),
        resolutions=(sizes.resolution,),
        bucket_step=64 if sizes.resolution > 64 else 8,
        heldout_fraction=0,
        cache_dir=str(folder / "scans"),
    )
    data = prepare_pictures(config).train
    times = in_turns(ways_of(folder, data, sizes), rounds, clock=time.process_time)
    rates = [sizes.pictures / seconds for seconds in times.seconds[DECODED]]
    width, height = sizes.picture
    name = f"JPEG of {width} x {height} decoded, verified and rendered at {sizes.resolution}, on one core"
    rows = [
        row("pictures", name, rates, "pictures/s"),
        row(
            "pictures",
            "data of a second epoch over the first, latents cached, without a training step",
            times.ratios(FIRST, SECOND),
            target=">= 3",
        ),
        row(
            "pictures",
            "data of an epoch with cached latents over one without a cache, without a training step",
            times.ratios(UNCACHED, SECOND),
        ),
    ]
    return rows, {"pictures": sizes.pictures, "batch": BATCH, **times.summary()}


def main() -> int:
    """Measure, print and write the rows. Returns 1 if a target is missed, else 0."""
    options = parser_of(__doc__, rounds=5).parse_args()
    torch.set_num_threads(1)
    if not find_spec("diffusers"):
        return 0 if write_results(options.output, "Pictures", [], {}, {"diffusers": "not installed"}) else 1
    sizes = TINY if options.tiny else Sizes()
    with tempfile.TemporaryDirectory() as folder:
        rows, details = measure(Path(folder), sizes, 2 if options.tiny else options.rounds)
    return 0 if write_results(options.output, "Pictures", rows, details) else 1


if __name__ == "__main__":
    sys.exit(main())
