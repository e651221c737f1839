"""Pretrained files of a model, by reference: a checkpoint then holds only trained tensors.

Besides the hashes of the weights, a reference has those of the files that define their use, such as configs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accel_train.config import UsageError, expand_path
from accel_train.store import atomic_files, strict_json

# hashlib releases the GIL, so threads hash in parallel.
THREADS = min(8, os.cpu_count() or 1)
SHA256 = re.compile("[0-9a-f]{64}")
COMMIT = re.compile("[0-9a-f]{40}")
COARSE_SECONDS = 5.0
"""Longer than the resolution of file times on any file system."""
PARSED = ("config.json", "model_index.json")
"""Name endings of files that are compared by their JSON content instead of their bytes."""
MAX_PARSED_BYTES = 4 << 20
Options = TypeVar("Options", bound=Any)
"""A dataclass with ``source`` and ``revision`` of a base."""


@dataclass(frozen=True)
class TrainedBase:
    """Model on the Hub whose parameters are all trained. Checkpoints hold them, and record the commit they came from.

    Every start reads the model's other files again.
    """

    source: str
    """Hub id, as given by the user."""
    revision: str
    """Commit."""


@dataclass(frozen=True)
class PretrainedBase:
    """Files with the weights of a pretrained model."""

    source: str
    """Hub id or path, as given by the user."""
    directory: Path
    files: tuple[str, ...]
    """Names in ``directory`` of all files with frozen parameters."""
    revision: str | None = None
    """Commit on the Hub."""
    definition: tuple[str, ...] = ()
    """Names in ``root`` of all other files that the run depends on, such as configs, and weights that are used but
    not part of the model."""
    root: Path | None = None
    """None: ``directory``."""
    unread: tuple[str, ...] = ()
    """Keys of JSON objects in ``definition`` that no run depends on."""

    def reference(self, cache: Path | None = None) -> dict[str, Any]:
        """Return the source, the revision, and the size and sha256 of each file. Reads every byte, in threads.

        The key ``definition``, if the base has one, maps each of its files to a sha256, for a config that of its JSON.
        ``cache`` is a directory of remembered hashes: an unchanged file is not read again. Raises ``UsageError`` for a
        missing file.
        """
        root = self.root or self.directory
        missing = [name for name in self.files if not (self.directory / name).is_file()]
        missing += [name for name in self.definition if not (root / name).is_file()]
        if missing or not self.files:
            raise UsageError(
                f"the base {self.source}: {self.directory} has no {missing[0] if missing else 'weights'}; download "
                "it again, or give the model's source as it was"
            )
        with ThreadPoolExecutor(THREADS) as pool:
            facts = list(pool.map(partial(self._facts, cache), self.files))
            digests = list(pool.map(lambda name: self._digest(cache, root / name), self.definition))
        reference: dict[str, Any] = {"source": self.source, "revision": self.revision}
        reference["files"] = dict(zip(self.files, facts, strict=True))
        if self.definition:
            reference["definition"] = dict(zip(self.definition, digests, strict=True))
        return reference

    def _facts(self, cache: Path | None, name: str) -> dict[str, Any]:
        path = self.directory / name
        return {"size": path.stat().st_size, "sha256": sha256_of(path, cache)}

    def _digest(self, cache: Path | None, path: Path) -> str:
        if path.name.endswith(PARSED):
            # If the file is not JSON, its reader reports that.
            with suppress(ValueError):
                return strict_json.json_sha256(strict_json.read(path, MAX_PARSED_BYTES), self.unread)
        return sha256_of(path, cache)


def sha256_of(path: Path, cache: Path | None) -> str:
    """Return the sha256 of a file: ``remembered_sha256``, or read without a cache."""
    return _sha256(path) if cache is None else remembered_sha256(path, cache)


def remembered_sha256(path: Path, cache: Path) -> str:
    """Return the sha256 of a file, from ``cache`` if its size, times and inode are unchanged.

    A program can set the time of modification, but not the time of change, and writing changes both. A file changed in
    the last seconds is hashed again: its times may be too coarse to tell.
    """
    # Follow links, as in the Hub's cache.
    real = path.resolve()
    identity = _identity(real)
    entry = cache / "sha256" / f"{hashlib.sha256(str(real).encode()).hexdigest()}.json"
    # A damaged entry counts as missing.
    with suppress(OSError, ValueError, KeyError, TypeError):
        remembered: Any = json.loads(entry.read_text("utf-8"))
        if remembered["file"] == identity and SHA256.fullmatch(remembered["sha256"]):
            return remembered["sha256"]
    digest = _sha256(real)
    facts = real.stat()
    is_old = time.time() - max(facts.st_mtime, facts.st_ctime) > COARSE_SECONDS
    # Not if the file changed while it was read.
    if is_old and _identity(real) == identity:
        # Without it the next start reads the file again, which is no reason to fail.
        with suppress(OSError):
            entry.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.replace_json(entry, {"file": identity, "sha256": digest})
    return digest


def _identity(path: Path) -> list[Any]:
    facts = path.stat()
    return [str(path), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def at_recorded_revision(options: Options, recorded: Mapping[str, Any] | None) -> Options:
    """Return the options of a base with the commit recorded by a checkpoint, if the source is the same.

    A branch moves on, but the checkpoint belongs to the commit that its run began with.
    """
    if recorded is None or options.source is None:
        return options
    source = recorded["source"]
    # A checkpoint on the Hub has its commit in the source.
    if source.startswith("hub:") and source.partition("@")[0] == options.source.partition("@")[0]:
        return replace(options, source=source)
    if options.source != source or recorded.get("revision") is None:
        return options
    return replace(options, revision=recorded["revision"])


def refuse_other_base(recorded: Mapping[str, Any], current: Mapping[str, Any] | None, checkpoint: Path) -> None:
    """Raise ``UsageError`` unless ``current`` has exactly the files of the checkpoint's base, and the same definition.

    Their location may differ: only names and contents count.
    """
    refuse_other_weights(recorded, current, checkpoint)
    assert current is not None, "refused above"
    refuse_other_definition(recorded, current, checkpoint)


def refuse_other_definition(recorded: Mapping[str, Any], current: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise ``UsageError`` if the configs and other files that define the base have changed.

    Does nothing unless both references have such files.
    """
    expected = recorded.get("definition")
    found = current.get("definition")
    if expected is None or found is None:
        return
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if not names:
        return
    name = names[0]
    if name not in found:
        difference = f"has no {name}"
    elif name not in expected:
        difference = f"has {name}, which it did not have before"
    else:
        difference = f"has another {name} (sha256 {found[name][:12]}, not {expected[name][:12]})"
    raise UsageError(
        f"{checkpoint}: its base is {_describe(recorded)}, and {_describe(current)} {difference}; give the base that "
        "it was trained on, with the same file, or start a new run from another"
    )


