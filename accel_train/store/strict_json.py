"""Read JSON from untrusted files: a regular file of bounded size, strict JSON, one exception to catch.

``json.load`` accepts duplicate keys, ``NaN``, ``1e999`` as infinity and lone surrogates, raises ``RecursionError`` on
deep nesting, and blocks forever on a FIFO. Standard library only, because the writer process imports it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

Json = dict[str, Any]
"""An object read from JSON, or to be written to it."""
MAX_BYTES = 256 << 20
"""Enough for random states and indices of thousands of processes."""
READ_BYTES = 1 << 24
NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
"""Errors of opening something other than a file, which no later attempt will read."""
SEAL = "self_sha256"
"""Key of an object's hash over its other keys as canonical JSON: sorted keys, no spaces, ASCII."""


class UnreadableError(ValueError):
    """A file cannot be read now, by an error of the disk, the network or permissions. Its content may be whole."""


def read(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value in a file. Raises ``FileNotFoundError``. Other faults raise ``ValueError`` with the reason."""
    return parse(read_bytes(path, max_bytes))


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> Json:
    """Read a file with an object at the top."""
    value = read(path, max_bytes)
    if not isinstance(value, dict):
        raise ValueError(f"it contains {_kind(value)}, not an object")
    return value


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file, following links. Never blocks on a FIFO.

    Raises like ``read``, with ``UnreadableError`` for a file that a later attempt may read.
    """
    try:
        # O_NONBLOCK opens a FIFO without waiting for a writer. O_NOCTTY keeps a terminal from becoming ours.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        descriptor = os.open(path, flags)
        try:
            content = _content(descriptor, max_bytes)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        if path.is_symlink():
            raise FileNotFoundError(f"it is a link to {path.readlink()}, which does not exist") from None
        raise FileNotFoundError("it does not exist") from None
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_FILE:
            raise ValueError(reason) from None
        raise UnreadableError(reason) from None
    return content


def _content(descriptor: int, max_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"it is {_file_kind(status.st_mode)}, not a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"it has {status.st_size} bytes; at most {max_bytes} are read")
    content = bytearray()
    # One byte more than allowed is asked for, so that a file over the limit is noticed.
    while piece := os.read(descriptor, min(max_bytes + 1 - len(content), READ_BYTES)):
        content += piece
        # The file may have grown since, and files in /proc report a size of 0.
        if len(content) > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
    return bytes(content)


def parse(content: bytes | str) -> Any:
    """Parse JSON, UTF-8 if bytes. Raises ``ValueError`` with the reason."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
        # Only an escape can give a lone surrogate. Encoding finds it.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it contains a lone surrogate, half of a character") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    return value


def json_sha256(value: Any, unread: tuple[str, ...] = ()) -> str:
    """Return the sha256 of a JSON value, whatever its key order, white space, ``unread`` keys and provenance."""
    text = json.dumps(without_provenance(value, unread), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def without_provenance(value: Any, unread: tuple[str, ...] = ()) -> Any:
    """Return a JSON value without ``unread`` keys and without those where libraries note the origin of a config."""
    if isinstance(value, list):
        return [without_provenance(each, unread) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    return {
        key: without_provenance(each, unread)
        for key, each in cast("dict[str, Any]", value).items()
        # The class of a pipeline is not provenance.
        if key not in unread and key != "transformers_version" and (key[:1] != "_" or key == "_class_name")
    }


def sealed(value: Mapping[str, Any]) -> Json:
    """Return the object with its own hash as the last key. An existing hash is replaced."""
    unsealed = _without_seal(value)
    return unsealed | {SEAL: _digest(unsealed)}


def check_seal(value: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the object is unchanged since ``sealed``."""
    if value.get(SEAL) != _digest(_without_seal(value)):
        raise ValueError(f"it has changed since it was written ({SEAL} differs)")


def _without_seal(value: Mapping[str, Any]) -> Json:
    return {key: item for key, item in value.items() if key != SEAL}


def _digest(value: Mapping[str, Any]) -> str:
    # One canonical form, so that a file rewritten with other spaces or key order keeps its hash.
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _unique_keys(items: list[tuple[str, Any]]) -> Json:
    result: Json = {}
    for key, value in items:
        if key in result:
            raise ValueError(f"the key {key!r} is given twice")
        result[key] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large for a float")
    return value


def _kind(value: Any) -> str:
    # type(), not isinstance(): a bool is an int.
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _file_kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"
