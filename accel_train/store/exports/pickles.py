"""Recognise files of Python's pickle, by name and by content. None is ever read.

To read a pickle is to run the program in it.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

PICKLES = frozenset({".bin", ".ckpt", ".distcp", ".pickle", ".pkl", ".pt", ".pth"})
"""Suffixes of files written by Python's pickle."""
GENERAL = frozenset({".bin", ".ckpt"})
"""Suffixes among ``PICKLES`` that other formats have too, such as raw arrays."""
PROTOCOLS = range(2, 6)
"""Protocols whose files begin with a mark. Protocols 0 and 1 are text and have none."""


def is_pickle(path: Path) -> bool:
    """Return True if, by its name, reading this file would run a program in it. ``.metadata`` is a DCP file."""
    return path.suffix.lower() in PICKLES or path.name == ".metadata"


def holds_pickle(path: Path) -> bool:
    """Return True if a file is a pickle by its name or its content, such as one of ``torch.save`` with another suffix.

    The content alone decides on the suffixes of ``GENERAL``. Raises ``OSError``.
    """
    if is_pickle(path) and path.suffix.lower() not in GENERAL:
        return True
    with path.open("rb") as file:
        head = file.read(3)
    if head.startswith(b"PK"):
        return _is_archive_of_torch(path)
    # Imported here, because most files begin otherwise.
    from pickletools import opcodes

    # The third byte is an operation. In a safetensors file with a header of 640 bytes it is 0, which is none.
    return (
        len(head) == 3 and head[0] == 0x80 and head[1] in PROTOCOLS and chr(head[2]) in {each.code for each in opcodes}
    )


def _is_archive_of_torch(path: Path) -> bool:
    """Return True for a zip file with torch's layout: ``NAME/data.pkl`` beside ``NAME/version`` or ``NAME/data/``."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = [name.partition("/") for name in archive.namelist()]
    except zipfile.BadZipFile:
        return False
    pickled = {folder for folder, _, rest in parts if rest == "data.pkl"}
    beside = {folder for folder, _, rest in parts if rest == "version" or rest.startswith("data/")}
    return bool(pickled & beside)
