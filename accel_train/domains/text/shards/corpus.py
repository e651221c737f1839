"""Texts in shards larger than memory: one pass to check, identify and split them, and reading by index.

The pass writes a folder into the cache, so that a later start with the same files reads no shard:

    ids       8 bytes a row: the head of the sha256 of its text, 0 for an unusable row
    sides     1 byte a row: left out, training or held out
    texts     held-out texts, and a sample of the training texts to fit on
    facts     counts for the log

The id of a sample is the hash of its text, not its file and row: it does not change when files are renamed, cut or
merged, or rows before it are removed. Each text is compared with its id on reading, so damage that the file format does
not detect is an error as well.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.data.artifacts import cached_folder
from accel_train.data.generation import blocks_in_order
from accel_train.data.progress import Progress
from accel_train.data.tables.sharded_table import DecodedBlock, ShardedTable
from accel_train.data.tables.text_sources import BAD_ROWS_SHOWN, BadRows, bad_row_notices, held_out_below, split_key
from accel_train.domains.text.corpus import text_fault

SPLIT_FORMAT = 3
LEFT_OUT, TRAIN, HELDOUT = range(3)
HELDOUT_ROWS = 2**14
"""Maximum number of held-out texts. They are kept in memory, because evaluation reads them in hash order."""
SAMPLE_ROWS = 2**17
"""Maximum number of training texts to fit a tokenizer or TF-IDF on."""
CHARACTERS = 2**26
"""Maximum number of characters of the held-out texts, and of the sample. If texts are long, fewer of them are kept."""
ROWS_PER_PARTITION = 2**22
"""Rows whose hashes are compared at a time to find equal texts."""
Keys = NDArray[np.uint64]
Ints = NDArray[np.int64]


class SplitRules(NamedTuple):
    """Rules that, together with its text, decide which split a row goes to."""

    column: str
    min_words: int
    max_bad_rows: int
    fraction: float
    """Share of texts to hold out. 0 if the held-out texts come from another source."""
    heldout_keys: tuple[int, ...] = ()
    """Keys of held-out texts from another source. Equal texts are left out of training."""


class SplitShards(NamedTuple):
    """Both splits of a table, and a sample of the training texts to fit on."""

    train: ShardTexts
    heldout: list[str]
    sample: list[str]
    """All training texts, or an evenly spaced sample of at most `SAMPLE_ROWS` texts and about `CHARACTERS`."""
    facts: dict[str, int]
    """Counts of bad, short, repeated and held-out rows."""
    faults: list[str]
    """Place and reason of the first bad rows."""


def split_shards(
    table: ShardedTable,
    rules: SplitRules,
    cache: Path,
    *,
    rank: int,
    barrier: Callable[[], None],
    progress: bool,
) -> SplitShards:
    """Check, identify and split all rows, unless the result is in the cache. Collective (two barriers).

    Rank 0 reads every row once, with worker processes if that takes long. Equal texts are kept once, and a text is held
    out by its hash, as with texts in memory. Refuses more than `max_bad_rows` unusable rows, naming the first one that
    exceeds the limit.
    """
    described = json.dumps([SPLIT_FORMAT, table.index.key, list(table.columns), rules])
    folder = cache / "splits" / hashlib.sha256(described.encode()).hexdigest()
    write = partial(_write_split, table, rules, progress and rank == 0)
    cached_folder(folder, write, rank=rank, barrier=barrier)
    texts = json.loads((folder / "texts.json").read_text("utf-8"))
    facts = json.loads((folder / "facts.json").read_text("utf-8"))
    counts = np.load(folder / "train_rows.npy")
    train = ShardTexts(table, rules.column, folder, counts)
    # Facts of earlier versions have no places.
    faults = [f"{table.place(row)}: {reason}" for row, reason in facts.pop("faults", [])]
    return SplitShards(train, texts["heldout"], texts["sample"], facts, faults)


class ShardTexts(Sequence[str]):
    """Training texts of a table by index, in the order of the table. Read on demand, each compared with its id."""

    def __init__(self, table: ShardedTable, column: str, folder: Path, counts: Ints) -> None:
        self.table = table
        self.column = column
        self.sizes: tuple[int, ...] = tuple(counts.tolist())
        """Number of training texts in each block of the table."""
        ends = np.cumsum(counts, dtype=np.int64)
        self.starts: Ints = np.concatenate([np.zeros(1, np.int64), ends])
        """Index of the first training text of each block, followed by the number of all training texts."""
        self._folder = folder
        self._maps: tuple[NDArray[np.uint8], Keys] | None = None

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the files itself. Pickled maps would carry their contents.
        return {**self.__dict__, "_maps": None}

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        return self.take([range(len(self))[index]])[0]

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self.sizes)):
            yield from self.of_block(number)

    def take(self, indices: Sequence[int]) -> list[str]:
        """Read texts in the order of `indices`. Raises `UsageError` if one has changed since the pass."""
        rows = self._rows(indices)
        return self._checked(self.table.take(self.column, rows), rows)

    def place(self, index: int) -> str:
        """Return the file of a text and its place in it, for a message."""
        return self.table.place(int(self._rows([index])[0]))

    def _rows(self, indices: Sequence[int]) -> Ints:
        """Return the table rows of the texts with these indices."""
        # Grouped by block, so that each block's rows are looked up once.
        wanted = np.asarray(indices, np.int64)
        blocks = np.searchsorted(self.starts, wanted, side="right") - 1
        rows = np.empty_like(wanted)
        for number in dict.fromkeys(blocks.tolist()):
            here = blocks == number
            rows[here] = self.rows_of_block(number)[wanted[here] - self.starts[number]]
        return rows

    def of_block(self, number: int) -> list[str]:
        """Read all training texts of a block."""
        rows = self.rows_of_block(number)
        return self._checked(self.table.take(self.column, rows), rows)

    def rows_of_block(self, number: int) -> Ints:
        """Return the table rows of a block's training texts."""
        sides, _ = self._mapped()
        first, end = self.table.starts[number : number + 2].tolist()
        return first + np.flatnonzero(sides[first:end] == TRAIN)

    def ids(self, number: int) -> Keys:
        """Return the ids of a block's training texts."""
        _, ids = self._mapped()
        return ids[self.rows_of_block(number)]

    def digest(self) -> str:
        """Hash the ids of all training texts in order."""
        digest = hashlib.sha256()
        for number in range(len(self.sizes)):
            digest.update(self.ids(number).tobytes())
        return digest.hexdigest()

    def _checked(self, values: list[str | None], rows: Ints) -> list[str]:
        _, ids = self._mapped()
        texts: list[str] = []
        expected_ids = ids[rows].tolist()
        for value, row, expected in zip(values, rows.tolist(), expected_ids, strict=True):
            text = (value or "").strip()
            if text_id(text) != expected:
                raise UsageError(
                    f"{self.table.index.option}: {self.table.place(row)}: its text has changed since the files were "
                    "first read, but the date of the file has not. Its bytes are damaged: copy the file again, or take "
                    "it out."
                )
            texts.append(text)
        return texts

    def _mapped(self) -> tuple[NDArray[np.uint8], Keys]:
        if self._maps is None:
            sides = np.memmap(self._folder / "sides.bin", np.uint8, "r")
            self._maps = sides, np.memmap(self._folder / "ids.bin", np.uint64, "r")
        return self._maps


