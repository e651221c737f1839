"""``accel-train checkpoints`` ls, verify, prune and push. Each command prints its result and returns the exit code.

No command needs a GPU. ls and verify do not import torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accel_train.commands.places import (
    Place,
    disk_bytes,
    find_place,
    find_run,
    is_gone,
)
from accel_train.config import UsageError
from accel_train.hub.queue import HubQueue
from accel_train.options.loading import from_tree
from accel_train.options.tree import option_names
from accel_train.store import commit, lock, retention, run_file
from accel_train.store import manifest as manifests
from accel_train.store.manifest import NAME
from accel_train.store.strict_json import UnreadableError
from accel_train.wording import readable_size

AGE_UNITS = (("d", 86400), ("h", 3600), ("min", 60))
STATE_CELLS = {None: "-", True: "yes", False: "no"}
# Capitals, because a damaged checkpoint should stand out in a long table.
VERIFIED_CELLS = {None: "sizes only", True: "yes", False: "NO"}


@dataclass(frozen=True)
class Row:
    """One checkpoint in the output of ``ls``. Its fields are those of the JSON."""

    name: str
    path: str
    step: int | None
    written_at: str | None
    age_seconds: float | None
    """By this machine's clock. None if the manifest has no valid date."""
    size_bytes: int
    metrics: Mapping[str, float]
    state: bool | None
    verified: bool | None
    """None with ``quick``, which hashes nothing."""
    reason: str | None
    """The reason for a failed verification."""
    pushed: str | None
    """``repository@revision``, ``queued``, or ``failed`` with the reason."""


def ls(place: str, *, as_json: bool = False, quick: bool = False) -> int:
    """Print a table, or JSON. Hashes every file, or with ``quick`` reads manifests and compares sizes only."""
    found = find_place(place)
    pushed = _push_states(found)
    rows = [_row(path, pushed.get(path.name), quick) for path in found.checkpoints]
    rows = [row for row in rows if not is_gone(Path(row.path))]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return 0
    if not rows:
        print(f"no checkpoints in {found.path}")
        return 0
    metric = _shown_metric(found, rows)
    header = ("name", "step", "age", "size", metric or "metric", "state", "verified", "pushed")
    best = run_file.best_of(found.run, found.checkpoints)
    _print_table([header, *(_cells(row, metric, is_best=row.path == str(best)) for row in rows)])
    for row in rows:
        if row.reason:
            print(f"{row.name}: {row.reason}")
    total_bytes = sum(row.size_bytes for row in rows)
    print(f"{len(rows)} checkpoint(s), {readable_size(total_bytes)}")
    return 0


def _row(path: Path, pushed: str | None, quick: bool) -> Row:
    manifest, reason = _read(path, quick)
    written_at = manifest.get("written_at")
    row = Row(
        name=path.name,
        path=str(path),
        step=_step_in_name(path),
        written_at=written_at if isinstance(written_at, str) else None,
        age_seconds=_age_seconds(written_at),
        size_bytes=disk_bytes(path),
        metrics={},
        state=None,
        verified=_verified(reason, quick),
        reason=reason,
        pushed=pushed,
    )
    # A damaged checkpoint keeps its row, with the reason.
    if "files" not in manifest:  # unreadable
        return row
    held = manifests.facts_from_manifest(path, manifest)
    return replace(row, step=held.step, metrics=held.metrics, state=held.state)


def _step_in_name(path: Path) -> int | None:
    if match := NAME.fullmatch(path.name):
        return int(match[1])
    return None


def _verified(reason: str | None, quick: bool) -> bool | None:
    if reason:
        return False
    if quick:  # right sizes prove nothing about the contents
        return None
    return True


def _read(path: Path, quick: bool) -> tuple[Mapping[str, Any], str | None]:
    """Return the manifest, empty if it is unreadable, and the reason for a failed verification."""
    manifest = manifests.read_if_valid(path)
    if quick and manifest is not None:
        return manifest, _wrong_size(path, manifest["files"])
    try:
        return commit.verify(path).manifest, None
    except ValueError as error:
        return manifest or {}, _without_path(error, path)


def _wrong_size(path: Path, files: Mapping[str, Any]) -> str | None:
    for name, facts in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != facts.get("size"):
            return f"{name} has {size} bytes, the manifest says {facts.get('size')}"
    return None


def _without_path(error: Exception, path: Path) -> str:
    """Return the message without the path, which is already on the line."""
    return str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/")


