"""C7: reading samples of 0.6 MB in shuffled batches of 16 from a warm cache on one core, against other formats.

    python -m benchmarks.data_loading [--rounds 12] [--output results.json]

A sample is a latent of 131 kB and text features of 473 kB: two fp16 tensors, as diffusion training caches them. All
readers return the same tensors, which is checked first. Samples per second are per thread time of one thread. The rows
of the recipe's loader read and normalise one fp32 latent of about the same size and tokenise nothing. Needs 1 GB of
disk.

`loader.prefetch_factor`: wall time of steps of 8 ms (the process sleeps) with one worker. Its reads of the recipe's
samples take equally long, or one of them waits 40 ms, as for a cold disk: one micro-batch in ten.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, StepSampler
from accel_train.domains.text.dataset import DataAssets, TextLatentDataset, statistics
from accel_train.domains.text.latents.cache import LatentTable, open_shard, write_shard
from accel_train.domains.text.latents.files import open_latents
from accel_train.domains.text.tokenizer import train_tokenizer
from benchmarks.method import Row, in_turns, parser_of, row, write_results

BATCH = 16
OURS, PER_FILE = "ours", "torch.load per file"
PREFETCH = (1, 2, 8)
"""Values of `loader.prefetch_factor` to measure; 2 is the default."""
ALONE = LoaderConfig(num_workers=0)
STEP_SECONDS, WAIT_SECONDS = 0.008, 0.04
BATCHED, SINGLE = "the recipe's loader", "the recipe's loader, sample by sample"
Sample = Mapping[str, Tensor]
Read = Callable[[list[int]], Sample]


@dataclass(frozen=True)
class Sizes:
    """Number and shapes of the samples."""

    samples: int = 160
    latent: tuple[int, int] = (16, 4096)
    text: tuple[int, int] = (154, 1536)
    recipe: tuple[int, int] = (154, 980)
    """Shape of the recipe's latent, in fp32."""


TINY = Sizes(48, (2, 8), (3, 8), (3, 4))


def stacked(samples: list[Sample]) -> Sample:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def each(one: Callable[[int], Sample]) -> Read:
    """Return a reader of batches from a reader of single samples."""
    return lambda batch: stacked([one(index) for index in batch])


# ------------------------------------------------------------------------------------------------------- the peers
def load_per_file(folder: Path, samples: list[Sample]) -> Read:
    for i, sample in enumerate(samples):
        torch.save(dict(sample), folder / f"{i}.pt")
    return each(lambda i: torch.load(folder / f"{i}.pt", weights_only=True))


def npz_per_file(folder: Path, samples: list[Sample]) -> Read:
    for i, sample in enumerate(samples):
        np.savez(folder / f"{i}.npz", latent=sample["latent"].numpy(), text=sample["text"].numpy())

    def one(index: int) -> Sample:
        with np.load(folder / f"{index}.npz") as content:
            return {name: torch.from_numpy(content[name]) for name in content.files}

    return each(one)


def tar_of_files(folder: Path, samples: list[Sample]) -> Read:
    with tarfile.open(folder / "shard.tar", "w") as shard:
        for i, sample in enumerate(samples):
            stream = io.BytesIO()
            torch.save(dict(sample), stream)
            entry = tarfile.TarInfo(f"{i}.pt")
            entry.size = stream.tell()
            stream.seek(0)
            shard.addfile(entry, stream)
    with tarfile.open(folder / "shard.tar") as shard:  # the index is read once
        places = {int(Path(m.name).stem): (m.offset_data, m.size) for m in shard.getmembers()}

    def one(index: int) -> Sample:
        start, size = places[index]
        with (folder / "shard.tar").open("rb") as stream:
            stream.seek(start)
            return torch.load(io.BytesIO(stream.read(size)), weights_only=True)

    return each(one)


def safetensors_per_file(folder: Path, samples: list[Sample]) -> Read:
    for i, sample in enumerate(samples):
        save_file(dict(sample), folder / f"{i}.safetensors")
    return each(lambda i: load_file(folder / f"{i}.safetensors"))


def safetensors_slices(folder: Path, samples: list[Sample]) -> Read:
    save_file(dict(stacked(samples)), folder / "slices.safetensors")
    shard: Any = safe_open(folder / "slices.safetensors", framework="pt")
    slices = {name: shard.get_slice(name) for name in samples[0]}
    return each(lambda i: {name: rows[i] for name, rows in slices.items()})