def text_id(text: str) -> int:
    """Return the id of a text: the first 8 bytes of its sha256. Never 0."""
    return _head(hashlib.sha256(text.encode()).digest()) or 1


def split_notices(split: SplitShards, heldout: int) -> list[str]:
    """Return lines for the log: sizes of the splits, and rows left out. `heldout` is the number of texts in use."""
    notices = [f"{len(split.train):,} training texts, {heldout:,} held out"]
    if split.facts["heldout"] > heldout:
        notices[0] += f" of {split.facts['heldout']:,} chosen by the hash; the others are not used"
    notices += bad_row_notices(split.facts["bad"], split.faults)
    kinds = {"short": "short texts", "repeated": "repeated texts"}
    return notices + [f"{split.facts[name]:,} {kind} left out" for name, kind in kinds.items() if split.facts[name]]


def _head(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


# ---------------------------------------------------------------------------------------------------------- the pass
class _ScannedBlock(NamedTuple):
    ids: Keys
    keys: Keys
    """`split_key` of each row's text."""
    usable: NDArray[np.bool_]
    short: int
    characters: int
    faults: list[tuple[int, str]]


def _scan_block(table: ShardedTable, rules: SplitRules, number: int) -> _ScannedBlock:
    """Identify the rows of a block. The result depends only on the files, on any process."""
    block = table.block(number)
    values: list[Any] = block.columns[rules.column].to_pylist()
    ids = np.zeros(len(values), np.uint64)
    keys = np.zeros(len(values), np.uint64)
    faults: list[tuple[int, str]] = []
    short = characters = 0
    for row, value in enumerate(values):
        fault = _fault(block, row, value, rules.column)
        if fault is None:
            text = value.strip()
            if len(text.split()) < rules.min_words:
                short += 1
                continue
            # An id of 0 marks rows that cannot be used.
            ids[row] = text_id(text)
            keys[row] = split_key(text)
            characters += len(text)
        # A blank line has the fault "": it is neither a text nor a bad row.
        elif fault:
            faults.append((row, fault))
    return _ScannedBlock(ids, keys, ids != 0, short, characters, faults)


def _fault(block: DecodedBlock, row: int, value: Any, column: str) -> str | None:
    """Describe what is wrong with a row. Returns "" for a blank line, and None for a usable row."""
    if row in block.faults:
        return block.faults[row]
    return text_fault({column: value}, column)


def _write_split(table: ShardedTable, rules: SplitRules, progress: bool, directory: Path) -> None:
    bad = BadRows(rules.max_bad_rows)
    faults: list[tuple[int, str]] = []
    short = characters = 0
    usable = np.zeros(len(table), np.bool_)
    count = len(table.index.blocks)
    scanned = blocks_in_order(partial(_scan_block, table, rules), count, "auto")
    keys_file = directory / "keys.bin"
    with (
        (directory / "ids.bin").open("wb") as ids,
        keys_file.open("wb") as keys,
        Progress("texts", len(table), progress) as bar,
    ):
        for number, block in enumerate(scanned):
            first = int(table.starts[number])
            for row, reason in block.faults:
                bad.add(table.place(first + row), reason)
                faults.append((first + row, reason))
            # Ids and hashes go to files: those of a large corpus would take gigabytes of memory.
            usable[first : first + len(block.usable)] = block.usable
            short += block.short
            characters += block.characters
            ids.write(block.ids.tobytes())
            keys.write(block.keys.tobytes())
            bar.update(len(block.ids))
    sides, heldout = _choose_sides(keys_file, usable, rules)
    # The hashes are only needed for the split. The ids stay, to check each text when it is read.
    keys_file.unlink()
    sides.tofile(directory / "sides.bin")
    counts = np.add.reduceat(sides == TRAIN, table.starts[:-1], dtype=np.int64)
    np.save(directory / "train_rows.npy", counts)
    repeated = int(usable.sum() - (sides != LEFT_OUT).sum())
    held_out = int((sides == HELDOUT).sum())
    facts: dict[str, Any] = {"bad": bad.count, "short": short, "repeated": repeated, "heldout": held_out}
    # By number, because the files may have moved by the next start.
    facts["faults"] = faults[:BAD_ROWS_SHOWN]
    (directory / "facts.json").write_text(json.dumps(facts), "utf-8")
    train = ShardTexts(table, rules.column, directory, counts)
    # As many texts of average length as the limit of characters allows.
    affordable = CHARACTERS * int(usable.sum()) // max(1, characters)
    count = min(len(train), SAMPLE_ROWS, affordable)
    chosen = sampled_rows(len(train), count)
    texts = {
        "heldout": [text.strip() for text in table.take(rules.column, heldout[:affordable])],
        "sample": train.take(chosen.tolist()),
    }
    (directory / "texts.json").write_text(json.dumps(texts), "utf-8")


def sampled_rows(total: int, count: int) -> Ints:
    """Return the rows of ``count`` evenly spaced training texts."""
    return np.linspace(0, total - 1, count).round().astype(np.int64)


def _choose_sides(keys_file: Path, usable: NDArray[np.bool_], rules: SplitRules) -> tuple[NDArray[np.uint8], Ints]:
    """Return the side of each row, and the first held-out rows by hash. Of equal texts the first is kept."""
    sides = np.zeros(len(usable), np.uint8)
    keys: Any = np.zeros(0, np.uint64)
    # An empty file cannot be mapped.
    if len(usable):
        keys = np.memmap(keys_file, np.uint64, "r")
    partitions = max(1, math.ceil(len(usable) / ROWS_PER_PARTITION))
    bound = held_out_below(rules.fraction)
    excluded = np.array(rules.heldout_keys, np.uint64)
    heldout_keys = np.zeros(0, np.uint64)
    heldout_rows = np.zeros(0, np.int64)
    for partition in range(partitions):
        rows = _rows_of_partition(keys, usable, partition, partitions)
        # Rows ascend, and `unique` returns the first position of each value.
        values, first = np.unique(keys[rows], return_index=True)
        rows = rows[first]
        held = values < bound
        sides[rows[held]] = HELDOUT
        sides[rows[~held & ~np.isin(values, excluded)]] = TRAIN
        heldout_keys = np.concatenate([heldout_keys, values[held]])
        heldout_rows = np.concatenate([heldout_rows, rows[held]])
        # Cut down after each partition, so that the list stays within its limit.
        by_hash = heldout_keys.argsort()[:HELDOUT_ROWS]
        heldout_keys = heldout_keys[by_hash]
        heldout_rows = heldout_rows[by_hash]
    return sides, heldout_rows


def _rows_of_partition(keys: Keys, usable: NDArray[np.bool_], partition: int, partitions: int) -> Ints:
    """Return the usable rows with hashes in part `partition` of `partitions`."""
    parts: list[Ints] = []
    for start in range(0, len(keys), ROWS_PER_PARTITION):
        piece = slice(start, start + ROWS_PER_PARTITION)
        # By remainder: equal texts have equal hashes, so they are in the same partition.
        here = (keys[piece] % np.uint64(partitions) == partition) & usable[piece]
        parts.append(start + np.flatnonzero(here))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def window_notices(texts: ShardTexts, window: int) -> list[str]:
    """Return a notice if the decoded blocks of a window do not fit into the cache. Reads the largest block."""
    table = texts.table
    sizes = [block.rows for block in table.index.blocks]
    largest = table.block(sizes.index(max(sizes)))
    needed = largest.size * min(window, len(sizes))
    if needed <= table.cache_bytes:
        return []
    return [
        f"--data.shuffle_blocks {window}: the blocks of one window take up to {needed / 2**20:,.0f} MiB, but "
        f"--data.cache_mib keeps {table.cache_bytes / 2**20:,.0f}, so blocks are read again and again. Raise "
        "cache_mib, or lower shuffle_blocks"
    ]
