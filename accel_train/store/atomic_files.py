"""Small files, replaced whole: a reader sees the old content or the new. Standard library only."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically, safe against a power loss: temporary file, fsync, rename. One writer at a time.

    A directory with its name, left by a broken copy perhaps, is set aside. Raises ``OSError``: the old file then stays,
    and nothing else is left.
    """
    # A fixed name, so that the next write replaces what a crash has left.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # `replace` cannot put a file over a directory.
        if path.is_dir():
            set_aside(path)
        temporary.replace(path)
    except OSError:
        # A disk that refuses to write may refuse to delete, and the first error is the cause.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    # The rename itself is only in memory until the directory is flushed.
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames and new names in ``path`` survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_nonce() -> str:
    """Random hexadecimal digits to tell two attempts at one step apart."""
    return uuid.uuid4().hex[:12]


def to_json(value: Any) -> str:
    """Format a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json_in_place(path: Path, value: Any) -> None:
    """Write indented JSON and flush it to the disk, not atomically: for a directory that nobody reads yet."""
    with path.open("w", encoding="utf-8") as file:
        file.write(to_json(value))
        file.flush()
        os.fsync(file.fileno())


def replace_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically: a reader sees the old text or the new one."""
    replace_file(path, to_json(value).encode())


def set_aside(path: Path) -> Path:
    """Rename ``path`` to ``NAME.aside-<nonce>`` to free its name. Returns the new path."""
    aside = path.with_name(f"{path.name}.aside-{new_nonce()}")
    os.rename(path, aside)
    logger.warning("%s was in the way and is set aside as %s", path, aside.name)
    return aside


def delete_file(path: Path) -> None:
    """Delete a file if it exists. A directory with its name is set aside."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        set_aside(path)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, and flush them all, including those made by another process."""
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.absolute().parents:
        if parent.stat().st_dev != path.stat().st_dev:
            break  # the mount point was there before, and so was all above it
        with contextlib.suppress(PermissionError):  # a parent may be traversable but not readable
            fsync_directory(parent)
