"""JSON files read as if anybody had written them: a regular file of bounded size, strict JSON, one error to catch.

``json.load`` takes the last of two equal keys, ``NaN``, ``1e999`` as infinity and half a surrogate pair, raises
``RecursionError`` for deep nesting, and waits for ever on a FIFO. Standard library only: the writer process reads too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

MAX_BYTES = 256 << 20
"""Random states and indices of thousands of processes stay below."""
SEAL = "self_sha256"
"""Key of the hash of everything else in an object, over its canonical JSON: sorted keys, no spaces, ASCII."""


def read(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """The value in a file. Raises ``FileNotFoundError``, and ``ValueError`` with the reason for every other fault."""
    return parse(read_bytes(path, max_bytes))


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The same for a file that must hold an object."""
    value = read(path, max_bytes)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {_kind(value)}, not an object")
    return value


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file, or of what a link leads to. Never waits for a FIFO; raises as ``read`` does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            content = _content(descriptor, max_bytes)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        if path.is_symlink():
            raise FileNotFoundError(f"it is a link to {path.readlink()}, which does not exist") from None
        raise FileNotFoundError("it does not exist") from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    return content


def _content(descriptor: int, max_bytes: int) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"it is {_file_kind(found.st_mode)}, not a regular file")
    if found.st_size > max_bytes:
        raise ValueError(f"it has {found.st_size} bytes; at most {max_bytes} are read")
    content = bytearray()
    while piece := os.read(descriptor, min(max_bytes + 1 - len(content), 1 << 24)):
        content += piece
        if len(content) > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
    return bytes(content)


def parse(content: bytes | str) -> Any:
    """The value of a text in UTF-8. Raises ``ValueError`` with the reason."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no character") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    return value


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with a hash of itself as its last key; one that it had is replaced."""
    rest = {key: one for key, one in value.items() if key != SEAL}
    return rest | {SEAL: _digest(rest)}


def check_seal(value: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the object is what ``sealed`` returned."""
    if value.get(SEAL) != _digest({key: one for key, one in value.items() if key != SEAL}):
        raise ValueError(f"it has changed since it was written ({SEAL} differs)")


def _digest(value: Mapping[str, Any]) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in items:
        if name in found:
            raise ValueError(f"the key {name!r} comes twice")
        found[name] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    if math.isfinite(value := float(digits)):
        return value
    raise ValueError(f"the number {digits[:40]} is beyond every float")


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _file_kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
