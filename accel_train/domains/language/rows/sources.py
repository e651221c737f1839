"""Options of the `data` group, and sources of rows: the bundled demo, files, saved datasets, the Hub, and mixtures."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path

from accel_train.config import (
    FractionBelowOne,
    NonNegativeInt,
    PositiveInt,
    UsageError,
    expand_path,
    refuse_without_effect,
)
from accel_train.data.tables.hub_datasets import load_hub_dataset
from accel_train.data.tables.ledger import Changed
from accel_train.data.tables.row_blocks import PlacedRow, RowBlocks, SampleBy, dataset_rows, file_rows
from accel_train.data.tables.text_sources import has_saved_splits, is_saved_dataset, saved_dataset
from accel_train.domains.language import tokenizers
from accel_train.domains.language.rows import forms
from accel_train.domains.language.rows.files import files_of
from accel_train.store.pretrained_base import remembered_sha256

DEMO_FILE = Path(__file__).parents[2] / "text" / "demo" / "shakespeare.txt"


@dataclass(frozen=True)
class DataConfig:
    """Source of rows, their tokenizer, and how they are packed."""

    path: str = "demo"
    """'demo' (bundled Shakespeare), a .jsonl, .json, .txt, .parquet, .arrow or .csv file, a folder (without .json) or
    glob of them, a folder written by dataset.save_to_disk, or a Hub id (owner/name, owner/name:configuration@revision).
    A row has messages (a chat), prompt and completion (texts, or lists of messages), or plain text. Data may be larger
    than memory."""
    more_paths: tuple[str, ...] = ()
    """More sources of training rows, for a mixture: any that `path` accepts."""
    repeats: tuple[PositiveInt, ...] = ()
    """Number of times that an epoch has the rows of `path`, and of each of more_paths. Empty: once each. Held-out rows
    are evaluated once."""
    split: str = "train"
    """Split of a saved or Hub dataset. Files, and saved datasets of one part, have none."""
    text_column: str = forms.DEFAULT_COLUMN
    """Field or column of plain text. If it is not 'text', a row that has it is read as that text, whatever else it
    has, and a row without it by its other fields, its 'text' last."""
    sample_by: SampleBy = "line"
    """Unit of a row in a .txt file: a line, a paragraph (separated by empty lines), or the whole file."""
    heldout_path: str | None = None
    """Held-out rows: any source accepted by `path`, or split=NAME, another split of `path`. None: heldout_fraction of
    `path`."""
    heldout_fraction: FractionBelowOne = 0.04
    """Share of rows held out for evaluation, by a hash of their words; one at least. Not with heldout_path."""
    changed: Changed = "refuse"
    """Data that changed since the run began, such as added or removed rows. refuse: do not resume. allow: continue with
    the tokenizer of the checkpoint; its assets/ledger.json records which data were used from which step."""
    max_bad_rows: NonNegativeInt = 0
    """Unusable rows (bad JSON, no text, nothing to learn) to leave out. The next one is an error with its place."""
    tokenizer: str | None = None
    """Hub id or folder of a tokenizer, or 'trained': a byte-level BPE of vocab_size tokens, trained on the training
    rows (on a sample of more than 131,072). None: that of model.source, or 'trained' from scratch."""
    vocab_size: PositiveInt | None = None
    """Tokens of the trained tokenizer, 300 or more. None: 2048."""
    chat_template: str | None = None
    """Jinja file with a chat template that replaces the tokenizer's."""
    max_length: PositiveInt = 256
    """Tokens of a row. Longer plain texts are split, longer chats and completions are truncated."""
    packing: bool = True
    """Pack as many texts into a row as fit. They do not attend to each other; the loss is that of separate texts."""
    cache_dir: str | None = None
    """Cache of tokens (4 bytes each) and trained tokenizers between runs. None: $ACCEL_TRAIN_CACHE, else
    ~/.cache/accel_train."""

    def __post_init__(self) -> None:
        if len(set(self.paths)) < len(self.paths):
            raise UsageError(
                f"{self.named}: a source is named twice. Name each once, and set --data.repeats to the number of times "
                "an epoch has it."
            )
        if self.repeats and len(self.repeats) != 1 + len(self.more_paths):
            raise UsageError(
                f"--data.repeats {' '.join(map(str, self.repeats))}: {len(self.repeats)} numbers, but "
                f"{1 + len(self.more_paths)} are required: one for --data.path and one for each of --data.more_paths."
            )
        if self.max_length < 2:
            raise UsageError(f"--data.max_length {self.max_length}: a row needs 2 tokens, the second to be predicted.")
        if self.heldout_path is None and self.heldout_fraction == 0:
            raise UsageError(
                "--data.heldout_fraction 0 without --data.heldout_path leaves nothing to evaluate on. Set a fraction "
                "such as 0.04, or give held-out rows."
            )
        # The default is nobody's request, and 0 means the same.
        if self.heldout_path is not None and self.heldout_fraction:
            because = f"with data.heldout_path: {self.heldout_path}"
            refuse_without_effect(self, "data", ["heldout_fraction"], because)
        # A ready tokenizer has its vocabulary.
        if self.tokenizer not in (None, tokenizers.TRAINED):
            because = f"with data.tokenizer: {self.tokenizer}"
            refuse_without_effect(self, "data", ["vocab_size"], because, f"set the tokenizer to {tokenizers.TRAINED}")

    @property
    def paths(self) -> tuple[str, ...]:
        """All sources of training rows."""
        return self.path, *self.more_paths

    @property
    def named(self) -> str:
        """The sources of training rows, for messages."""
        more = " ".join(map(repr, self.more_paths))
        return f"--data.path {self.path!r}" + (f" --data.more_paths {more}" if more else "")

    def refuse_beside(self, source: str | None) -> None:
        """Raise ``UsageError`` for options of a trained tokenizer with a model that has its own."""
        if source is not None and self.tokenizer is None:
            because = f"with model.source: {source}, whose tokenizer is used"
            refuse_without_effect(self, "data", ["vocab_size"], because, "train from scratch without --model.source")


