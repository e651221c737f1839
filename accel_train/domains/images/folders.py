"""Folders of pictures: captions in text files of the same name, or in ``metadata.jsonl``.

Folders below are read too. Hidden files and folders, directories of runs and the cache are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unicodedata import normalize

from accel_train.config import UsageError
from accel_train.data.tables.json_rows import RepeatedKeyError, parse_json
from accel_train.data.tables.run_files import RUN_FOLDERS
from accel_train.domains.images.sources import (
    SHOWN_NAMES,
    Entry,
    FileBytes,
    LeftOut,
    Listing,
    Source,
    caption_of_row,
    choice_notices,
    read_regular,
)
from accel_train.store.names import CONFIG_FILE, RUN_FILE
from accel_train.wording import shortened

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
OTHER_PICTURES = (".heic", ".heif", ".jxl", ".jp2", ".psd", ".svg", ".eps", ".ico", ".tga", ".exr", ".hdr", ".dng")
"""Pictures that are not read. They are counted, and not taken for other files."""
METADATA = "metadata.jsonl"


def is_mask(file: Path) -> bool:
    """Return True for the name of a mask, such as ``a.mask.png`` beside ``a.png``."""
    return file.stem.endswith(".mask") and file.suffix.lower() in SUFFIXES


def picture_files(folder: Path) -> list[Path]:
    """Return the pictures of a folder and of those below it, as `list_folder` finds them."""
    return _pictures_among(_walk(folder, None).files)


def _pictures_among(files: Sequence[Path]) -> list[Path]:
    return [file for file in files if file.suffix.lower() in SUFFIXES and not is_mask(file)]


def list_folder(folder: Path, source: Source, cache: Path) -> Listing:
    """List the pictures of a folder with their captions.

    With a ``metadata.jsonl`` in the folder its rows are the pictures: ``file_name`` and a caption. Otherwise the
    caption of ``a.png`` is the text of ``a`` + `source.caption_extension`. Files such as ``a.mask.png`` are masks and
    no pictures. Directories of runs and ``cache`` are left out. Raises ``UsageError`` for a folder without pictures.
    """
    tree = _walk(folder, cache)
    files = tree.files
    pictures = _pictures_among(files)
    if not pictures:
        others = sorted({file.suffix for file in files})
        raise UsageError(
            f"{source.named}: no pictures in this folder; its files end in {shortened(others, 8)}. A "
            f"folder with files ending in {', '.join(SUFFIXES)} is required."
        )
    unread = [
        LeftOut(_name(file, folder), f"{file.suffix.lower()} is not read (convert it to PNG or JPEG)")
        for file in files
        if file.suffix.lower() in OTHER_PICTURES
    ]
    if os.path.lexists(folder / METADATA):
        listed = _by_metadata(folder, pictures, source)
    else:
        _refuse_columns(folder, source)
        captions = [file for file in files if file.suffix.lower() == source.caption_extension.lower()]
        # Last, and so taken, the ones written as the option is: a.txt before a.TXT.
        captions.sort(key=lambda file: file.suffix == source.caption_extension)
        listed = _by_name(folder, pictures, captions)
    notices = [*listed.notices, *tree.notices()]
    return Listing(listed.entries, [*listed.left_out, *unread, *tree.unreadable], notices)


def _refuse_columns(folder: Path, source: Source) -> None:
    given = {"caption_column": source.caption_column, "image_column": source.image_column}
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{source.group}{name} {value!r} has no effect with {source.named}: {folder} has no columns and no "
                f"{METADATA}. Leave it out."
            )


@dataclass
class _Tree:
    """The files of a folder and of the folders below it, and the links that are not followed."""

    files: list[Path] = field(default_factory=list[Path])
    repeated: list[str] = field(default_factory=list[str])
    """Links to folders whose files are read under another name, or that hold the folder itself."""
    unreadable: list[LeftOut] = field(default_factory=list[LeftOut])
    """Folders without permission."""
    runs: list[str] = field(default_factory=list[str])
    """Directories of runs."""
    cache: str = ""
    """The cache, if it is among the folders."""

    def notices(self) -> list[str]:
        """Return a line for each kind of folder that is left out."""
        found: list[str] = []
        if self.repeated:
            names = shortened(self.repeated, SHOWN_NAMES)
            found.append(f"{len(self.repeated):,} links to folders that are read already, or hold this one: {names}")
        if self.runs:
            names = shortened(self.runs, SHOWN_NAMES)
            found.append(
                f"{len(self.runs):,} directories of runs are left out, with their curves and pictures: {names}"
            )
        if self.cache:
            found.append(f"{self.cache} is left out with its pictures, because it is the cache (data.cache_dir)")
        return found


def _walk(folder: Path, cache: Path | None) -> _Tree:
    """Find all files but hidden ones, those of runs and of the cache.

    Links to folders are followed, unless that would read a file twice.
    """
    tree = _Tree()
    # By what it is, not by its path: a circle of links has endless paths to one folder.
    seen = {_identity(parent) for parent in (folder.resolve(), *folder.resolve().parents)}
    cache_identity = _identity(cache) if cache is not None and cache.is_dir() else None
    # Folders first: with a link before the folder that it leads to, the names would be those of the link.
    links: list[Path] = []
    folders = [folder]
    while folders or links:
        current = folders.pop() if folders else links.pop(0)
        if current != folder:
            identity = _identity(current)
            if identity == cache_identity:
                tree.cache = _name(current, folder)
                continue
            if identity in seen:
                tree.repeated.append(_name(current, folder))
                continue
            seen.add(identity)
        try:
            # The order of a listing differs between file systems, and the order of samples must not.
            names = sorted(name for name in os.listdir(current) if not name.startswith("."))
        except OSError as error:
            tree.unreadable.append(LeftOut(_name(current, folder), "the folder cannot be read", error.strerror or ""))
            continue
        if RUN_FILE in names and CONFIG_FILE in names:
            if current != folder:
                tree.runs.append(_name(current, folder))
                continue
            # Pictures in the directory of the run itself.
            names = [name for name in names if name not in RUN_FOLDERS]
        for path in (current / name for name in names):
            # os.path: a link that leads to itself is no folder, and no error.
            if not os.path.isdir(path):
                tree.files.append(path)
            elif path.is_symlink():
                links.append(path)
            else:
                folders.append(path)
    tree.files.sort()
    return tree


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _by_name(folder: Path, pictures: Sequence[Path], captions: Sequence[Path]) -> Listing:
    """Pair pictures and text files of the same name."""
    by_stem: dict[Path, list[Path]] = {}
    for picture in pictures:
        by_stem.setdefault(picture.with_suffix(""), []).append(picture)
    texts = {caption.with_suffix(""): caption for caption in captions}
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    for stem, same_name in by_stem.items():
        names = [_name(picture, folder) for picture in same_name]
        # a.png and a.jpg: which one the caption describes cannot be known.
        if len(same_name) > 1:
            detail = f"{' and '.join(names)} share a caption; rename or delete all but one"
            left_out += [LeftOut(name, "pictures of one name", detail) for name in names]
            continue
        caption = None
        if stem in texts:
            try:
                caption = _read_caption(texts[stem])
            except (OSError, UnicodeDecodeError) as error:
                left_out.append(LeftOut(_name(texts[stem], folder), "caption is not readable text", str(error)[:80]))
                continue
        entries.append(Entry(names[0], caption, FileBytes(same_name[0])))
    # Often a picture that was renamed without its caption, so it is said.
    alone = [text for stem, text in texts.items() if stem not in by_stem]
    left_out += [LeftOut(_name(text, folder), "caption without a picture") for text in alone]
    return Listing(entries, left_out)


def _read_caption(file: Path) -> str:
    # utf-8-sig takes the byte-order mark of some editors away.
    return " ".join(read_regular(file).decode("utf-8-sig").split())


def _by_metadata(folder: Path, pictures: Sequence[Path], source: Source) -> Listing:
    """Read the rows of ``metadata.jsonl``."""
    known = {_name(picture, folder): picture for picture in pictures}
    # macOS writes an accent as a character of its own, and most programs do not.
    composed = {normalize("NFC", name): name for name in known}
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    used: set[str] = set()
    fields: set[str] = set()
    try:
        content = read_regular(folder / METADATA)
    except OSError as error:
        raise UsageError(
            f"{source.named}: {folder / METADATA} cannot be read: {error}. Correct or remove it."
        ) from None
    for place, row in _rows(content, left_out):
        fields |= row.keys()
        name = _file_name(row, place, source)
        if name not in known:
            name = composed.get(normalize("NFC", name), name)
        if not _is_inside(name):
            left_out.append(LeftOut(place, "file_name leaves the folder", repr(name)[:80]))
        elif name not in known:
            left_out.append(LeftOut(place, "caption without a picture", f"no {name[:80]}"))
        else:
            used.add(name)
            caption = caption_of_row(row, source.caption_column, place, source.group)
            if isinstance(caption, LeftOut):
                left_out.append(caption)
            else:
                entries.append(Entry(name, caption, FileBytes(known[name])))
    unnamed = [name for name in known if name not in used]
    left_out += [LeftOut(name, f"not named in {METADATA}") for name in unnamed]
    return Listing(entries, left_out, choice_notices(fields, source))


def _rows(content: bytes, left_out: list[LeftOut]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, row). Lines other than JSON objects are left out."""
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not line.strip():
            continue
        place = f"{METADATA}:{number}"
        try:
            row: Any = parse_json(line.decode("utf-8", "surrogatepass"))
        except RepeatedKeyError as error:
            left_out.append(LeftOut(place, "a key given twice", str(error)[:80]))
            continue
        # Also UnicodeDecodeError, which is a ValueError. A long line of brackets exhausts the stack.
        except (ValueError, RecursionError) as error:
            left_out.append(LeftOut(place, "not JSON", str(error)[:80]))
            continue
        if isinstance(row, dict):
            yield place, cast("dict[str, Any]", row)
        else:
            left_out.append(LeftOut(place, "not a JSON object"))


def _file_name(row: Mapping[str, Any], place: str, source: Source) -> str:
    name = row.get("file_name")
    if not isinstance(name, str):
        raise UsageError(
            f"{source.named}: {place} has no text in 'file_name', its fields are {sorted(row)}. Each row must name its "
            "picture below the folder."
        )
    # As `find` and some tools write names.
    return name.removeprefix("./")


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts
