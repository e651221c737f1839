"""Cache of help texts: the imports of a recipe take seconds, and a known text needs none of them.

A text is shown again only while everything it depends on is the same. Its key is the command line, the working
directory, and the width and colours of the terminal. Beside the text are the hashes of the presets, of all loaded
source files outside installed packages, and of the names and versions of those packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from accel_train.config import default_cache, expand_path
from accel_train.options.help_text import requested_topic

KEPT = 64
"""Number of texts. The oldest are deleted."""
INSTALLED = ("site-packages", "dist-packages")


def find() -> str | None:
    """Return the cached help text for the command line of this process, or None if it has to be generated."""
    if requested_topic(sys.argv[1:]) is None:
        return None
    try:
        entry: dict[str, Any] = json.loads(_path().read_text("utf-8"))
        sources: dict[str, str] = entry["sources"]
        if entry["packages"] != _packages() or any(_hash(name) != known for name, known in sources.items()):
            return None
        return str(entry["text"])
    except (OSError, ValueError, KeyError, TypeError):
        # No entry yet, a source that no longer exists, or a damaged entry.
        return None


@contextmanager
def recording(sources: Sequence[Path]) -> Generator[None]:
    """Cache what the body prints before it exits with code 0, if this process was started for a help text.

    ``sources`` are the files and folders that the text depends on, besides loaded modules.
    """
    if requested_topic(sys.argv[1:]) is None:
        # Called from Python, as in a notebook.
        yield
        return
    output = _Recorder(sys.stdout)
    try:
        with redirect_stdout(cast(TextIO, output)):
            yield
    except SystemExit as left:
        if left.code == 0:
            # If the text cannot be kept, the next start only takes longer.
            with suppress(OSError):
                _write("".join(output.written), [*map(str, sources), *_module_files()])
        raise


class _Recorder:
    """Standard output, recording everything written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        # Code that prints asks for the encoding, and whether this is a terminal.
        return getattr(self._stream, name)


def _path() -> Path:
    width = shutil.get_terminal_size().columns
    colours = os.environ.get("TERM") if sys.stdout.isatty() else None
    # Of several processes of a host, only the first one prints.
    rank = os.environ.get("LOCAL_RANK", "0")
    parts = [sys.version, os.getcwd(), sys.argv, width, sys.stdout.encoding, colours, rank]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return expand_path(default_cache()) / "help" / f"{key}.json"


def _write(text: str, sources: Sequence[str]) -> None:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"packages": _packages(), "sources": {name: _hash(name) for name in sources}, "text": text}
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(entry), "utf-8")
    # A rename, so that a start at the same time reads all of it or nothing.
    part.rename(path)
    entries = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
    for old in entries[:-KEPT]:
        old.unlink(missing_ok=True)


def _hash(name: str) -> str:
    """Hash a file by its content and a folder by the names in it."""
    path = Path(name)
    content = json.dumps(sorted(os.listdir(path))).encode() if path.is_dir() else path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def _packages() -> list[str]:
    """List the installed packages with their versions."""
    # The name of a .dist-info folder has the version, so nothing is read from it.
    folders = [folder for folder in sys.path if folder.endswith(INSTALLED) and os.path.isdir(folder)]
    return sorted(name for folder in folders for name in os.listdir(folder) if name.endswith(".dist-info"))


def _module_files() -> list[str]:
    """List the source files of loaded modules, without the standard library and installed packages."""
    standard_library = os.path.dirname(os.__file__)
    files: list[str] = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # torch has modules with the name of a file that does not exist.
        if not isinstance(file, str) or not os.path.isabs(file):
            continue
        is_installed = file.startswith(standard_library) or any(folder in file for folder in INSTALLED)
        # This package counts even if it is installed, because it may be edited in place.
        if not is_installed or name.partition(".")[0] == "accel_train":
            files.append(file)
    return files
