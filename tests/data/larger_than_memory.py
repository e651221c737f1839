"""Read 20 GB of cheap files through the loader, and print how much memory it took: ``python -m ... KIND FOLDER``.

KIND is ``parquet`` (constant texts, which parquet stores once for each row group), ``hdf5`` (a sparse file),
``texts``: the preparation of texts, each of its own, that compress well, or ``tokens``: texts of few, very long words,
to be tokenised, and an epoch of their rows. Each row carries its number, so that every row is known to be read once.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, StepSampler
from accel_train.data.tables.block_order import BlockOrder
from accel_train.data.tables.sharded_table import ShardedTable
from accel_train.data.tables.shards import index_shards
from accel_train.domains.pde.data.files import FieldPart, Fields
from accel_train.domains.text.shards.corpus import SplitRules, split_shards

CACHE_BYTES = 128 * 2**20
SHARDS, GROUPS, ROWS, CHARACTERS = 20, 25, 1000, 40_000
SAMPLES, FIELD = 5000, (16, 1, 256, 256)


def write_parquet(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    text = pa.array(["x" * CHARACTERS]).take(pa.array(np.zeros(ROWS, np.int32)))
    for shard in range(SHARDS):
        schema = pa.schema([("text", pa.string()), ("n", pa.int64())])
        with parquet.ParquetWriter(folder / f"{shard:02}.parquet", schema, write_page_checksum=True) as writer:
            for group in range(GROUPS):
                first = (shard * GROUPS + group) * ROWS
                writer.write_table(pa.table({"text": text, "n": np.arange(first, first + ROWS)}))


def write_texts(folder: Path, shards: int = SHARDS) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    filling = "x" * CHARACTERS
    for shard in range(shards):
        schema = pa.schema([("text", pa.string())])
        path = folder / f"{shard:02}.parquet"
        with parquet.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
            for group in range(GROUPS):
                first = (shard * GROUPS + group) * ROWS
                texts = [f"{number} {filling}" for number in range(first, first + ROWS)]
                writer.write_table(pa.table({"text": texts}))


def prepare_texts(folder: Path) -> tuple[int, bool]:
    """Split the texts as the recipe does. Return the bytes that were read, and if each text is on one side."""
    table = ShardedTable(index_shards("--data.path", str(folder), folder / "cache"), ("text",), CACHE_BYTES)
    rules = SplitRules("text", min_words=1, max_bad_rows=0, fraction=0.01)
    split = split_shards(table, rules, folder / "cache", rank=0, barrier=lambda: None, progress=False)
    rows = len(table)
    held_out = split.facts["heldout"]
    return rows * CHARACTERS, len(split.train) + held_out == rows


TOKENS_SHARDS = 2
"""2 GB of text are read, split, tokenised, packed and read back, in two minutes: more than the 1 GiB allowed."""


def write_tokens(folder: Path) -> None:
    """Write long words around a number, and a tokenizer that knows the numbers and the long word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_texts(folder, TOKENS_SHARDS)
    words = [str(number) for number in range(TOKENS_SHARDS * GROUPS * ROWS)]
    vocabulary = {word: index for index, word in enumerate(["<unk>", "</s>", *words])}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    made.save_pretrained(folder / "tokenizer")


def read_tokens(folder: Path) -> tuple[int, bool]:
    """Prepare tokens as the recipe does, and read an epoch. Return the bytes of text, and if each text came once."""
    from accel_train.domains.language.prepare import DataConfig, prepare_data
    from accel_train.domains.language.pretrained import ModelConfig

    config = DataConfig(
        path=str(folder / "*.parquet"), tokenizer=str(folder / "tokenizer"), max_length=64, heldout_fraction=0.01,
        cache_dir=str(folder / "cache"),
    )  # fmt: skip
    data = prepare_data(config, ModelConfig())
    rows = TOKENS_SHARDS * GROUPS * ROWS
    seen = np.zeros(rows, np.int64)
    for dataset in (data.train, data.heldout):
        size = len(dataset)
        sampler = StepSampler(size, min(50, size), 0)
        steps = iterate_steps(
            dataset, sampler, BatchShard(0, 1, 50), start_step=0, max_steps=-(-size // min(50, size)),
            device=torch.device("cpu"), config=LoaderConfig(num_workers=0),
        )  # fmt: skip
        places: set[int] = set()
        for step in steps:
            [batch] = step.micro_batches
            for place, ids in zip(batch["sample"].tolist(), batch["input_ids"], strict=True):
                if place not in places:
                    places.add(place)
                    # Behind <unk> and </s> come the numbers.
                    seen[ids[ids > 1].numpy() - 2] += 1
    return rows * CHARACTERS, bool((seen == 1).all())


def write_hdf5(folder: Path) -> None:
    import h5py

    with h5py.File(folder / "fields.h5", "w") as content:
        properties: Any = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        # Allocated and not written: the file has holes.
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((SAMPLES, *FIELD))
        stored = h5py.Dataset(h5py.h5d.create(content.id, b"fields", h5py.h5t.NATIVE_FLOAT, space, properties))
        for sample in range(SAMPLES):
            stored[sample, 0, 0, 0, 0] = sample


class Texts:
    """Rows of a table: length and number of each."""

    def __init__(self, table: ShardedTable) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.batch([index]).items()}

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        texts = self.table.take("text", indices)
        return {"size": torch.tensor([len(t) for t in texts]), "n": torch.tensor(self.table.take("n", indices))}


class Samples:
    """All snapshots of each sample: their bytes, and the number written into the first."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return len(self.fields)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        values = self.fields.snapshots(index, slice(None))
        return {"size": torch.tensor(values.nbytes), "n": torch.tensor(int(values.flat[0]))}


def read(dataset: Texts | Samples, order: BlockOrder | None) -> tuple[int, bool]:
    """Read an epoch. Return the bytes, and if each row came once."""
    rows = len(dataset)
    steps = iterate_steps(
        dataset,
        StepSampler(rows, 50, 0, blocks=order),
        BatchShard(0, 1, 50),
        start_step=0,
        max_steps=rows // 50,
        device=torch.device("cpu"),
        config=LoaderConfig(num_workers=0),
    )
    seen = np.zeros(rows, np.int64)
    total = 0
    for step in steps:
        [batch] = step.micro_batches
        seen[batch["n"].numpy()] += 1
        total += int(batch["size"].sum())
    return total, bool((seen == 1).all())


def main(kind: str, folder: Path) -> None:
    """Read the files of ``write_...`` and print the result as JSON."""
    if kind == "parquet":
        table = ShardedTable(index_shards("--data.path", str(folder), folder / "cache"), ("text", "n"), CACHE_BYTES)
        total, once = read(Texts(table), BlockOrder([block.rows for block in table.index.blocks], 2))
    elif kind == "tokens":
        total, once = read_tokens(folder)
    elif kind == "texts":
        total, once = prepare_texts(folder)
    else:
        part = FieldPart(folder / "fields.h5", ("fields",), 0, 0, SAMPLES)
        total, once = read(Samples(Fields((part,), CACHE_BYTES)), None)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    # Of this program alone. The maximum of getrusage also counts the process that started it.
    peak = int(status["VmHWM"].split()[0]) * 1024
    # Of its workers the largest.
    peak = max(peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    print(json.dumps({"bytes": total, "each_once": once, "peak_bytes": peak}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
