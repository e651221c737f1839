"""``accel-train data``: look through a dataset before a run, and manage the cache of entries computed from it."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.config import NonNegativeFloat, UsageError, expand_path
from accel_train.data import tensor_cache
from accel_train.data.artifacts import cache_directory
from accel_train.data.tensor_cache import Entry
from accel_train.options.loading import read_options

DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class CacheConfig:
    """Cache of entries computed from data."""

    cache_dir: str | None = None
    """Folder of the cache. None: $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train."""
    json: bool = False
    """Print JSON, for programs."""
    unused_days: NonNegativeFloat = 0.0
    """ls, clear: list or delete only entries that were not used for this many days."""


def check(path: str, arguments: Sequence[str]) -> int:
    """Check a dataset of pictures and print the report. Return 0 if it passed, else 1. Raises ``UsageError``."""
    from accel_train.domains.images.checking import check as pictures

    config = read_options(pictures.CheckConfig, arguments, f"accel-train data check {path}")
    report = pictures.check(path, config, cache_directory(config.cache_dir))
    if config.json:
        print(json.dumps(pictures.as_tree(report), indent=1, ensure_ascii=False))
    else:
        print("\n".join(pictures.render(report)))
    return 0 if report.passed else 1


def cache(action: str, arguments: Sequence[str]) -> int:
    """List, verify or clear the cache. Return 1 if `verify` found damaged entries, else 0. Raises ``UsageError``."""
    config = read_options(CacheConfig, arguments, f"accel-train data cache {action}")
    # A missing folder has no entries, and `cache_directory` would create it.
    if config.cache_dir is not None and not expand_path(config.cache_dir).is_dir():
        raise UsageError(
            f"--cache_dir {config.cache_dir!r}: {expand_path(config.cache_dir)} is not a folder; give the "
            "--data.cache_dir of the runs, or leave it out for the default"
        )
    root = cache_directory(config.cache_dir) / tensor_cache.ROOT
    used_before = time.time() - config.unused_days * DAY_SECONDS
    if action == "ls":
        if not config.unused_days:
            # Includes entries with a time in the future, by the clock of another machine.
            used_before = math.inf
        return _list(root, used_before, config.json)
    if action == "clear":
        return _clear(root, used_before, config.json)
    if config.unused_days:
        raise UsageError(
            f"unused_days: {config.unused_days:g}: verify hashes every entry, whenever it was last used; leave it "
            "out, or give it to ls or clear"
        )
    return _verify(root, config.json)


def _folders(root: Path, used_before: float) -> dict[Path, list[Entry]]:
    found: dict[Path, list[Entry]] = {}
    for entry in tensor_cache.entries(root):
        if entry.used <= used_before:
            # Inside a folder, entries are spread over subfolders with names of two letters.
            found.setdefault(entry.file.parents[1], []).append(entry)
    return found


def _list(root: Path, used_before: float, as_json: bool) -> int:
    by_folder = _folders(root, used_before)
    folders = [(folder, _about(folder), entries) for folder, entries in sorted(by_folder.items())]
    if as_json:
        rows: list[dict[str, Any]] = []
        for folder, about, entries in folders:
            size = sum(entry.size for entry in entries)
            used = max(entry.used for entry in entries)
            rows.append({"folder": str(folder), "entries": len(entries), "bytes": size, "used": used, "about": about})
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{root}")
    print(f"{'kind':<9} {'entries':>9} {'MiB':>9} {'unused days':>12}  computed with")
    for _, about, entries in folders:
        size = sum(entry.size for entry in entries) / 2**20
        unused = (time.time() - max(entry.used for entry in entries)) / DAY_SECONDS
        encoder = f"{about.get('source')} {about.get('revision') or ''} {str(about.get('weights'))[:12]}"
        print(f"{about.get('kind', '?'):<9} {len(entries):>9,} {size:>9.1f} {unused:>12.1f}  {encoder}")
    total = sum(entry.size for _, _, entries in folders for entry in entries)
    print(f"{total / 2**30:.2f} GiB in all")
    return 0


def _about(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / tensor_cache.ABOUT).read_text("utf-8"))
    except (OSError, ValueError):
        # A missing or damaged description hides no entries: they are listed with kind "?".
        return {}


def _verify(root: Path, as_json: bool) -> int:
    """Hash every entry, and delete damaged ones, which the next run computes again. Return 1 if there were any."""
    damaged: list[str] = []
    count = 0
    for entry in tensor_cache.entries(root):
        count += 1
        if not tensor_cache.is_intact(entry.file):
            damaged.append(str(entry.file))
            entry.file.unlink(missing_ok=True)
            if not as_json:
                print(f"damaged, deleted: {entry.file}")
    for doubted in root.glob(f"*/{tensor_cache.DOUBTED}"):
        # All entries were just verified, so the next run need not read all of them again.
        doubted.unlink(missing_ok=True)
    if as_json:
        print(json.dumps({"entries": count, "damaged": damaged}, indent=1))
    else:
        print(f"{count:,} entries, {len(damaged):,} damaged")
    return 1 if damaged else 0


def _clear(root: Path, used_before: float, as_json: bool) -> int:
    """Delete entries that no live run uses."""
    deleted, in_use = tensor_cache.clear(root, used_before)
    for folder in root.glob("*"):
        # Leases of live runs have a folder without entries, which must stay.
        if folder.is_dir() and folder.name != tensor_cache.LEASES and not any(folder.glob("??/*")):
            shutil.rmtree(folder, ignore_errors=True)
    size = sum(entry.size for entry in deleted)
    if as_json:
        print(json.dumps({"deleted": len(deleted), "bytes": size, "in_use": in_use}, indent=1))
        return 0
    print(f"{len(deleted):,} entries deleted, {size / 2**30:.2f} GiB")
    if in_use:
        print(f"{in_use:,} entries are kept: a live run uses them")
    return 0
