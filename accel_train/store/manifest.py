"""``manifest.json``: required fields, its own hash, and one strict reader.

Types, bounds and names are checked before use. A flipped bit, a torn file or a foreign file then counts as damage, and
the previous checkpoint is used. Standard library only.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train.store import strict_json
from accel_train.store.strict_json import Json

SCHEMA = 2
"""The only version that is read. A file contains its own hash."""
MANIFEST = "manifest.json"
NAME = re.compile(r"checkpoint_(\d{8,})")

# Bounds on untrusted input, far beyond any real checkpoint.
MAX_BYTES = 64 << 20
MAX_STEP = 10**15
MAX_FILES = 1_000_000
MAX_DEPTH = 16
"""Maximum number of nested folders. Recipes use two or three, below ``assets/``."""
MAX_INT64 = 2**63
"""Bound of whole numbers. Other JSON readers lose precision or fail beyond it."""


class OtherStepError(ValueError):
    """An intact manifest has a different step from its directory's name, as in a renamed copy."""


def checkpoint_name(step: int) -> str:
    """Build a name such as ``checkpoint_00001200``. Sorting the names as text sorts them by step."""
    return f"checkpoint_{step:08d}"


def sealed(manifest: Mapping[str, Any]) -> Json:
    """Return the manifest with the current schema and its own hash, ready to be written."""
    # The schema comes first in the file, for people who read it.
    rest = {key: value for key, value in manifest.items() if key != "schema"}
    return strict_json.sealed({"schema": SCHEMA} | rest)


def read(directory: Path) -> Json:
    """Read the manifest of a checkpoint directory. Raises ``ValueError`` with the path and the reason."""
    return read_with_text(directory)[0]


def read_with_text(directory: Path) -> tuple[Json, bytes]:
    """Read the manifest, and return it with the exact bytes of the file."""
    file = directory / MANIFEST
    try:
        content = strict_json.read_bytes(file, MAX_BYTES)
        manifest = parse(content)
    except FileNotFoundError as error:
        problem = f"no {MANIFEST}"
        if file.is_symlink():  # the file is there, its target is not
            problem = f"{MANIFEST} cannot be read ({error})"
        raise ValueError(f"{directory}: {problem}, so it is not a committed checkpoint") from None
    except strict_json.UnreadableError as error:
        raise strict_json.UnreadableError(f"{directory}: {MANIFEST} cannot be read now: {error}") from None
    except ValueError as error:
        raise ValueError(f"{directory}: {MANIFEST} cannot be read ({error})") from None
    # Order and retention go by the name, so it must not lie about the step.
    match = NAME.fullmatch(directory.name)
    if match and checkpoint_name(manifest["step"]) != directory.name:
        problem = f"its step is {manifest['step']}, but the directory's name says {int(match[1])}"
        raise OtherStepError(f"{directory}: {MANIFEST} cannot be read ({problem})")
    return manifest, content


def is_checkpoint(directory: Path) -> bool:
    """Return True for a checkpoint, damaged or not, by its name or its manifest. Other programs write manifests too.

    A manifest that cannot be read counts, because it may belong to a checkpoint.
    """
    if NAME.fullmatch(directory.name):
        return True
    try:
        content = strict_json.read_bytes(directory / MANIFEST, MAX_BYTES)
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    # Searched in the bytes, because a damaged manifest may not be JSON. A flipped bit leaves one of the two keys.
    return any(f'"{key}"'.encode() in content for key in ("accel_train", strict_json.SEAL))


def parse(content: bytes) -> Json:
    """Parse and check a manifest. Raises ``ValueError`` with the reason."""
    manifest = strict_json.parse(content)
    if not isinstance(manifest, dict):
        raise ValueError("it contains no object")
    schema = manifest.get("schema")
    # `type` and not `isinstance`: in Python `True` is an int, and in JSON it is not.
    if type(schema) is not int or schema != SCHEMA:
        writer = manifest.get("accel_train", "of an unknown version")
        raise ValueError(f"schema {schema!r} was written by accel_train {writer}; this one reads {SCHEMA}")
    strict_json.check_seal(manifest)
    for key, (required, is_valid) in _FIELDS.items():
        if key in manifest:
            if not is_valid(manifest[key]):
                raise ValueError(f"{key} is {_shorten(manifest[key])}; {required} is required")
        elif key in REQUIRED:
            raise ValueError(f"it has no {key!r}")
    _check_files(manifest["files"])
    return manifest


def _check_files(files: Mapping[str, Any]) -> None:
    """Check that every name stays inside the checkpoint and that every file has a size and a hash."""
    if not files:
        raise ValueError("it lists no files")
    if len(files) > MAX_FILES:
        raise ValueError(f"it lists {len(files)} files; at most {MAX_FILES} are read")
    for name, facts in files.items():
        if not is_safe_name(name):
            raise ValueError(f"it lists {_shorten(name)}, which is not a valid file name in a checkpoint")
        if not _is_file(facts):
            raise ValueError(f"files: {name} has no size and sha256, but {_shorten(facts)}")


def is_safe_name(name: str) -> bool:
    """Return True for a name that a file of a checkpoint can have, relative to its directory."""
    # The manifest cannot hold the hash of the file that it is itself.
    if name == MANIFEST or not name.isprintable():
        return False
    parts = name.split("/")
    if len(parts) > MAX_DEPTH:
        return False
    # An empty part is an absolute path or a doubled slash; ".." would lead out of the checkpoint.
    return not any(part in ("", ".", "..") for part in parts)


def _is_whole(value: Any, maximum: int = MAX_INT64) -> bool:
    return type(value) is int and 0 <= value <= maximum


def _is_number(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) <= MAX_INT64


