"""Options of the `data` group, and sources of rows: the bundled demo, files, saved datasets and the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accel_train.config import (
    FractionBelowOne,
    NonNegativeInt,
    PositiveInt,
    UsageError,
    WithoutEffectError,
    expand_path,
)
from accel_train.data.tables.ledger import Changed
from accel_train.data.tables.row_blocks import RowBlocks, SampleBy, dataset_rows, file_rows
from accel_train.data.tables.row_files import files_of
from accel_train.data.tables.text_sources import hub_dataset, is_saved_dataset, saved_dataset
from accel_train.domains.language import rows, tokenizers
from accel_train.store.pretrained_base import remembered_sha256

DEMO_FILE = Path(__file__).parents[1] / "text" / "demo" / "shakespeare.txt"


@dataclass(frozen=True)
class DataConfig:
    """Source of rows, their tokenizer, and how they are packed."""

    path: str = "demo"
    """'demo' (bundled Shakespeare), a .jsonl, .json, .txt, .parquet, .arrow or .csv file, a folder (without .json) or
    glob of them, a folder written by dataset.save_to_disk, or a Hub id (owner/name or owner/name:configuration). A row
    has messages (a chat), prompt and completion (texts, or lists of messages), or plain text. Data may be larger than
    memory."""
    split: str = "train"
    """Split of a saved or Hub dataset. Files have none."""
    text_column: str = rows.DEFAULT_COLUMN
    """Field or column of plain text. A row that has another one than 'text' is that text, whatever else it has."""
    sample_by: SampleBy = "line"
    """Unit of a row in a .txt file: a line, a paragraph (separated by empty lines), or the whole file."""
    heldout_path: str | None = None
    """Held-out rows: any source accepted by `path`, or split=NAME, another split of `path`. null: heldout_fraction of
    `path`."""
    heldout_fraction: FractionBelowOne = 0.04
    """Share of rows held out for evaluation, by a hash of their words; one at least. No effect with heldout_path."""
    changed: Changed = "refuse"
    """Data that changed since the run began, such as added or removed rows. refuse: do not resume. allow: continue with
    the tokenizer of the checkpoint; its assets/ledger.json records which data were used from which step."""
    max_bad_rows: NonNegativeInt = 0
    """Unusable rows (bad JSON, no text, nothing to learn) to leave out. The next one is an error with its place."""
    tokenizer: str | None = None
    """Hub id or folder of a tokenizer, or 'trained': a byte-level BPE of vocab_size tokens, trained on the training
    rows (on a sample of more than 131,072). null: that of model.source, or 'trained' from scratch."""
    vocab_size: PositiveInt | None = None
    """Tokens of the trained tokenizer, 300 or more. null: 2048."""
    chat_template: str | None = None
    """Jinja file with a chat template that replaces the tokenizer's."""
    max_length: PositiveInt = 256
    """Tokens of a row. Longer plain texts are split, longer chats and completions are truncated."""
    packing: bool = True
    """Pack as many texts into a row as fit. They do not attend to each other; the loss is that of separate texts."""
    cache_dir: str | None = None
    """Cache of tokens (4 bytes each) and trained tokenizers between runs. null: $ACCEL_TRAIN_CACHE, else
    ~/.cache/accel_train."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UsageError(f"--data.max_length {self.max_length}: a row needs 2 tokens, the second to be predicted.")
        if self.heldout_path is None and self.heldout_fraction == 0:
            raise UsageError(
                "--data.heldout_fraction 0 without --data.heldout_path leaves nothing to evaluate on. Set a fraction "
                "such as 0.04, or give held-out rows."
            )
        if self.heldout_path is not None and self.heldout_fraction not in (0, DataConfig.heldout_fraction):
            raise WithoutEffectError(
                f"--data.heldout_fraction {self.heldout_fraction:g} has no effect with --data.heldout_path "
                f"{self.heldout_path!r}. Leave it at its default {DataConfig.heldout_fraction:g}, or give 0.",
                "data.heldout_fraction",
            )
        if self.tokenizer not in (None, tokenizers.TRAINED) and self.vocab_size is not None:
            raise UsageError(
                f"--data.vocab_size {self.vocab_size} has no effect with --data.tokenizer {self.tokenizer!r}. Leave it "
                "out, or set the tokenizer to 'trained'."
            )

    def refuse_beside(self, source: str | None) -> None:
        """Raise ``UsageError`` for options of a trained tokenizer with a model that has its own."""
        if source is not None and self.tokenizer is None and self.vocab_size is not None:
            raise UsageError(
                f"--data.vocab_size {self.vocab_size} has no effect with --model.source {source!r}, whose tokenizer is "
                "used. Leave it out, or set the tokenizer to 'trained'."
            )


def open_rows(path: str, *, option: str, split: str, text_column: str, sample_by: SampleBy, cache: Path) -> RowBlocks:
    """Find the rows of ``path``. Hashes the files, which identify what is cached, and reads none of their rows.

    ``split`` names a split of a saved or Hub dataset, and files have none. Raises ``UsageError`` for what is no source.
    """
    sha256 = partial(remembered_sha256, cache=cache)
    columns = [text_column, *rows.FIELDS]
    if path != "demo" and rows.is_hub_id(path):
        return dataset_rows(option, hub_dataset(path, split, option), path, split, columns, sha256)
    source = DEMO_FILE if path == "demo" else expand_path(path)
    if is_saved_dataset(source):
        return dataset_rows(option, saved_dataset(source, split, option), path, split, columns, sha256)
    files = [source] if path == "demo" else files_of(option, path, source)
    return file_rows(option, files, columns, sample_by, sha256)
