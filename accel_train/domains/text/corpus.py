"""Texts from the bundled demo, JSONL and text files, saved datasets and the Hub, with their held-out split.

Errors name the place of a bad row: file:line, or the sample's index in a dataset.
"""

import errno
import itertools
import re
import socket
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train.config import UsageError, expand_path
from accel_train.data.tables.hub_datasets import is_hub_id, load_hub_dataset
from accel_train.data.tables.run_files import run_file_notices, without_run_files
from accel_train.data.tables.sides import CONTENT_FIELD, side_keys
from accel_train.data.tables.text_sources import (
    TABLE_FILES,
    BadRows,
    has_saved_splits,
    held_out_below,
    is_saved_dataset,
    json_rows,
    saved_dataset,
    split_key,
    table,
)
from accel_train.wording import did_you_mean, nearest

DEMO_FILE = Path(__file__).parent / "demo" / "shakespeare.txt"
LINE_FILES = (".jsonl", ".ndjson", ".txt")
NO_ID = (*LINE_FILES, *TABLE_FILES, ".json", ".py")
"""File endings. A path with one of them is not taken for a Hub id."""
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
CODES = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip-compressed"}


@dataclass(frozen=True)
class Corpus:
    """Texts, with references to their ready-made latents if they have them."""

    texts: list[str]
    references: list[tuple[str | int, int]] = field(default_factory=list)
    """(shard, idx) of each text's ready-made latent. Empty if latents are computed."""
    skipped: int = 0
    """Number of bad rows left out."""
    contents: list[str] = field(default_factory=list)
    """Hash of the file, such as a picture, that each text describes. Empty unless every row names one."""
    faults: Sequence[str] = ()
    """Place and reason of the first bad rows."""

    @property
    def sources(self) -> Sequence[Hashable]:
        """Source of each text's ready-made latent. Texts with equal sources share it. Empty if latents are computed."""
        return self.contents or self.references

    def select(self, keep: Sequence[int]) -> "Corpus":
        """Return a corpus of the texts with these indices."""
        texts = [self.texts[index] for index in keep]
        references: list[tuple[str | int, int]] = []
        contents: list[str] = []
        if self.references:
            references = [self.references[index] for index in keep]
        if self.contents:
            contents = [self.contents[index] for index in keep]
        return Corpus(texts, references, self.skipped, contents, self.faults)


def resolve_path(option: str, value: str) -> Path:
    """Return the absolute path of a file or folder, with `~` and `$VAR` expanded. Raises `UsageError` if missing."""
    path = expand_path(value)
    try:
        path.stat()
    except (OSError, ValueError) as error:
        reason = "does not exist"
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            reason = "is a loop of symbolic links"
        raise UsageError(f"{option} {value!r}: {path} {reason}. Give a file or folder that exists.") from None
    return path


def read_corpus(path: str, *, split: str, text_column: str, max_bad_rows: int, with_references: bool = False) -> Corpus:
    """Read all usable texts of `path` into memory, stripped and in order. `split` is a split of a `datasets` source.

    `with_references` requires `shard` and `idx` in each JSONL row.
    """
    bad = BadRows(max_bad_rows)
    rows = _rows(path, split, text_column, bad, with_references)
    texts: list[str] = []
    references: list[tuple[str | int, int]] = []
    contents: list[str] = []
    for place, row in rows:
        reason = text_fault(row, text_column)
        if reason is None and with_references:
            reason = _reference_fault(row)
        if reason:
            bad.add(place, reason)
            continue
        # Whitespace around a text comes from the file format and is not part of the text.
        texts.append(row[text_column].strip())
        if with_references:
            references.append((row["shard"], row["idx"]))
            if row.get(CONTENT_FIELD) is not None:
                contents.append(str(row[CONTENT_FIELD]))
    if not texts:
        raise UsageError(
            f"--data.path {path!r} contains no usable text on {socket.gethostname()} ({bad.count} bad rows). At least "
            f"one row with text in {text_column!r} is required: check the path, --data.split and --data.text_column."
        )
    if len(contents) < len(texts):
        # Hashes of only some rows cannot group all of them. Rows with the same reference still share a split.
        contents = []
    return Corpus(texts, references, bad.count, contents, bad.first)


