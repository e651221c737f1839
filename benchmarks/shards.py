"""Reading rows of parquet shards in shuffled batches from a warm cache on one core, against other formats.

    python -m benchmarks.shards [--rounds 6] [--output results.json]

160,000 texts of 100 characters in 4 files of 8 row groups, read in batches of 64 for one epoch. All readers return the
same texts, which is checked first. Rows per second are per thread time of one thread, drawing the order included.

`by block` is `ShardedTable` in the order of `BlockOrder`, which mixes 8 of 32 row groups at a time, with a cache of
about that size. `in memory` is a list of texts in the same order. `datasets` is a memory-mapped Arrow file of the same
shards, read in the same order and in a full shuffle, which costs it nothing extra.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_train.data.sampler import StepSampler
from accel_train.data.tables.block_order import BlockOrder
from accel_train.data.tables.sharded_table import ShardedTable
from accel_train.data.tables.shards import index_shards
from benchmarks.method import in_turns, parser_of, row, write_results

BATCH = 64
FILES, GROUPS, WINDOW = 4, 8, 8
OURS, MEMORY = "by block", "in memory"
MAPPED, SHUFFLED = "datasets, same order", "datasets, full shuffle"
Read = Callable[[list[int]], list[str]]


@dataclass(frozen=True)
class Sizes:
    """Number of rows in a row group, and characters in a row."""

    rows_per_group: int = 5000
    characters: int = 100


TINY = Sizes(40, 20)


def write(folder: Path, sizes: Sizes) -> list[str]:
    """Write the shards and return all texts in order."""
    import pyarrow as pa
    from pyarrow import parquet

    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
    generator = np.random.default_rng(0)
    texts: list[str] = []
    for file in range(FILES):
        drawn = letters[generator.integers(0, len(letters), (GROUPS * sizes.rows_per_group, sizes.characters))]
        part = [line.tobytes().decode() for line in drawn]
        table = pa.table({"text": part})
        parquet.write_table(table, folder / f"{file}.parquet", row_group_size=sizes.rows_per_group, compression="zstd")
        texts += part
    return texts


def readers(folder: Path, sizes: Sizes) -> tuple[dict[str, Read], BlockOrder]:
    """Return all readers of a batch, and the block order. Asserts that the readers return the same texts."""
    import datasets

    datasets.disable_progress_bars()
    texts = write(folder, sizes)
    index = index_shards("--data.path", str(folder), folder / "cache")
    bytes_per_group = sizes.rows_per_group * (sizes.characters + 8)
    table = ShardedTable(index, ("text",), cache_bytes=(WINDOW + 1) * bytes_per_group)
    files = [str(file) for file in index.files]
    mapped: Any = datasets.Dataset.from_parquet(files, cache_dir=str(folder / "datasets"))
    ways: dict[str, Read] = {
        OURS: lambda rows: table.take("text", rows),
        MEMORY: lambda rows: [texts[row] for row in rows],
        MAPPED: lambda rows: mapped[rows]["text"],
    }
    chosen = np.random.default_rng(1).integers(0, len(texts), BATCH).tolist()
    for name, read in ways.items():
        assert list(read(chosen)) == [texts[index] for index in chosen], name
    return ways, BlockOrder([block.rows for block in index.blocks], WINDOW)


def epochs(read: Read, sampler: StepSampler) -> Callable[[], None]:
    """Return a function that reads one epoch, in a new order each time."""
    steps = sampler.dataset_size // BATCH
    first = count(0, steps)

    def run() -> None:
        start = next(first)
        for step in range(start, start + steps):
            read([draw.sample for draw in sampler.draws(step)])

    return run


def main() -> int:
    """Measure, print and write the rows. Always returns 0, because no row has a target."""
    options = parser_of(__doc__, rounds=6).parse_args()
    sizes = TINY if options.tiny else Sizes()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ways, order = readers(Path(folder), sizes)
        in_blocks = StepSampler(len(order), BATCH, 0, blocks=order)
        runs = {name: epochs(read, in_blocks) for name, read in ways.items()}
        runs[SHUFFLED] = epochs(ways[MAPPED], StepSampler(len(order), BATCH, 0))
        times = in_turns(runs, 2 if options.tiny else options.rounds)
    rates = {name: [len(order) / seconds for seconds in each] for name, each in times.seconds.items()}
    rows = [row("shards", f"texts {name}", values, "rows/s") for name, values in rates.items()]
    rows += [row("shards", f"{OURS} over {name}", times.ratios(name, OURS)) for name in (MEMORY, MAPPED, SHUFFLED)]
    details = {"rows": len(order), "batch": BATCH, **times.summary()}
    return 0 if write_results(options.output, "shards: reading rows larger than memory", rows, details, {}) else 1


if __name__ == "__main__":
    sys.exit(main())
