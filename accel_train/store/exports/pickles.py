"""Recognise files of Python's pickle, by name and by content. None is ever read.

To read a pickle is to run the program in it.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

PICKLES = frozenset({".bin", ".ckpt", ".distcp", ".joblib", ".pickle", ".pkl", ".pt", ".pth"})
"""Suffixes of files written by Python's pickle."""
GENERAL = frozenset({".bin", ".ckpt"})
"""Suffixes among ``PICKLES`` that other formats have too, such as raw arrays."""
PROTOCOLS = range(2, 6)
"""Protocols whose files begin with a mark. Those of protocols 0 and 1 have none."""
ARRAY = b"\x93NUMPY"
"""First bytes of numpy's ``.npy``."""
MAX_HEADER = 1 << 20
"""Most bytes of a header of ``.npy`` that is read: numpy's own limit is for files of strangers."""


def is_pickle(path: Path) -> bool:
    """Return True if, by its name, reading this file would run a program in it. ``.metadata`` is a DCP file."""
    return path.suffix.lower() in PICKLES or path.name == ".metadata"


def holds_pickle(path: Path) -> bool:
    """Return True if a file is a pickle by its name or its content, such as one of ``torch.save`` with another suffix.

    Arrays of Python objects in ``.npy`` and ``.npz`` are pickles too. The content alone decides on the suffixes of
    ``GENERAL``. A pickle of protocol 0 or 1 and a compressed one are recognised by the name only, such as ``x.pkl`` or
    ``x.joblib``: other files may begin with the same bytes. Raises ``OSError``.
    """
    if is_pickle(path) and path.suffix.lower() not in GENERAL:
        return True
    with path.open("rb") as file:
        head = file.read(len(ARRAY))
        if head == ARRAY:
            file.seek(0)
            return _holds_objects(file)
    if head.startswith(b"PK"):
        return _archive_holds_pickle(path)
    # Imported here, because most files begin otherwise.
    from pickletools import opcodes

    # The third byte is an operation. In a safetensors file with a header of 640 bytes it is 0, which is none.
    return (
        len(head) >= 3 and head[0] == 0x80 and head[1] in PROTOCOLS and chr(head[2]) in {each.code for each in opcodes}
    )


def _holds_objects(file: IO[bytes]) -> bool:
    """Return True if the header of a ``.npy`` file says that it holds Python objects. Reads the header only."""
    from numpy.lib import format as npy

    try:
        major, _ = npy.read_magic(file)
        # Version 3 differs from 2 in the encoding of the names of fields.
        read = {1: npy.read_array_header_1_0}.get(major, npy.read_array_header_2_0)
        _, _, dtype = read(file, max_header_size=MAX_HEADER)
    # The parsing of a damaged header, or of a damaged archive, raises half a dozen types.
    except Exception:
        return False
    return dtype.hasobject


def _archive_holds_pickle(path: Path) -> bool:
    """Return True for a zip file with an array of objects (``.npz``), or with torch's layout.

    That is ``NAME/data.pkl`` beside ``NAME/version`` or ``NAME/data/``.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = [name.partition("/") for name in archive.namelist()]
            for name in archive.namelist():
                if name.endswith(".npy"):
                    with archive.open(name) as member:
                        if _holds_objects(member):
                            return True
    # RuntimeError: encrypted, or compressed by an unknown method.
    except (zipfile.BadZipFile, RuntimeError):
        return False
    pickled = {folder for folder, _, rest in parts if rest == "data.pkl"}
    beside = {folder for folder, _, rest in parts if rest == "version" or rest.startswith("data/")}
    return bool(pickled & beside)