def _age_seconds(written_at: object) -> float | None:
    try:
        written = datetime.strptime(str(written_at), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    # The clock of the machine that wrote it may be ahead of this one.
    return max(0.0, time.time() - written.timestamp())


def _push_states(found: Place) -> dict[str, str]:
    """Return the state of each checkpoint in the run's Hub queue."""
    if found.run is None:
        return {}
    queue = HubQueue(found.run)
    states = {name: f"{record.get('repo_id')}@{record.get('revision')}" for name, record in queue.pushed().items()}
    # A checkpoint that is queued again is queued, whatever happened to it before.
    for name, reason in queue.failed().items():
        states[name] = f"failed: {reason}"
    for name in queue.names():
        states[name] = "queued"
    return states


def _shown_metric(found: Place, rows: Sequence[Row]) -> str | None:
    """Return ``checkpoints.best_metric`` of the run, or else the first metric of the newest checkpoint with any."""
    best, _ = run_file.best_metric(found.run)
    if any(best in row.metrics for row in rows):
        return best
    for row in reversed(rows):  # newest first
        for name in row.metrics:
            return name
    return None


def _cells(row: Row, metric: str | None, *, is_best: bool) -> tuple[str, ...]:
    value = _readable_metric(row.metrics.get(metric or ""))
    return (
        row.name,
        "-" if row.step is None else str(row.step),
        _readable_age(row.age_seconds),
        readable_size(row.size_bytes),
        f"{value} best" if is_best else value,
        STATE_CELLS[row.state],
        VERIFIED_CELLS[row.verified],
        row.pushed or "-",
    )


def _readable_metric(value: object) -> str:
    if isinstance(value, (int, float)):
        return f"{value:.5g}"
    return "-"


def _readable_age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, unit_seconds in AGE_UNITS:
        if seconds >= unit_seconds:
            return f"{seconds / unit_seconds:.1f} {unit}"
    return f"{seconds:.0f} s"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def verify(place: str) -> int:
    """Hash every file of one checkpoint, or of all of a run. Return 1 if one is damaged or cannot be read now."""
    found = find_place(place)
    if not found.checkpoints:
        raise UsageError(f"{found.path}: contains no checkpoint to verify; name a run with a saved checkpoint")
    damaged = 0
    for path in found.checkpoints:
        try:
            checkpoint = commit.verify(path)
        except ValueError as error:
            if is_gone(path):
                continue
            damaged += 1
            label = "DAMAGED "
            if isinstance(error, UnreadableError):
                label = "UNREADABLE"
            print(f"{label} {path.name}  {_without_path(error, path)}", flush=True)
            continue
        files = checkpoint.manifest["files"]
        size = sum(int(facts["size"]) for facts in files.values())
        print(f"ok       {path.name}  {len(files)} files, {readable_size(size)}", flush=True)
        # Not damage, but whoever relies on such a file should know that it was not verified.
        extra = commit.unlisted(checkpoint)
        if extra:
            print(f"         not in its manifest, and so not verified: {', '.join(extra)}")
    return 1 if damaged else 0


def prune(run: str, *, dry_run: bool = False, flags: Mapping[str, Any] | None = None) -> int:
    """Apply retention to a run while it is not training. Return 1 if a deletion failed.

    ``flags`` override options of ``CheckpointConfig`` in config.yaml. None values are ignored. Hashes every
    checkpoint. Deletes nothing unless a checkpoint verifies, and never one newer than the newest verified.
    """
    place, directory = find_run(run)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    keep = _keep_options(place, directory, given)
    # A dry run deletes nothing, so it may also look at a run in training.
    with _lock_held(directory, needed=not dry_run) as is_idle:
        plan, left_alone = _plan(directory, keep, is_idle=is_idle)
        freed = {path: disk_bytes(path) for path in plan.remove}  # before `apply` deletes them
        freed |= {path: _state_bytes(path) for path in plan.strip}
        done = plan if dry_run else retention.apply(plan)
    _print_plan(done, {**plan.reasons, **left_alone}, freed, dry_run)
    return 1 if done.failed else 0


def _plan(run: Path, keep: retention.Keep, *, is_idle: bool) -> tuple[retention.Plan, dict[str, str]]:
    """Return the plan, and what it leaves alone, each with the reason: damaged checkpoints and unfinished saves.

    With ``is_idle``, no process writes to the run, and unfinished saves are removed as well.
    """
    verified, damaged, unreadable = retention.survey(run / "checkpoints", {})
    if not verified:
        raise UsageError(f"{run}: no checkpoint verifies, so nothing is deleted; see `verify`")
    _refuse_unknown_metric(keep, verified)
    # A run deletes damaged checkpoints after it has committed newer ones. Here nothing was committed, and a damaged
    # newest checkpoint may be all that is left of the last hours.
    newest = verified[-1].step
    later = [path for path in damaged if retention.step_of(path) > newest]
    left_alone = dict.fromkeys((path.name for path in later), "damaged, newer than the newest that verifies")
    old = [path for path in damaged if path not in later]
    # The queue holds names only, so deleting a checkpoint would cancel its push at the next start.
    queued = HubQueue(run).names()
    plan = retention.plan(verified, old, keep, newest=newest, busy=queued, unreadable=unreadable)
    unfinished = retention.leftovers(run / "checkpoints", newest)
    if is_idle:
        return replace(plan, remove=(*plan.remove, *unfinished)), left_alone
    reason = "unfinished, maybe in progress: the run is in use, or its file system has no locks"
    return plan, left_alone | dict.fromkeys((path.name for path in unfinished), reason)


def _keep_options(place: Place, run: Path, flags: dict[str, Any]) -> retention.Keep:
    """Merge the flags into the run's options and check them as at the start of training."""
    from accel_train.checkpoints.policy import CheckpointConfig

    saved = _known_options(run, "checkpoints", CheckpointConfig)
    if not saved and "keep_last" not in flags:
        raise UsageError(f"{run}: has no config.yaml with retention options; give --keep_last and the like")
    names = sorted(path.name for path in place.checkpoints)
    pinned = flags.get("pinned", ())
    for name in pinned:
        if name not in names:
            raise UsageError(f"--pinned {name}: there is no such checkpoint; {run} has {', '.join(names) or 'none'}")
    merged = saved | flags
    # Pins add up: naming one more on the command line must not release those of the config.
    merged["pinned"] = [*(saved.get("pinned") or ()), *pinned]
    return from_tree(CheckpointConfig, merged, f"checkpoints of {run}")


def _known_options(run: Path, group: str, config: type[Any]) -> dict[str, Any]:
    """Return the saved options that ``config`` still has."""
    known = option_names(config)
    return {name: value for name, value in run_file.options_of(run, group).items() if name in known}


def _refuse_unknown_metric(keep: retention.Keep, verified: Iterable[manifests.CheckpointFacts]) -> None:
    names = sorted({name for one in verified for name in one.metrics})
    if keep.keep_best > 0 and keep.best_metric not in names:
        raise UsageError(
            f"best_metric: {keep.best_metric!r} is in no checkpoint of this run, so none would be kept as the best; "
            f"they have {', '.join(names) or 'no metrics'}; give one of these with --best_metric, or --keep_best 0"
        )


def _state_bytes(path: Path) -> int:
    total = disk_bytes(path / "optimizer")
    random_states = path / "trainer_state.json"
    if random_states.is_file():
        total += random_states.stat().st_size
    return total


def _print_plan(done: retention.Plan, kept: Mapping[str, str], freed: Mapping[Path, int], dry_run: bool) -> None:
    lines = {path.name: ("remove", readable_size(freed[path])) for path in done.remove}
    for name, reason in kept.items():
        lines[name] = ("keep", reason)
    for path in done.strip:
        lines[path.name] = ("strip", f"{kept[path.name]}; its optimizer state is deleted, {readable_size(freed[path])}")
    for name, reason in done.failed.items():
        lines[name] = ("FAILED", reason)
    names = sorted(lines, key=lambda name: (len(name), name))  # by step, beyond eight digits too
    _print_table([(name, *lines[name]) for name in names])
    freed_bytes = sum(size for path, size in freed.items() if path.name not in done.failed)
    counts = f"{len(done.remove)} to remove, {len(done.strip)} to strip of their optimizer state"
    if dry_run:
        print(f"{counts}: {readable_size(freed_bytes)} would be freed; nothing was touched")
    else:
        print(f"{counts}: {readable_size(freed_bytes)} freed")


@contextmanager
def _lock_held(run: Path, *, needed: bool) -> Generator[bool]:
    """Hold the lock of the run, as training does, so that nothing is deleted while another process reads it.

    Yields True if it is certain that no other process holds it.
    """
    if not needed:
        yield lock.is_free(run)
        return
    try:
        held = lock.acquire(run, " (accel-train checkpoints prune)")
    except lock.LockedError as holder:
        raise UsageError(
            f"{run} is in use by {holder}, which applies retention itself; end it first, or preview with --dry-run"
        ) from None
    except OSError as error:
        raise UsageError(f"{run}: cannot be written ({error.strerror}); prune as a user with write access") from None
    try:
        yield held.is_exclusive
    finally:
        held.release()


def push(place: str, flags: Mapping[str, Any]) -> int:
    """Push a checkpoint, or all waiting checkpoints of a run, in the foreground. Return 1 if the Hub is unreachable.

    ``flags`` override options of ``HubConfig`` in config.yaml. None values are ignored.
    """
    from accel_train.hub.errors import HubError
    from accel_train.hub.options import HubConfig
    from accel_train.hub.push_now import push_now

    found = find_place(place)
    # A single one may be given as RUN@STEP, and RUN/checkpoints stands for the run.
    source = found.checkpoints[0] if found.single else found.run or found.path
    options: dict[str, Any] = {}
    if found.run is not None:
        options = _known_options(found.run, "hub", HubConfig)
    for name in option_names(HubConfig):
        if flags.get(name) is not None:
            options[name] = flags[name]
    config = from_tree(HubConfig, options, f"hub options of {found.path}")
    try:
        urls = push_now(source, config)
    except HubError as error:
        print(f"not pushed: {error}")
        return 1
    print("\n".join(urls))
    return 0
