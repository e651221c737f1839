"""Pictures in tables: parquet and Arrow files, saved datasets and the Hub's. Rows are read when they are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from accel_train.config import UsageError, expand_path
from accel_train.data.tables.formats import read_schema
from accel_train.data.tables.hub_datasets import load_hub_dataset
from accel_train.data.tables.sharded_table import ShardedTable
from accel_train.data.tables.shards import ShardIndex, index_shards
from accel_train.domains.images.sources import (
    CAPTION_COLUMNS,
    Bytes,
    Entry,
    LeftOut,
    Listing,
    Source,
    caption_of_row,
    choice_notices,
    is_saved_dataset,
    read_regular,
)
from accel_train.wording import did_you_mean, nearest, shortened

CACHE_BYTES = 2**28
"""Bytes of decoded row groups kept by each process."""
CAPTIONS_AT_ONCE = 4096
PLACES = "a folder of pictures, parquet files, a folder of dataset.save_to_disk"
"""Alternatives to a dataset of the Hub, for messages."""
PICTURE_TYPES = ("Image", "binary", "large_binary", "Value('binary", "struct<bytes")
"""Prefixes of the types of picture columns. In parquet, a picture of `datasets` is a struct of bytes and path."""


@dataclass(frozen=True)
class ShardBytes:
    """A picture in a row of parquet or Arrow files."""

    table: ShardedTable
    row: int
    column: str

    def read(self) -> bytes:
        """Read the row's block unless it is in the cache. Raises ``OSError`` or ``UsageError``."""
        value = self.table.take(self.column, [self.row])[0]
        path = Path(value["path"] or "") if isinstance(value, dict) else Path()
        # A table may come from anywhere, and must not name files of this machine.
        if path.is_absolute() or ".." in path.parts:
            raise OSError(f"its path {str(path)!r} points outside the folder of the table")
        return _content(value, self.table.file_of(self.row).parent)


@dataclass(frozen=True)
class RowBytes:
    """A picture in a row of a ``datasets.Dataset``."""

    dataset: Any
    row: int
    column: str

    def read(self) -> bytes:
        """Read the row. Raises ``OSError``."""
        return _content(self.dataset[self.row][self.column], Path())


def list_shards(source: Source, cache: Path) -> Listing:
    """List the rows of parquet or Arrow files."""
    index = index_shards(source.option, source.path, cache)
    if index.format == "jsonl":
        raise UsageError(
            f"{source.named}: rows of JSONL contain no pictures. Name the file metadata.jsonl, put it into the folder "
            "of the pictures, and give the folder."
        )
    columns = index.types[0]
    image_column = source.image_column or _only_picture_column(columns, source)
    _require_column("image_column", image_column, columns, source)
    table = ShardedTable(index, [image_column], CACHE_BYTES)
    places = [table.place(row) for row in range(len(table))]
    captions = _captions(index, columns, source, places)
    contents = [ShardBytes(table, row, image_column) for row in range(len(table))]
    return _listing(places, captions, contents, choice_notices(columns, source, one_column=True))


def _listing(
    places: Sequence[str],
    captions: Sequence[str | LeftOut | None],
    contents: Sequence[Bytes],
    notices: Sequence[str],
) -> Listing:
    """List the rows. Those whose caption is not text are left out."""
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    for place, caption, content in zip(places, captions, contents, strict=True):
        if isinstance(caption, LeftOut):
            left_out.append(caption)
        else:
            entries.append(Entry(place, caption, content))
    return Listing(entries, left_out, notices)


def _captions(
    index: ShardIndex, columns: Mapping[str, str], source: Source, places: Sequence[str]
) -> list[str | LeftOut | None]:
    """Read the captions of all rows."""
    name = source.caption_column or next((column for column in CAPTION_COLUMNS if column in columns), None)
    if name is None:
        return [None] * sum(block.rows for block in index.blocks)
    _require_column("caption_column", name, columns, source)
    classes = _class_names_of_shards(index, name)
    table = ShardedTable(index, [name], CACHE_BYTES)
    captions: list[str | LeftOut | None] = []
    for start in range(0, len(table), CAPTIONS_AT_ONCE):
        rows = range(start, min(start + CAPTIONS_AT_ONCE, len(table)))
        texts = table.take(name, rows)
        for row, text in zip(rows, texts, strict=True):
            captions.append(caption_of_row({name: _class_name(text, classes)}, name, places[row]))
    return captions


def _class_names_of_shards(index: ShardIndex, column: str) -> Sequence[str]:
    """Return the names of a column's classes, as written by `datasets` into each file. Empty for other columns.

    Raises ``UsageError`` if the files have different classes.
    """
    found: dict[tuple[str, ...], Path] = {}
    for file in index.files:
        feature = _feature(read_schema(file, index.format), column)
        found.setdefault(tuple(_class_names(feature)), file)
    if len(found) > 1:
        (names, file), (others, other) = [*found.items()][:2]
        raise UsageError(
            f"{index.option}: the classes of {column!r} are {shortened(names, 4)} in {file} and {shortened(others, 4)} "
            f"in {other}. Files with the same classes are required."
        )
    return next(iter(found))