def _is_step(value: Any) -> bool:
    return _is_whole(value, MAX_STEP)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 10_000


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_number(metric) for metric in value.values())


def _is_base(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_text(value.get("source")):
        return False
    files = value.get("files")
    if not isinstance(files, dict) or not files:
        return False
    return all(_is_file(facts) for facts in files.values()) and _is_definition(value.get("definition", {}))


def _is_embedded_base(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("source")) and _is_definition(value.get("definition"))


def _is_hub_base(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("source")) and _is_text(value.get("revision"))


def _is_definition(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_sha256(digest) for digest in value.values())


def _is_file(facts: Any) -> bool:
    if not isinstance(facts, dict):
        return False
    return _is_whole(facts.get("size")) and _is_sha256(facts.get("sha256"))


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_grown(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_is_positive, pair)) for pair in value
    )


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": (f"a whole number from 0 to {MAX_STEP}", _is_step),
    "files": ("an object", _is_object),
    "accel_train": ("a text", _is_text),
    "run_id": ("a text", _is_text),
    "samples_seen": ("a whole number from 0", _is_whole),
    "epoch": ("a finite number from 0", _is_amount),
    "state": ("true or false", _is_bool),
    "world_size": ("a whole number from 1", _is_positive),
    "written_at": ("a text", _is_text),
    "seconds": ("a finite number from 0", _is_amount),
    "layout": ("an object", _is_object),
    "experiment": ("an object", _is_object),
    "resolved": ("an object", _is_object),
    "metrics": ("finite numbers by name", _is_metrics),
    "buffers": ("names", _is_names),
    "grown": ("pairs of a step and a size", _is_grown),
    "base": ("a source, files with their size and sha256, and a definition with sha256", _is_base),
    "embedded_base": ("a source, and a definition with sha256", _is_embedded_base),
    "hub_base": ("a source and a revision", _is_hub_base),
}
REQUIRED = ("step", "files")


def committed(directory: Path) -> list[tuple[int, Path]]:
    """List the checkpoints in ``directory`` with their steps, sorted by step and never by time.

    Raises ``UnreadableError`` if the directory cannot be listed now, as on a network disk that is away.
    """
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = error.strerror or str(error)
        raise strict_json.UnreadableError(f"{directory}: cannot be read now: {reason}") from None
    found: list[tuple[int, Path]] = []
    for path in entries:
        match = NAME.fullmatch(path.name)
        # A file with such a name is foreign. The commit sets it aside.
        if match and _may_be_directory(path):
            found.append((int(match.group(1)), path))
    return sorted(found)


def _may_be_directory(path: Path) -> bool:
    """Return True for a directory, and for an entry that cannot be inspected now: `verify` then gives the reason."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno not in strict_json.NO_FILE


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint directory and its manifest."""

    path: Path
    step: int
    manifest: Mapping[str, Any]

    def file(self, name: str) -> Path:
        """Return the path of one of its files."""
        return self.path / name

    def json(self, name: str) -> Any:
        """Read one of its JSON files. Raises ``ValueError``."""
        try:
            return strict_json.read(self.file(name))
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{self.file(name)} cannot be read ({error})") from None


@dataclass(frozen=True)
class CheckpointFacts:
    """Facts about one checkpoint for retention and for the choice of the best one."""

    path: Path
    step: int
    epoch: float = math.nan
    """NaN if the manifest has none. A window of epochs then never keeps the checkpoint."""
    metrics: Mapping[str, Any] = field(default_factory=Json)
    state: bool = True
    """True if the manifest lists optimizer state."""
    leftover: bool = False
    """True if unlisted state files remain: an earlier strip was interrupted after it had replaced the manifest."""


def list_facts(directory: Path) -> list[CheckpointFacts]:
    """List checkpoints with a readable manifest, oldest first. Hashes nothing."""
    found: list[CheckpointFacts] = []
    for _, path in committed(directory):
        manifest = read_if_valid(path)
        if manifest is not None:
            found.append(facts_from_manifest(path, manifest))
    return found


def facts_from_manifest(path: Path, manifest: Mapping[str, Any]) -> CheckpointFacts:
    """Extract the facts from one manifest."""
    match = NAME.fullmatch(path.name)
    has_state = any(name.startswith("optimizer/") for name in manifest["files"])
    return CheckpointFacts(
        path,
        int(match[1]) if match else manifest["step"],  # by name, like the order of `committed`
        epoch=float(manifest.get("epoch", math.nan)),
        metrics=manifest.get("metrics", {}),
        state=bool(manifest.get("state", has_state)),
        leftover=not has_state and any((path / "optimizer").glob("*")),
    )


def read_if_valid(path: Path) -> Json | None:
    """Read a manifest, or return None if it is damaged. ``commit.verify`` then gives the reason."""
    try:
        return read(path)
    except ValueError:
        return None


def ranked(past: Sequence[CheckpointFacts], metric: str | None, mode: str) -> list[CheckpointFacts]:
    """Return the checkpoints of ``past`` with a finite ``metric``, best first. Of equal ones, the earlier is better."""
    finite: list[tuple[float, CheckpointFacts]] = []
    for facts in past:
        value = _metric(facts, metric)
        if value is not None:
            finite.append((value, facts))
    sign = -1.0 if mode == "max" else 1.0
    # A later one with the same metric is no improvement. Early stopping and `hub.push best` count in the same way.
    finite.sort(key=lambda pair: (sign * pair[0], pair[1].step))
    return [facts for _, facts in finite]


def _metric(facts: CheckpointFacts, name: str | None) -> float | None:
    if name is None:
        return None
    value = facts.metrics.get(name)
    # A bool is an int, but not a metric.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
