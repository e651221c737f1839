"""``manifest.json``: what it must hold, its own hash, and the one way in which it is read.

Types, bounds and names are checked before anything believes them, so that a flipped bit, a torn file or a stranger's
file is a reason to take the previous checkpoint, like any other damage. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_train import strict_json

SCHEMA = 2
"""2 carries a hash of itself. 1, of the first versions, has none and is held to the same types and bounds."""
MANIFEST = "manifest.json"
NAME = re.compile(r"checkpoint_(\d{8,})")

MAX_BYTES = 64 << 20
MAX_STEP = 10**15
MAX_FILES = 1_000_000
MAX_DEPTH = 16
"""Folders below the checkpoint; what recipes write below ``assets/`` has two or three."""


def checkpoint_name(step: int) -> str:
    """``checkpoint_00001200``: sorts by step as text as well."""
    return f"checkpoint_{step:08d}"


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest as it is written: with this schema and its own hash."""
    rest = {key: value for key, value in manifest.items() if key != "schema"}
    return strict_json.sealed({"schema": SCHEMA} | rest)


def read(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint's directory. Raises ``ValueError`` with the path and the reason."""
    return read_with_text(directory)[0]


def read_with_text(directory: Path) -> tuple[dict[str, Any], bytes]:
    """The same, with the file's content byte for byte."""
    file = directory / MANIFEST
    try:
        content = strict_json.read_bytes(file, MAX_BYTES)
        found = parse(content)
        named = NAME.fullmatch(directory.name)
        if named and checkpoint_name(found["step"]) != directory.name:
            raise ValueError(f"its step is {found['step']}, the directory's name says {int(named[1])}")
    except FileNotFoundError as error:
        what = f"{MANIFEST} cannot be read ({error})" if file.is_symlink() else f"no {MANIFEST}"
        raise ValueError(f"{directory}: {what}, so it is not a committed checkpoint") from None
    except ValueError as error:
        raise ValueError(f"{directory}: {MANIFEST} cannot be read ({error})") from None
    return found, content


def parse(content: bytes) -> dict[str, Any]:
    """A manifest from its text. Raises ``ValueError`` with the reason."""
    found = strict_json.parse(content)
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    schema, writer = found.get("schema"), found.get("accel_train", "of an unknown version")
    if type(schema) is not int or schema not in (1, SCHEMA):
        raise ValueError(f"schema {schema!r} was written by accel_train {writer}; this one reads 1 and {SCHEMA}")
    if schema == SCHEMA:
        strict_json.check_seal(found)
    elif strict_json.SEAL in found:
        raise ValueError(f"schema 1 has no {strict_json.SEAL}: it has changed since it was written")
    for key, (required, holds) in _FIELDS.items():
        if key not in found and key in REQUIRED:
            raise ValueError(f"it has no {key!r}")
        if key in found and not holds(found[key]):
            raise ValueError(f"{key} is {_short(found[key])}; {required} is required")
    _check_files(found["files"])
    return found


def _check_files(files: Mapping[str, Any]) -> None:
    """Every name stays inside the checkpoint, and every file has a size and a hash."""
    if len(files) > MAX_FILES:
        raise ValueError(f"it lists {len(files)} files; at most {MAX_FILES} are read")
    for name, facts in files.items():
        parts = name.split("/")
        unsafe = any(part in ("", ".", "..") for part in parts) or not name.isprintable()
        if unsafe or len(parts) > MAX_DEPTH or name == MANIFEST:
            raise ValueError(f"it lists {_short(name)}, which is no name of a file in a checkpoint")
        if not isinstance(facts, dict) or not _whole(facts.get("size")) or not _is_sha256(facts.get("sha256")):
            raise ValueError(f"files: {name} has no size and sha256, but {_short(facts)}")


def _whole(value: Any, most: int = 2**63) -> bool:
    return type(value) is int and 0 <= value <= most


def _number(value: Any) -> bool:
    return math.isfinite(value) if type(value) is float else type(value) is int and abs(value) <= 2**63


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_TEXT = "a text", lambda value: isinstance(value, str) and len(value) <= 10_000
_OBJECT = "an object", lambda value: isinstance(value, dict)
_AMOUNT = "a finite number from 0", lambda value: _number(value) and value >= 0
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": (f"a whole number from 0 to {MAX_STEP}", lambda value: _whole(value, MAX_STEP)),
    "files": _OBJECT,
    "accel_train": _TEXT,
    "run_id": _TEXT,
    "samples_seen": ("a whole number from 0", _whole),
    "epoch": _AMOUNT,
    "state": ("true or false", lambda value: isinstance(value, bool)),
    "world_size": ("a whole number from 1", lambda value: _whole(value) and value > 0),
    "written_at": _TEXT,
    "seconds": _AMOUNT,
    "layout": _OBJECT,
    "experiment": _OBJECT,
    "resolved": _OBJECT,
    "metrics": (
        "finite numbers by name",
        lambda value: isinstance(value, dict) and all(_number(figure) for figure in value.values()),
    ),
}
REQUIRED = ("step", "files")