def _rows(
    path: str, split: str, text_column: str, bad: BadRows, with_references: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of any source. A line of a text file is the row {text_column: line}."""
    if with_references:
        files = _jsonl_files(path, text_column)
        return itertools.chain.from_iterable(json_rows(_lines(file, bad), bad) for file in files)
    if path == "demo":
        return _text_rows(DEMO_FILE, text_column, bad)
    # Checked before the path, because a Hub id looks like a relative path.
    if is_hub_id(path, NO_ID):
        return dataset_rows(load_hub_dataset(path, split), path, text_column)
    source = resolve_path("--data.path", path)
    if is_saved_dataset(source):
        return dataset_rows(saved_dataset(source, split), path, text_column)
    if source.is_fifo():
        # Opening a named pipe would block until something writes to it.
        raise UsageError(f"--data.path {str(source)!r} is a named pipe, but rows are read at every start. Give a file.")
    if source.suffix in TABLE_FILES:
        return dataset_rows(table(source, [text_column]), path, text_column)
    return itertools.chain.from_iterable(_file_rows(file, text_column, bad) for file in _line_files(source))


def check_options_have_effect(path: str, split: str, text_column: str, heldout_path: str | None = None) -> None:
    """Refuse a split for a source that has no splits, and a text column if no source has columns."""
    plain = _has_lines_alone(path)
    if text_column != "text" and plain and (heldout_path is None or _has_lines_alone(heldout_path)):
        raise UsageError(
            f"--data.text_column {text_column!r} has no effect with --data.path {path!r}, whose lines are the texts. "
            "Leave it out, or give JSONL, a table or a dataset."
        )
    if split == "train":
        return
    if not has_splits(path):
        raise UsageError(
            f"--data.split {split!r} has no effect with --data.path {path!r}, because files and datasets saved without "
            "splits have none. Leave it out, or give the file of that split."
        )


def has_splits(path: str) -> bool:
    """Return True for a saved dataset of several splits, and for one of the Hub."""
    if _has_lines_alone(path):
        return False
    return is_hub_id(path, NO_ID) or has_saved_splits(resolve_path("--data.path", path))


def left_out_notices(path: str) -> list[str]:
    """Return notices about files that are not read in a folder of texts: those of runs, and pictures."""
    folder = expand_path(path)
    if not folder.is_dir() or is_saved_dataset(folder):
        return []
    notices = run_file_notices(folder.iterdir())
    # Not in subfolders, which may hold the report of a run.
    if _has_picture(folder.iterdir()):
        notices.append(
            f"--data.path {path!r} contains pictures, which are not read: only its texts are learned. For captioned "
            "pictures give --pictures.latents pixels, as the preset image_demo does"
        )
    return notices


def _has_picture(files: Iterable[Path]) -> bool:
    return any(file.suffix.lower() in PICTURES for file in files)


def _has_lines_alone(path: str) -> bool:
    if path == "demo" or path.endswith(".txt"):
        return True
    folder = expand_path(path)
    if is_hub_id(path, NO_ID) or not folder.is_dir() or is_saved_dataset(folder):
        return False
    return {file.suffix for file in _line_files(folder)} == {".txt"}


def _jsonl_files(path: str, text_column: str) -> list[Path]:
    """List the JSONL files of `path`, whose rows refer to ready-made latents."""
    files: list[Path] = []
    if path != "demo":
        files = _line_files(resolve_path("--data.path", path))
    if not files or any(file.suffix == ".txt" for file in files):
        raise UsageError(
            f"--data.latents needs --data.path to be JSONL with the fields {text_column!r}, 'shard' and 'idx'; it "
            f"is {path!r}. Give the JSONL file that was written with the latents."
        )
    return files


def _line_files(source: Path) -> list[Path]:
    if source.suffix == ".py":
        raise UsageError(
            f"--data.path {str(source)!r} is a dataset script: code from a dataset is never run. Load it "
            "once in your own program, save it with dataset.save_to_disk(DIR) and give that folder."
        )
    files = [source]
    if source.is_dir():
        # Sorted: the index of a sample must be the same on every machine.
        files = without_run_files(sorted(source.iterdir()))[0]
        files = [file for file in files if file.suffix in LINE_FILES and file.is_file()]
    if not files or files[0].suffix not in LINE_FILES:
        if source.is_dir() and _has_picture(source.rglob("*")):
            raise UsageError(
                f"--data.path {str(source)!r} contains pictures, but texts are required. To learn captioned pictures, "
                "give --pictures.latents pixels, as the preset image_demo does."
            )
        raise UsageError(
            f"--data.path {str(source)!r} is not a source of text. Give 'demo', a file or a folder of files ending in "
            f"{', '.join(LINE_FILES)}, a {' or '.join(TABLE_FILES)} file, a folder made by "
            'dataset.save_to_disk, or a hub id, or convert the data to JSONL: one {"text": ...} a line.'
        )
    return files


def _file_rows(file: Path, text_column: str, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    if file.suffix == ".txt":
        return _text_rows(file, text_column, bad)
    return json_rows(_lines(file, bad), bad)


def _lines(file: Path, bad: BadRows) -> Iterator[tuple[str, str]]:
    """Yield (file:line, text) of all non-empty lines, without a UTF-8 byte-order mark and without CRLF."""
    try:
        # Read as bytes, so that a line in another encoding is one bad row and does not end the file.
        stream = file.open("rb")
    except OSError as error:
        raise UsageError(f"--data.path: {file} cannot be opened ({error}). Make it readable.") from None
    with stream:
        for number, raw in enumerate(stream, 1):
            if number == 1:
                # Every line of such a file would be a bad row, so name the cause once instead.
                code = CODES.get(raw[:2])
                if code is not None:
                    raise UsageError(f"--data.path: {file} is {code}, but UTF-8 is required. Convert it first.")
                # A byte-order mark, as some editors write it, would become part of the first text or break its JSON.
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            place = f"{file}:{number}"
            try:
                line = raw.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                bad.add(place, f"byte {error.start + 1} of the line is not UTF-8 (iconv -t UTF-8 converts)")
                continue
            if line:
                yield place, line


def _text_rows(file: Path, text_column: str, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((place, {text_column: line}) for place, line in _lines(file, bad))


def text_fault(row: Mapping[str, Any], column: str) -> str | None:
    """Describe what is wrong with a row's text. Returns None for a usable text."""
    if column not in row:
        # Only columns of text are suggested: a column of numbers would end in the next error.
        texts = [name for name, value in row.items() if isinstance(value, str)]
        near = nearest(column, texts) or next(iter(texts), None)
        hint = ""
        if near:
            hint = f"; set --data.text_column {near}"
        return f"no field {column!r} among {sorted(row)}{hint}"
    text = row[column]
    if not isinstance(text, str):
        return f"{column!r} is {type(text).__name__}, text is required"
    if not text.strip():
        return f"{column!r} is empty"
    try:
        # JSON escapes can spell half of a surrogate pair, on which hashing and tokenising would fail later.
        text.encode()
    except UnicodeEncodeError:
        return f"{column!r} contains half of a surrogate pair, which is not a character"
    return None


def _reference_fault(row: dict[str, Any]) -> str | None:
    shard = row.get("shard")
    idx = row.get("idx")
    # In Python a bool is an int.
    if isinstance(shard, bool) or not isinstance(shard, int | str):
        return f"'shard' is {shard!r}; the number or file name of a latent shard is required"
    if isinstance(idx, bool) or not isinstance(idx, int) or idx < 0:
        return f"'idx' is {idx!r}; the row in the latent shard, 0 or more, is required"
    return None


def dataset_rows(dataset: Any, name: str, text_column: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (sample index, row) of a `datasets.Dataset`. Refuse one without length or random access."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"--data.path {name!r} is a stream ({type(dataset).__name__}): a dataset with a length and random access "
            "is required, because order and noise depend on the sample's index. Write what you "
            'need of it to JSONL, one {"text": ...} a line, or materialise it with save_to_disk.'
        )
    columns: list[str] = dataset.column_names
    if text_column not in columns:
        hint = did_you_mean(nearest(text_column, columns))
        if len(columns) == 1 and (separator := re.search(r"[;\t|]", columns[0])):
            hint = f", whose columns must be separated by commas, not {separator[0]!r}"
        raise UsageError(
            f"--data.text_column {text_column!r} is not a column of {name!r}{hint}; it has {columns}. Name one."
        )
    # Other columns may be images or audio, which `datasets` decodes whenever a row is read.
    return _dataset_texts(dataset.select_columns([text_column]), name, text_column)


def _dataset_texts(dataset: Any, name: str, text_column: str) -> Iterator[tuple[str, dict[str, Any]]]:
    index = 0
    # In batches, because `datasets` is slow row by row.
    for batch in dataset.iter(batch_size=1000):
        for text in batch[text_column]:
            yield f"sample {index} of {name}", {text_column: text}
            index += 1


def split_heldout(
    corpus: Corpus, fraction: float, known: Mapping[str, int] | None = None
) -> tuple[list[int], list[int]]:
    """Return the indices of (training, held-out) texts. A text is held out if the hash of its words is low.

    The split of a text depends on its words only. It does not change when the corpus grows, and equal texts are always
    in the same split. So are texts that share a latent, such as the captions of one picture. Of equal texts only the
    first is kept, unless latents are ready-made. Held-out texts are in the order of `_fair_order`. ``known`` maps texts
    to a `split_key` that replaces the computed one.
    """
    bound = held_out_below(fraction)
    known = known or {}
    keys = [known[text] if text in known else split_key(text) for text in corpus.texts]
    sides = side_keys(keys, corpus.sources)
    kept = _without_repeated(corpus, keys)
    heldout = [index for index in kept if sides[index] < bound]
    return [index for index in kept if sides[index] >= bound], _fair_order(corpus, heldout, keys)


def _fair_order(corpus: Corpus, rows: Iterable[int], keys: Sequence[int]) -> list[int]:
    """Order rows by the hashes of their words: one row of each text first, then the second of each, and so on.

    The first n are then a fair sample, not the first chapters, nor all rows of a few repeated captions.
    """
    earlier = Counter[str]()
    numbered: list[tuple[int, int, int]] = []
    for index in sorted(rows):
        text = corpus.texts[index]
        numbered.append((earlier[text], keys[index], index))
        earlier[text] += 1
    return [index for _, _, index in sorted(numbered)]


def _without_repeated(corpus: Corpus, keys: Sequence[int]) -> Sequence[int]:
    """Return the rows of a corpus without repeated ones: the first row of each of the `keys`."""
    # Ready-made latents belong to rows, and equal texts may have different ones.
    if corpus.references:
        return range(len(keys))
    first: dict[int, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    return list(first.values())


def remove_heldout(train: Corpus, heldout: Corpus) -> tuple[list[int], list[int]]:
    """Return the indices of (training, held-out) texts of two corpora, with no held-out text or latent in training.

    A caption of pictures may be in both: different pictures may share a caption, such as the name of a class.
    """
    train_keys, heldout_keys = ([split_key(text) for text in corpus.texts] for corpus in (train, heldout))
    candidates = _without_repeated(train, train_keys)
    heldout_rows = _fair_order(heldout, _without_repeated(heldout, heldout_keys), heldout_keys)
    if train.contents and heldout.contents:
        held_out = set(heldout.contents)
        return [index for index in candidates if train.contents[index] not in held_out], heldout_rows
    held_texts = set(heldout_keys)
    train_rows = [index for index in candidates if train_keys[index] not in held_texts]
    if train.references:
        held_latents = set(heldout.references)
        train_rows = [index for index in train_rows if train.references[index] not in held_latents]
    return train_rows, heldout_rows
