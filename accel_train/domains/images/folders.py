"""Folders of pictures: captions in text files of the same name, or in rows of ``metadata.jsonl`` or ``metadata.csv``.

Subfolders are read too. Hidden files and folders, directories of runs and the cache are skipped.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_train.config import UsageError
from accel_train.data.tables.run_files import RUN_FOLDERS
from accel_train.domains.images.sources import (
    SHOWN_NAMES,
    Entry,
    FileBytes,
    LeftOut,
    Listing,
    Source,
    read_regular,
)
from accel_train.domains.models.pictures.captions import on_one_line
from accel_train.store.names import CONFIG_FILE, RUN_FILE
from accel_train.wording import shortened

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
OTHER_PICTURES = (".heic", ".heif", ".jxl", ".jp2", ".psd", ".svg", ".eps", ".ico", ".tga", ".exr", ".hdr", ".dng")
"""Suffixes of pictures that are not read. Such files are reported as left out."""
METADATA = "metadata.jsonl"
METADATA_FILES = (METADATA, "metadata.csv")
"""Files of rows. The first one in a folder is read."""
UNREAD_METADATA = (*METADATA_FILES, "metadata.parquet")
"""Files of rows that may be in a folder whose captions are read from elsewhere."""
CAPTION_SUFFIXES = (".txt", ".caption", ".captions", ".cap", ".text", ".tags")
"""Suffixes of text files. One beside a picture of the same name holds its caption."""

REPEATS = re.compile(r"\d+_.*[^\W\d_].*")
"""Folder names of kohya's scripts, such as ``10_dog``: repeats of the pictures, and a caption for those without one."""


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

    In and below a folder with a ``metadata.jsonl`` or ``metadata.csv``, its rows list the pictures: ``file_name`` and a
    caption. Elsewhere the caption of ``a.png`` is the text of ``a`` + `source.caption_extension`. Files such as
    ``a.mask.png`` are masks, not pictures. Directories of runs and ``cache`` are left out. Raises ``UsageError`` for a
    folder without pictures, and for a picture whose only caption is in a file that is not read.
    """
    tree = _walk(folder, cache)
    files = tree.files
    pictures = _pictures_among(files)
    if not pictures:
        contents = "it has no files"
        if files:
            contents = f"its files end in {shortened(sorted({file.suffix for file in files}), 8)}"
        raise UsageError(
            f"{source.named}: no pictures in this folder; {contents}. A folder with files ending in "
            f"{', '.join(SUFFIXES)} is required."
        )
    unread = [
        LeftOut(_name(file, folder), f"{file.suffix.lower()} is not read (convert it to PNG or JPEG)")
        for file in files
        if file.suffix.lower() in OTHER_PICTURES
    ]
    listed = _captioned(folder, files, pictures, source)
    notices = [*listed.notices, *_about_repeats(folder, listed.entries), *tree.notices()]
    return Listing(listed.entries, [*listed.left_out, *unread, *tree.unreadable], notices)


def _captioned(folder: Path, files: Sequence[Path], pictures: Sequence[Path], source: Source) -> Listing:
    """List pictures with the captions of rows, or of text files where no folder above has rows."""
    from accel_train.domains.images.metadata_files import list_rows

    metadata = _metadata_files(files)
    if not metadata:
        _refuse_columns(folder, source)
    holders = {file.parent for file in metadata}
    in_rows = [picture for picture in pictures if not holders.isdisjoint(picture.parents)]
    elsewhere = [file for file in files if holders.isdisjoint(file.parents)]
    rows, texts = list_rows(folder, metadata, in_rows, source), _by_name(folder, elsewhere, source.caption_extension)
    entries = [*rows.entries, *texts.entries]
    together = [_about_several(folder, metadata)] if metadata and (texts.entries or len(metadata) > 1) else []
    unread = _about_unread(folder, _unread_captions(folder, files, entries, metadata, source), len(entries), source)
    return Listing(entries, [*rows.left_out, *texts.left_out], [*rows.notices, *together, *unread])


def _about_repeats(folder: Path, entries: Sequence[Entry]) -> list[str]:
    """Return a notice that folder names such as ``10_dog`` are not read, if there are any."""
    parents = (part for entry in entries for part in (folder / entry.name).relative_to(folder.parent).parts[:-1])
    names = [name for name in dict.fromkeys(parents) if REPEATS.fullmatch(name)]
    if not names:
        return []
    shown = shortened(names, SHOWN_NAMES)
    return [
        f"folder names are not read as repeats and captions, unlike in kohya's scripts: {shown}. Each picture counts "
        "once per epoch; to make one count more often, copy it and its caption under another name, or give it several "
        f"rows in {METADATA}"
    ]


def _metadata_files(files: Sequence[Path]) -> list[Path]:
    """Return the files of rows among all files of a tree: at most one per folder, outer folders first."""
    found: dict[Path, Path] = {}
    for name in METADATA_FILES:
        for file in files:
            if file.name == name:
                found.setdefault(file.parent, file)
    return sorted(found.values(), key=lambda file: (len(file.parts), file))


def has_rows(folder: Path, *, below: bool) -> bool:
    """Return True for a folder with captions in rows. With ``below``, folders at any depth below it count too."""
    if not below:
        return any(os.path.lexists(folder / name) for name in METADATA_FILES)
    return bool(_metadata_files(_walk(folder, None).files))


def _about_several(folder: Path, metadata: Sequence[Path]) -> str:
    """Return a notice that several folders are read together: they may be splits, and only one was meant."""
    names = shortened([_name(file, folder) for file in metadata], SHOWN_NAMES)
    alone = metadata[-1].parent
    return f"captions of {names} and of other folders are read together; to read only one, give its path: {alone}"


@dataclass(frozen=True)
class _Unread:
    """A file that is not read, beside a picture or in a folder above it, with a caption of the picture."""

    picture: Entry
    file: Path
    holder: Path | None
    """The file of rows that is read for the picture."""

    @property
    def kind(self) -> str:
        """Description of such files, for messages."""
        return self.file.name if self.file.name in UNREAD_METADATA else f"{self.file.suffix} files"


def _unread_captions(
    folder: Path, files: Sequence[Path], entries: Sequence[Entry], metadata: Sequence[Path], source: Source
) -> list[_Unread]:
    """Find captions that are not read: of another extension, or beside pictures whose captions are in rows."""
    extension = source.caption_extension.lower()
    own = _by_stem(files, {extension})
    other = _by_stem(files, {*CAPTION_SUFFIXES} - {extension})
    holders = {file.parent: file for file in metadata}
    rows = {file.parent: file for file in files if file.name in UNREAD_METADATA and holders.get(file.parent) != file}
    found: list[_Unread] = []
    for entry in entries:
        picture = folder / entry.name
        stem = picture.with_suffix("")
        holder = _nearest_above(picture, holders)
        beside = other.get(stem) if holder is None else own.get(stem, other.get(stem))
        unread = beside or _nearest_above(picture, rows)
        if unread is not None:
            found.append(_Unread(entry, unread, holder))
    return found


def _by_stem(files: Sequence[Path], suffixes: Collection[str]) -> dict[Path, Path]:
    return {file.with_suffix(""): file for file in files if file.suffix.lower() in suffixes}


def _nearest_above(picture: Path, by_folder: Mapping[Path, Path]) -> Path | None:
    """Return the file of the nearest folder above a picture that has one."""
    return next((by_folder[parent] for parent in picture.parents if parent in by_folder), None)


def _about_unread(folder: Path, unread: Sequence[_Unread], pictures: int, source: Source) -> list[str]:
    """Return a line for each kind of captions that are not read.

    Raises ``UsageError`` if a picture has no other caption: it would be left out, or learned with
    `data.default_caption`.
    """
    lacking = [item for item in unread if not item.picture.caption]
    if lacking:
        first = lacking[0]
        raise UsageError(
            f"{source.named}: {len(lacking):,} of {pictures:,} pictures have a caption only in a file that is not "
            f"read, such as {_name(first.file, folder)} for {first.picture.name}; {_how_to_read(first, source)}. Or "
            "remove such files, if they contain no captions."
        )
    names = {item.kind: _name(item.file, folder) for item in reversed(unread)}
    return [
        f"captions in {kind} are not read, because their {count:,} pictures have other captions: {names[kind]}"
        for kind, count in Counter(item.kind for item in unread).items()
    ]


def _how_to_read(unread: _Unread, source: Source) -> str:
    if unread.holder is not None:
        return f"captions come from {unread.holder.name} there. Write them into it, or remove it"
    if unread.file.name in UNREAD_METADATA:
        return f"convert it to {METADATA}"
    given = source.options.get("caption_extension")
    if given is None:
        return f"captions are read from {source.caption_extension} files. Rename them"
    return (
        f"{given} is {source.caption_extension}. Give {given} {unread.file.suffix}, or rename the files to end in "
        f"{source.caption_extension}"
    )


def _refuse_columns(folder: Path, source: Source) -> None:
    given = {"caption_column": source.caption_column, "image_column": source.image_column}
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{source.options[name]} {value!r} has no effect with {source.named}: {folder} has no columns and no "
                f"{' or '.join(METADATA_FILES)}. Leave it out."
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
            found.append(f"{len(self.repeated):,} links to folders that are read already, or contain this one: {names}")
        if self.runs:
            names = shortened(self.runs, SHOWN_NAMES)
            found.append(f"{len(self.runs):,} run directories are left out, with their curves and pictures: {names}")
        if self.cache:
            found.append(f"{self.cache} is left out with its pictures, because it is the cache (data.cache_dir)")
        return found


def _walk(folder: Path, cache: Path | None) -> _Tree:
    """Find all files but hidden ones, those of runs and of the cache.

    Links to folders are followed, unless that would read a file twice.
    """
    tree = _Tree()
    # By device and inode, not by path: a cycle of links has endless paths to one folder.
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
            # The directory of a run was given as the source itself.
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


def _by_name(folder: Path, files: Sequence[Path], extension: str) -> Listing:
    """Pair pictures and text files of the same name."""
    by_stem: dict[Path, list[Path]] = {}
    for picture in _pictures_among(files):
        by_stem.setdefault(picture.with_suffix(""), []).append(picture)
    # Files whose extension is spelled like the option come last and win: a.txt over a.TXT.
    texts = _by_stem(sorted(files, key=lambda file: file.suffix == extension), {extension.lower()})
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
    # Often a picture that was renamed without its caption, so it is reported.
    alone = [text for stem, text in texts.items() if stem not in by_stem]
    left_out += [LeftOut(_name(text, folder), "caption without a picture") for text in alone]
    return Listing(entries, left_out)


def _read_caption(file: Path) -> str:
    # utf-8-sig removes the byte-order mark that some editors write.
    return on_one_line(read_regular(file).decode("utf-8-sig"))