def arrow_mapped(folder: Path, samples: list[Sample]) -> Read:
    """Read from the memory-mapped Arrow file of `datasets`, without a conversion of the values."""
    import datasets

    datasets.disable_progress_bars()
    rows = {name: [sample[name].numpy().tobytes() for sample in samples] for name in samples[0]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder / "arrow"))
    table: Any = datasets.load_from_disk(str(folder / "arrow")).data
    shapes = {name: value.shape for name, value in samples[0].items()}
    columns = {name: table.column(name) for name in shapes}

    def one(index: int) -> Sample:
        views = {name: np.frombuffer(column[index].as_buffer(), np.float16) for name, column in columns.items()}
        return {name: torch.from_numpy(view).view(shapes[name]) for name, view in views.items()}

    return each(one)


PEERS: dict[str, tuple[Callable[[Path, list[Sample]], Read], str]] = {
    PER_FILE: (load_per_file, "torch"),
    "npz per file": (npz_per_file, "numpy"),
    "tar of .pt files": (tar_of_files, "torch"),
    "safetensors per file": (safetensors_per_file, "safetensors"),
    "safetensors shard, get_slice": (safetensors_slices, "safetensors"),
    "arrow, memory-mapped": (arrow_mapped, "datasets"),
}


# ------------------------------------------------------------------------------------------------------------ ours
def mapped_tables(folder: Path, samples: list[Sample]) -> Read:
    """Read from one memory-mapped safetensors file per tensor, into one buffer per tensor that all batches reuse."""
    tables: dict[str, LatentTable] = {}
    buffers: dict[str, Tensor] = {}
    rows = torch.arange(len(samples))
    for name, values in stacked(samples).items():
        save_file({"latents": values}, folder / f"{name}.safetensors")
        tables[name] = LatentTable((folder / f"{name}.safetensors",), torch.zeros_like(rows), rows, open_latents)
        buffers[name] = values[:BATCH].clone()

    def read(batch: list[int]) -> Sample:
        index = torch.tensor(batch)
        return {name: table.rows(index, buffers[name]) for name, table in tables.items()}

    return read


def recipe_dataset(folder: Path, samples: int, shape: tuple[int, int]) -> TextLatentDataset:
    file, rows = folder / "shard_00000.safetensors", torch.arange(samples)
    write_shard(file, np.random.default_rng(0).standard_normal((samples, *shape), np.float32))
    table = LatentTable((file,), torch.zeros_like(rows), rows, open_shard)
    texts = [f"sample {i} of {samples}" for i in range(samples)]
    tokenizer = train_tokenizer(texts, 300)
    assets = DataAssets(tokenizer, None, 32, *statistics(table), shape[0])
    return TextLatentDataset(texts, tokenizer.tokenise(texts, 32), table, assets, "benchmark")


class OneByOne:
    """A dataset that hides the batched reads of the one it wraps."""

    def __init__(self, dataset: TextLatentDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[index]


class Uneven(OneByOne):
    """A dataset in which reading sample 0 takes ``WAIT_SECONDS`` longer."""

    def __getitem__(self, index: int) -> Sample:
        if index == 0:
            time.sleep(WAIT_SECONDS)
        return super().__getitem__(index)


def loader_steps(dataset: TextLatentDataset | OneByOne, config: LoaderConfig = ALONE) -> Iterator[Sample]:
    steps = iterate_steps(
        dataset,
        StepSampler(len(dataset), BATCH, seed=0),
        BatchShard(0, 1, BATCH),
        start_step=0,
        max_steps=1_000_000,
        device=torch.device("cpu"),
        config=config,
    )
    return (step.micro_batches[0] for step in steps)


# ------------------------------------------------------------------------------------------------------- measuring
def readers(folder: Path, sizes: Sizes) -> dict[str, Read]:
    """Write the files of every format and return its reader. Asserts that all readers return the same tensors."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"latent": sizes.latent, "text": sizes.text}
    samples: list[Sample] = [
        {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
        for _ in range(sizes.samples)
    ]
    ways = {OURS: mapped_tables(folder, samples)}
    ways |= {name: write(folder, samples) for name, (write, package) in PEERS.items() if find_spec(package)}
    batch = torch.randperm(sizes.samples)[:BATCH].tolist()
    for name, read in ways.items():
        found, expected = read(batch), stacked([samples[i] for i in batch])
        assert all(torch.equal(found[field], value) for field, value in expected.items()), name
    return ways


def epochs(read: Read, samples: int) -> Callable[[], None]:
    """Return a function that reads all samples once, cycling through four shuffled orders."""
    generator = torch.Generator().manual_seed(2)
    orders = [[b.tolist() for b in torch.randperm(samples, generator=generator).split(BATCH)] for _ in range(4)]
    turns = cycle(orders)

    def run() -> None:
        for batch in next(turns):
            read(batch)

    return run


def steps_of(steps: Iterator[Sample], count: int, seconds: float = 0.0) -> Callable[[], None]:
    """Return a function that takes ``count`` steps and sleeps ``seconds`` after each."""

    def run() -> None:
        for _ in range(count):
            next(steps)
            if seconds:
                time.sleep(seconds)

    return run


def measure(folder: Path, sizes: Sizes, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Time all readers in turns; return rows and details."""
    ways = {name: epochs(read, sizes.samples) for name, read in readers(folder, sizes).items()}
    dataset = recipe_dataset(folder, sizes.samples, sizes.recipe)
    batches = sizes.samples // BATCH
    ways[BATCHED] = steps_of(loader_steps(dataset), batches)
    ways[SINGLE] = steps_of(loader_steps(OneByOne(dataset)), batches)
    times = in_turns(ways, rounds)
    rates = {name: [sizes.samples / seconds for seconds in each] for name, each in times.seconds.items()}
    rows = [
        row("C7", "mapped rows into a reused batch buffer, on one core", rates[OURS], "samples/s", ">= 20000"),
        row("C7", "mapped rows over torch.load per file", times.ratios(PER_FILE, OURS), target=">= 10"),
    ]
    peers = [name for name in rates if name in PEERS and name != PER_FILE]
    rows += [row("C7", f"mapped rows over {name}", times.ratios(name, OURS)) for name in peers]
    rows.append(row("C7", f"{BATCHED}, batches read whole, on one core", rates[BATCHED], "samples/s"))
    rows.append(row("C7", f"{BATCHED}, batches read whole over sample by sample", times.ratios(SINGLE, BATCHED)))
    ahead, prefetch_times = prefetched(dataset, rounds)
    details = {"samples": sizes.samples, "batch": BATCH, **times.summary(), "prefetch": prefetch_times}
    return rows + ahead, details


def prefetched(dataset: TextLatentDataset, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Compare each `loader.prefetch_factor` with the default, with equal reads and with one slow read per epoch."""
    rows: list[Row] = []
    times: dict[str, Any] = {}
    kinds = {"reads alike": OneByOne(dataset), "one read in ten takes 5 steps": Uneven(dataset)}
    for kind, samples in kinds.items():
        ways: dict[str, Callable[[], object]] = {}
        for factor in PREFETCH:
            config = LoaderConfig(num_workers=1, prefetch_factor=factor)
            ways[str(factor)] = steps_of(loader_steps(samples, config), len(dataset) // BATCH, STEP_SECONDS)
        found = in_turns(ways, rounds, clock=time.perf_counter)
        for factor in (f for f in PREFETCH if f != 2):
            name = f"prefetch_factor {factor} over 2, {kind}: speed of a step"
            rows.append(row("C7", name, found.ratios("2", str(factor))))
        times[kind] = found.summary()
    return rows, times


def main() -> int:
    """Measure, print and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=12)
    parser.add_argument("--folder", type=Path, help="disk to write on; a temporary directory by default")
    options = parser.parse_args()
    if options.tiny:
        options.rounds = 2
    torch.set_num_threads(1)
    absent = {name: f"not installed; pip install {p}" for name, (_, p) in PEERS.items() if not find_spec(p)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows, details = measure(Path(folder), TINY if options.tiny else Sizes(), options.rounds)
    return 0 if write_results(options.output, "C7: reading cached samples", rows, details, absent) else 1


if __name__ == "__main__":
    sys.exit(main())
