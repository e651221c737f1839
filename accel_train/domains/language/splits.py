"""Sources of the training and held-out rows of a run, and the rule that assigns a row to a side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from accel_train.config import UsageError, expand_path, refuse_without_effect
from accel_train.data.tables.row_blocks import FileRows, RowBlocks
from accel_train.data.tables.run_files import listed, run_file_notices
from accel_train.data.tables.shards import warn_of_changes
from accel_train.data.tables.text_sources import content_key, text_key
from accel_train.domains.language.rows import forms
from accel_train.domains.language.rows.sources import (
    DataConfig,
    MixedRows,
    contents,
    has_splits,
    mixed,
    open_rows,
    parts_of,
)
from accel_train.wording import did_you_mean, nearest

SPLIT = "split="


class SplitSources:
    """The rows of both splits, not yet read."""

    def __init__(self, config: DataConfig, cache: Path) -> None:
        self.config = config
        self.cache = cache
        self.raised: float | None = None
        """Share to hold out instead of the option's, if no row falls under that."""
        options = ("--data.path", *["--data.more_paths"] * len(config.more_paths))
        parts = [self._open(path, option, config.split) for path, option in zip(config.paths, options, strict=True)]
        self._refuse_twice(parts)
        self.train = mixed(parts, config.repeats)
        self.heldout: RowBlocks | None = None
        if config.heldout_path is not None:
            self.heldout = self._open_heldout(config.heldout_path)
        self._refuse_unread()

    def _refuse_twice(self, parts: Sequence[RowBlocks]) -> None:
        """Raise ``UsageError`` for two sources with the same rows, or with a file in common, however they are named.

        Their held-out rows would be evaluated twice, as if they were different ones.
        """
        for (path, source), (other_path, other) in combinations(zip(self.config.paths, parts, strict=True), 2):
            shared = sorted(_files_of(source) & _files_of(other))
            if source.key == other.key or shared:
                what = f"both have {shared[0]}" if shared else "both have the same rows"
                raise UsageError(
                    f"{self.config.named}: a source is named twice: {path!r} and {other_path!r}, {what}. Name each "
                    "file once, and set --data.repeats to the number of times an epoch has it."
                )

    def _open_heldout(self, path: str) -> RowBlocks:
        config = self.config
        if not path.startswith(SPLIT):
            return self._open(path, "--data.heldout_path", config.split)
        if not has_splits(config.path):
            raise UsageError(
                f"--data.heldout_path {path!r}: --data.path {config.path!r} has no splits, because files and datasets "
                "saved without splits have none. Give the held-out rows as a source of their own."
            )
        return self._open(config.path, "--data.heldout_path", path.removeprefix(SPLIT))

    def _refuse_unread(self) -> None:
        """Raise ``UsageError`` for options about text lines, columns or splits that no source has."""
        config = self.config
        sources = [*parts_of(self.train), *([] if self.heldout is None else [self.heldout])]
        kinds: set[str] = set()
        for source in sources:
            # A dataset has columns, as tables do.
            kinds |= {file.suffix for file in source.files} if isinstance(source, FileRows) else {"dataset"}
        splits = any(map(has_splits, filter(None, (*config.paths, config.heldout_path))))
        read = {"sample_by": ".txt" in kinds, "text_column": kinds != {".txt"}, "split": splits}
        wanted = {"sample_by": "a .txt file, which this option divides", "text_column": "JSONL, a table or a dataset"}
        wanted["split"] = "a saved dataset with several splits or one of the Hub, because files have no splits"
        for name, is_read in read.items():
            if not is_read:
                because = f"with {config.named}: it requires {wanted[name]}"
                refuse_without_effect(config, "data", [name], because, "give such a source")
        schemas = (names for source in sources for names in source.schemas(config.text_column))
        _refuse_missing_column(config.text_column, config.named, schemas)

    def _open(self, path: str, option: str, split: str) -> RowBlocks:
        config = self.config
        return open_rows(
            path,
            option=option,
            split=split,
            text_column=config.text_column,
            sample_by=config.sample_by,
            cache=self.cache,
        )

    def name_changed_files(self) -> None:
        """Log which files were added, removed or changed since the last start. The fingerprint names none of them.

        One process calls it.
        """
        named = list(zip(self.config.paths, parts_of(self.train), strict=True))
        if self.heldout is not None:
            named.append((str(self.config.heldout_path), self.heldout))
        for path, source in named:
            if isinstance(source, FileRows):
                identities = {str(file): facts for file, facts in zip(source.files, source.identities, strict=True)}
                warn_of_changes(source.option, path, self.cache, identities)

    def notices(self) -> list[str]:
        """Return notices about the repeats of each source of a mixture, and about files of runs among the data."""
        mixture: list[str] = []
        if isinstance(self.train, MixedRows):
            shares = zip(self.config.paths, self.train.repeats, strict=True)
            mixture = [f"an epoch has {', '.join(f'{repeats} x {path}' for path, repeats in shares)}"]
        paths = [path for path in (*self.config.paths, self.config.heldout_path) if path not in (None, "demo")]
        return mixture + [line for path in paths for line in run_file_notices(listed(expand_path(str(path))))]

    @property
    def fraction(self) -> float:
        """Share of the training source to hold out."""
        if self.heldout is not None:
            return 0.0
        return self.config.heldout_fraction if self.raised is None else self.raised

    def hold_out_one(self, counts: Mapping[str, int]) -> bool:
        """Raise ``fraction`` until one row is held out, if no row falls under it. Returns False if nothing is raised.

        ``counts`` has the rows of both splits. The choice is a function of the rows alone: the one with the lowest
        hash, and its copies.
        """
        if self.heldout is not None or counts["heldout"] or counts["train"] < 2:
            return False
        texts = contents(self.train, self.config.text_column)
        lowest = min(int.from_bytes(content_key(text)[:8], "big") for text in texts)
        # The next float above the hash, which may have more digits than a float.
        self.raised = math.nextafter((lowest + 1) / 2**64, 1.0)
        return True

    @cached_property
    def excluded(self) -> frozenset[bytes]:
        """Hashes of the held-out rows if they have their own source, which is read. Empty otherwise."""
        if self.heldout is None:
            return frozenset()
        found = contents(self.heldout, self.config.text_column)
        return frozenset(text_key(text) for text in found)

    def facts(self, source: RowBlocks) -> list[Any]:
        """Return everything the texts of a source depend on, besides the tokenizer."""
        column = self.config.text_column
        # The column helps to tell the forms of rows apart. The default is left out. Versions differ in whether rows
        # without the column may have their text under the default name.
        rule = [] if column == forms.DEFAULT_COLUMN else ["text_column", column, "or text"]
        if source is self.heldout:
            # All rows of a separate held-out source are held out, whatever the fraction.
            return [source.key, *rule]
        # Versions differ in what counts as the same text.
        excluded = None if self.heldout is None else ["exact text", self.heldout.key]
        return [source.key, self.fraction, excluded, *rule]

    def training_texts(self) -> Iterator[str]:
        """Yield the words of the training rows. Reads everything."""
        # The rule of `BlockEncoder`, for rows that are not tokens yet: a tokenizer must not learn held-out words.
        limit = self.fraction * 2**64
        for text in contents(self.train, self.config.text_column):
            key = content_key(text)
            if int.from_bytes(key[:8], "big") >= limit and text_key(text) not in self.excluded:
                yield text


def _files_of(source: RowBlocks) -> set[Path]:
    return {file.resolve() for file in source.files} if isinstance(source, FileRows) else set()


def _refuse_missing_column(column: str, named: str, schemas: Iterable[Sequence[str] | None]) -> None:
    """Raise ``UsageError`` if the columns of all tables show that no row has the ``column``.

    ``named`` has the options of the sources. None in ``schemas`` stands for other files, whose fields are only known
    once all rows are read.
    """
    if column == forms.DEFAULT_COLUMN:
        return
    seen: set[str] = set()
    for names in schemas:
        if names is None or column in names:
            return
        seen.update(names)
    # For files without a row, or with a broken first one, the reader's error says more.
    if not seen:
        return
    hint = did_you_mean(nearest(column, sorted(seen)))
    raise UsageError(
        f"--data.text_column {column!r}: no column of {named}, which has {sorted(seen)}{hint}. Name one "
        "of these, or leave the option out to train on 'text', on messages, or on prompt and completion."
    )