def open_rows(path: str, *, option: str, split: str, text_column: str, sample_by: SampleBy, cache: Path) -> RowBlocks:
    """Find the rows of ``path``. Hashes the files, which identify what is cached, and reads none of their rows.

    ``split`` names a split of a saved or Hub dataset. Files have none. Raises ``UsageError`` if ``path`` is no source.
    """
    sha256 = partial(remembered_sha256, cache=cache)
    # A row without the named column may have a text under the default name.
    columns = [*dict.fromkeys([text_column, *forms.READ, forms.DEFAULT_COLUMN])]
    if path != "demo" and forms.is_hub_id(path):
        return dataset_rows(option, load_hub_dataset(path, split, option), path, split, columns, sha256)
    source = DEMO_FILE if path == "demo" else expand_path(path)
    if is_saved_dataset(source):
        return dataset_rows(option, saved_dataset(source, split, option), path, split, columns, sha256)
    files = [source] if path == "demo" else files_of(option, path, source)
    return file_rows(option, files, columns, sample_by, sha256)


def has_splits(path: str) -> bool:
    """Return True for a saved dataset of several splits, and for one of the Hub."""
    return path != "demo" and (forms.is_hub_id(path) or has_saved_splits(expand_path(path)))


@dataclass(frozen=True)
class MixedRows:
    """Blocks of each source in turn, repeated as often as its repeats say. Can be pickled, as its sources can."""

    sources: tuple[RowBlocks, ...]
    repeats: tuple[int, ...]
    """Number of times that each source is read, 1 or more."""

    @property
    def option(self) -> str:
        """Option naming the first source, for messages."""
        return self.sources[0].option

    @property
    def key(self) -> str:
        """Hash of all that decides the rows."""
        described = json.dumps(["mixture", [source.key for source in self.sources], self.repeats])
        return hashlib.sha256(described.encode()).hexdigest()

    @property
    def names(self) -> list[str]:
        """Names of the files or datasets of all sources."""
        return [name for source in self.sources for name in source.names]

    @property
    def rows(self) -> Sequence[int]:
        """Rows of each block, or about as many. Reads the files where the format needs it."""
        return self._rows

    @cached_property
    def _rows(self) -> list[int]:
        repeated = ([*source.rows] * repeats for source, repeats in zip(self.sources, self.repeats, strict=True))
        return list(chain.from_iterable(repeated))

    @cached_property
    def _starts(self) -> list[int]:
        """First block of each source."""
        lengths = (len(source.rows) * repeats for source, repeats in zip(self.sources, self.repeats, strict=True))
        return list(accumulate(lengths, initial=0))[:-1]

    @property
    def notices(self) -> list[str]:
        """Lines for the log."""
        return [line for source in self.sources for line in source.notices]

    def schemas(self, column: str) -> Iterator[Sequence[str] | None]:
        """Yield the columns of each table. None stands for a file whose rows may differ in fields, as JSONL's do."""
        return chain.from_iterable(source.schemas(column) for source in self.sources)

    def read(self, number: int) -> Iterator[PlacedRow]:
        """Yield the rows of a block. Raises ``UsageError`` for a file that is damaged or has changed meanwhile."""
        index, _, block = self.place_of(number)
        return self.sources[index].read(block)

    def place_of(self, number: int) -> tuple[int, int, int]:
        """Return the index of a block's source, how often its rows came before, and its number within the source."""
        # Of several sources that start there, take the last: the others have no block.
        index = bisect_right(self._starts, number) - 1
        return index, *divmod(number - self._starts[index], len(self.sources[index].rows))


def mixed(sources: Sequence[RowBlocks], repeats: Sequence[int]) -> RowBlocks:
    """Return the rows of all sources. ``repeats`` counts for each of them; empty: once each."""
    # As itself, so that its tokens are cached under the same key with and without a mixture.
    if len(sources) == 1 and sum(repeats) <= 1:
        return sources[0]
    return MixedRows(tuple(sources), tuple(repeats) or (1,) * len(sources))


def has_come_before(source: RowBlocks, number: int) -> bool:
    """Return True for a block whose rows are those of an earlier one, because its source is repeated."""
    return isinstance(source, MixedRows) and source.place_of(number)[1] > 0


def option_of(source: RowBlocks, number: int) -> str:
    """Return the option that names the source of a block."""
    if not isinstance(source, MixedRows):
        return source.option
    return source.sources[source.place_of(number)[0]].option


def parts_of(source: RowBlocks) -> tuple[RowBlocks, ...]:
    """Return the sources of a mixture, or the source."""
    return source.sources if isinstance(source, MixedRows) else (source,)


def contents(source: RowBlocks, text_column: str) -> Iterator[str]:
    """Yield the words of each usable row as one string, those of repeated sources once. Reads everything."""
    # Once each: a tokenizer that is trained on them should not weigh a source by its repeats.
    numbers = [number for number in range(len(source.rows)) if not has_come_before(source, number)]
    for number in numbers:
        for row in forms.parsed(source.read(number), text_column):
            if isinstance(row, forms.Row):
                yield row.content
