"""Recognise files of Python's pickle, by name and by content. None is ever read.

To read a pickle is to run the program in it.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

PICKLES = frozenset({".bin", ".ckpt", ".distcp", ".pickle", ".pkl", ".pt", ".pth"})
"""Suffixes of files written by Python's pickle."""
PROTOCOLS = range(2, 6)
"""Protocols whose files begin with a mark. Protocols 0 and 1 are text and have none."""


def is_pickle(path: Path) -> bool:
    """Return True if, by its name, reading this file would run a program in it. ``.metadata`` is a DCP file."""
    return path.suffix.lower() in PICKLES or path.name == ".metadata"


def holds_pickle(path: Path) -> bool:
    """Return True if a file is a pickle by its name or its content, such as one of ``torch.save`` with another suffix.

    Raises ``OSError``.
    """
    if is_pickle(path):
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
    try:
        with zipfile.ZipFile(path) as archive:
            return any(Path(name).name == "data.pkl" for name in archive.namelist())
    except zipfile.BadZipFile:
        return False