def refuse_other_weights(recorded: Mapping[str, Any], current: Mapping[str, Any] | None, checkpoint: Path) -> None:
    """Raise ``UsageError`` unless ``current`` has exactly the files of the checkpoint's frozen parameters."""
    named = f"{checkpoint}: its frozen weights are those of {_describe(recorded)}"
    if current is None:
        raise UsageError(f"{named}, but this model was built without a base; build it from that base")
    expected = recorded["files"]
    found = current["files"]
    changed = [name for name in expected if name in found and found[name]["sha256"] != expected[name]["sha256"]]
    absent = [name for name in expected if name not in found]
    # Shards beside a single file may be read in its place.
    added = [name for name in found if name not in expected]
    if not changed and not absent and not added:
        return
    if absent:
        difference = f"has no {absent[0]}"
    elif added:
        difference = f"has {added[0]}, which it did not have before"
    else:
        name = changed[0]
        difference = f"has another {name} (sha256 {found[name]['sha256'][:12]}, not {expected[name]['sha256'][:12]})"
    raise UsageError(
        f"{named}, and {_describe(current)} {difference}; give the base that it was trained on, or start a new run "
        "from another"
    )


def _describe(reference: Mapping[str, Any]) -> str:
    revision = reference.get("revision")
    return str(reference["source"]) + (f" at revision {revision}" if revision else "")


def looks_like_path(source: str) -> bool:
    """Return True if ``source`` cannot be a Hub id (``name`` or ``owner/name``), or begins with ``runs/``."""
    return source.startswith((".", "/", "~", "$", "runs/")) or source.count("/") > 1 or source.endswith("/")


def refuse_missing_folder(
    option: str, source: str, recorded: Mapping[str, Any] | None = None, checkpoint: Path | None = None
) -> None:
    """Raise ``UsageError`` if ``source``, the value of ``option``, means a local folder and there is none.

    Other libraries would take it for a Hub id. ``recorded`` is the reference to the base in ``checkpoint``, the one
    to resume from.
    """
    wanted = expand_path(source)
    if wanted.is_file():
        raise UsageError(
            f"{option} {source!r}: is a file, but a folder as save_pretrained writes it, or a Hub id, is required. A "
            "checkpoint in a single file is converted by from_single_file of diffusers' pipelines and "
            "save_pretrained."
        )
    # A folder is recorded with its absolute path, a Hub id as it is.
    was_folder = recorded is not None and recorded["source"] == str(wanted)
    if Path(source).is_dir() or not (looks_like_path(source) or was_folder):
        return
    if wanted.is_dir():
        raise UsageError(f"{option} {source!r}: is not expanded; write the folder in full: {option} {wanted}")
    missing = f"{option} {source!r}: the base is a local folder, but {wanted} is not there."
    if checkpoint is None:
        raise UsageError(f"{missing} Put it there, or give {option} the right folder or a Hub id such as owner/name.")
    remedy = f"Put it back, or give its new location: {option} FOLDER --allow {option.removeprefix('--')}"
    if recorded is None:
        raise UsageError(f"{missing} {checkpoint} holds the weights and records no files of the base. {remedy}.")
    raise UsageError(
        f"{missing} {checkpoint} records source {recorded['source']}, revision {recorded.get('revision')}, "
        f"{_describe_files(recorded['files'])}. {remedy}, with the same files. With --checkpoints.base embed, "
        "checkpoints of a new run hold the weights of the base and load without it."
    )


def _describe_files(files: Mapping[str, Any]) -> str:
    named = [f"{name} with sha256 {facts['sha256']}" for name, facts in files.items()]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return ", ".join(named[:3]) + more