def _feature(schema: Any, column: str) -> Any:
    """Return the feature that `datasets` has written for a column. None if none fits, so that its values are plain."""
    import datasets

    try:
        # Only this column's: others may have types that this version does not know.
        described = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        features = datasets.Features.from_dict({column: described})
        fits = features.arrow_schema.field(column) == schema.field(column)
    except Exception:  # other programs' files, damaged metadata and later types raise half a dozen types
        return None
    return features[column] if fits else None


def _class_names(feature: Any) -> Sequence[str]:
    """Return the names of the classes that a column of `datasets` numbers. Empty for any other column."""
    import datasets

    return feature.names if isinstance(feature, datasets.ClassLabel) else ()


def _class_name(value: Any, names: Sequence[str]) -> Any:
    """Return the name of a numbered class, or None for -1, which `datasets` writes for a missing class."""
    if names and value == -1:
        return None
    return names[value] if value in range(len(names)) else value


def list_dataset(source: Source) -> Listing:
    """List the rows of a folder of ``dataset.save_to_disk`` or of a dataset of the Hub."""
    import datasets

    dataset: Any = _load(source)
    features: dict[str, Any] = dict(dataset.features)
    types = {name: str(feature) for name, feature in features.items()}
    image_column = source.image_column or _only_picture_column(types, source)
    _require_column("image_column", image_column, types, source)
    named = source.caption_column
    if named is not None:
        _require_column("caption_column", named, types, source)
    # Without the other columns, whose pictures would be decoded just to read the captions.
    wanted = CAPTION_COLUMNS if named is None else (named,)
    captions = dataset.select_columns([name for name in wanted if name in types])
    classes = {name: _class_names(features[name]) for name in captions.column_names}
    if isinstance(features[image_column], datasets.Image):
        # As bytes of the file, because `datasets` would decode it without turning it upright.
        dataset = dataset.cast_column(image_column, datasets.Image(decode=False))
    pictures = dataset.select_columns([image_column])
    rows = captions if captions.column_names else [{}] * len(dataset)
    places = [f"row {row}" for row in range(len(dataset))]
    # A column that is named exists in every row.
    found: list[str | LeftOut | None] = []
    for row, place in zip(rows, places, strict=True):
        named_classes = {name: _class_name(value, classes[name]) for name, value in row.items()}
        found.append(caption_of_row(named_classes, named, place))
    contents = [RowBytes(pictures, row, image_column) for row in range(len(dataset))]
    return _listing(places, found, contents, choice_notices(types, source))


def _load(source: Source) -> Any:
    import datasets

    folder = expand_path(source.path)
    if not is_saved_dataset(folder):
        return load_hub_dataset(source.path, source.split, source.option, wanted=PLACES)
    try:
        loaded: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # damaged Arrow files raise half a dozen types
        raise UsageError(
            f"{source.named}: {type(error).__name__}: {' '.join(str(error).split())[:200]}. Save it again with "
            "dataset.save_to_disk."
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            raise UsageError(f"{source.named}: split {source.split!r} is not among {sorted(loaded)}. Name one of them.")
        return loaded[source.split]
    return loaded


def _only_picture_column(types: Mapping[str, str], source: Source) -> str:
    """Return the only column of pictures. `types` describes each column. Raises ``UsageError`` for none or several."""
    found = [name for name, kind in types.items() if kind.startswith(PICTURE_TYPES)]
    if len(found) != 1:
        remedy = "Give a table with one."
        option = source.options.get("image_column")
        if option is not None and found:
            remedy = f"Name it with {option}."
        raise UsageError(
            f"{source.named}: {len(found)} columns of pictures among {dict(types)}; one is required. {remedy}"
        )
    return found[0]


def _require_column(option: str, name: str, columns: Mapping[str, str], source: Source) -> None:
    if name not in columns:
        hint = did_you_mean(nearest(name, columns))
        given = source.options.get(option, option)
        raise UsageError(f"{given} {name!r}: {source.named} has the columns {sorted(columns)}{hint}. Name one of them.")


def _content(value: Any, folder: Path) -> bytes:
    """Return the bytes of a value: binary, or a struct of bytes and path as `datasets` writes it."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        content, path = fields.get("bytes"), fields.get("path")
        if content is None and path is not None:
            return read_regular(folder / path)
        value = content
    if not isinstance(value, bytes):
        raise OSError(f"the row contains {type(value).__name__}, not the bytes of a picture")
    return value
