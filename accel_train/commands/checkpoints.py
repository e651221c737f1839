"""``accel-train checkpoints`` ls, verify, prune and push: each prints what it found and returns its exit code.

None of them needs a GPU; ls and verify do not even import torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accel_train.commands.places import Place, disk_bytes, find_place, find_run, readable_size
from accel_train.config import UsageError, from_tree, option_names, read_tree
from accel_train.hub.queue import HubQueue
from accel_train.store import commit, lock, retention


@dataclass(frozen=True)
class Row:
    """What ``ls`` says of one checkpoint. Also its JSON."""

    name: str
    path: str
    step: int | None
    written_at: str | None
    age_seconds: float | None
    """By this machine's clock; None where the manifest does not say when it was written."""
    size_bytes: int
    metrics: Mapping[str, float]
    state: bool | None
    verified: bool | None
    """None where it was not asked for."""
    reason: str | None
    """Why it does not verify."""
    pushed: str | None
    """``repository@revision``, or ``queued``, or ``failed`` with the reason."""


def ls(place: str, *, as_json: bool = False, quick: bool = False) -> int:
    """Print a table, or JSON. Hashes every checkpoint unless ``quick``, which reads manifests and looks at sizes."""
    found = find_place(place)
    pushed = _pushed(found)
    rows = [_row(path, pushed.get(path.name), quick) for path in found.checkpoints]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return 0
    if not rows:
        print(f"no checkpoints in {found.path}")
        return 0
    metric = _metric_to_show(found, rows)
    header = ("name", "step", "age", "size", metric or "metric", "state", "verified", "pushed")
    _print_table([header, *(_cells(row, metric) for row in rows)])
    for row in rows:
        if row.reason:
            print(f"{row.name}: {row.reason}")
    print(f"{len(rows)} checkpoint(s), {readable_size(sum(row.size_bytes for row in rows))}")
    return 0


def _row(path: Path, pushed: str | None, quick: bool) -> Row:
    manifest, reason = _read(path, quick)
    written = manifest.get("written_at")
    held = retention.held_from(path, manifest) if "files" in manifest else None
    match = commit.NAME.fullmatch(path.name)
    return Row(
        name=path.name,
        path=str(path),
        step=held.step if held else int(match[1]) if match else None,
        written_at=written if isinstance(written, str) else None,
        age_seconds=_age_seconds(written),
        size_bytes=disk_bytes(path),
        metrics=held.metrics if held else {},
        state=held.state if held else None,
        verified=False if reason else None if quick else True,
        reason=reason,
        pushed=pushed,
    )


def _read(path: Path, quick: bool) -> tuple[Mapping[str, Any], str | None]:
    """The manifest, as far as there is one, and why the checkpoint does not verify."""
    manifest = retention.read_manifest(path)
    if quick and manifest is not None:
        return manifest, _sizes_differ(path, manifest["files"])
    try:
        return commit.verify(path).manifest, None
    except ValueError as error:
        return manifest or {}, _short(error, path)


def _sizes_differ(path: Path, files: Mapping[str, Any]) -> str | None:
    for name, facts in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (path / name).stat().st_size != facts.get("size"):
            return f"{name} has {(path / name).stat().st_size} bytes, the manifest says {facts.get('size')}"
    return None


def _short(error: Exception, path: Path) -> str:
    """The reason without the path, which the line has already."""
    return str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/")


def _age_seconds(written_at: object) -> float | None:
    try:
        written = datetime.strptime(str(written_at), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    return max(0.0, time.time() - written.timestamp())


def _pushed(found: Place) -> dict[str, str]:
    """What the run's queue says of each checkpoint."""
    if found.run is None:
        return {}
    queue = HubQueue(found.run)
    where = {name: f"{done.get('repo_id')}@{done.get('revision')}" for name, done in queue.pushed().items()}
    return (
        where
        | {name: f"failed: {why}" for name, why in queue.failed().items()}
        | dict.fromkeys(queue.names(), "queued")
    )


def _metric_to_show(found: Place, rows: Sequence[Row]) -> str | None:
    """``checkpoints.best_metric`` of the run, else the first that the newest checkpoint with figures has."""
    best: Any = None
    with suppress(UsageError):  # a config that cannot be read is no reason not to look
        best = _options(found.run, "checkpoints").get("best_metric") if found.run is not None else None
    names = [name for row in reversed(rows) for name in row.metrics]
    return best if best in names else names[0] if names else None


def _options(run: Path, group: str) -> dict[str, Any]:
    """A group of the run's config.yaml as it stands there; empty where there is none."""
    path = run / "config.yaml"
    options = read_tree(path).get(group) if path.is_file() else None
    return options if isinstance(options, dict) else {}


def _cells(row: Row, metric: str | None) -> tuple[str, ...]:
    figure = row.metrics.get(metric) if metric else None
    return (
        row.name,
        "-" if row.step is None else str(row.step),
        "-" if row.age_seconds is None else _readable_age(row.age_seconds),
        readable_size(row.size_bytes),
        f"{figure:.5g}" if isinstance(figure, (int, float)) else "-",
        "-" if row.state is None else "yes" if row.state else "no",
        "sizes only" if row.verified is None else "yes" if row.verified else "NO",
        row.pushed or "-",
    )


def _readable_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def verify(place: str) -> int:
    """Hash every file of one checkpoint, or of all of a run, and say which are damaged. 1 if one is."""
    found = find_place(place)
    if not found.checkpoints:
        raise UsageError(f"{found.path}: holds no checkpoint to verify; name a run that has saved one")
    damaged = 0
    for path in found.checkpoints:
        try:
            files = commit.verify(path).manifest["files"]
        except ValueError as error:
            damaged += 1
            print(f"DAMAGED  {path.name}  {_short(error, path)}", flush=True)
            continue
        size = sum(int(facts["size"]) for facts in files.values())
        print(f"ok       {path.name}  {len(files)} files, {readable_size(size)}", flush=True)
        extra = sorted(_names_in(path) - files.keys() - {"manifest.json"})
        if extra:
            print(f"         not in its manifest, and so not verified: {', '.join(extra)}")
    return 1 if damaged else 0


def _names_in(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def prune(run: str, *, dry_run: bool = False, flags: Mapping[str, Any] | None = None) -> int:
    """Delete what retention would delete, now and for a run that does not train. 1 if something could not go.

    ``flags`` are options of ``CheckpointConfig`` that go over those in config.yaml; None values are left out. Hashes
    every checkpoint. Nothing goes unless one verifies, and none that is newer than the newest that does.
    """
    place, directory = find_run(run)
    keep = _keep_options(place, directory, {k: v for k, v in (flags or {}).items() if v is not None})
    with _lock_held(directory, needed=not dry_run):
        verified, damaged = retention.survey(directory / "checkpoints", {})
        if not verified:
            raise UsageError(f"{directory}: no checkpoint verifies, so nothing is deleted; look with `verify`")
        _refuse_unknown_metric(keep, verified)
        newest = verified[-1].step
        later = [path for path in damaged if retention.step_of(path) > newest]
        old = [path for path in damaged if path not in later]
        plan = retention.plan(verified, old, keep, newest=newest, busy=HubQueue(directory).names())
        sizes = {path: disk_bytes(path) for path in plan.remove} | {path: _state_bytes(path) for path in plan.strip}
        done = plan if dry_run else retention.apply(plan)
    stays = dict(plan.reasons) | {path.name: "damaged, newer than the newest that verifies" for path in later}
    _print_plan(done, stays, sizes, dry_run)
    return 1 if done.failed else 0


def _keep_options(place: Place, run: Path, flags: dict[str, Any]) -> retention.Keep:
    """The run's own options with the flags over them, checked as at the start of training."""
    from accel_train.checkpoints.policy import CheckpointConfig

    saved = {key: v for key, v in _options(run, "checkpoints").items() if key in option_names(CheckpointConfig)}
    if not saved and "keep_last" not in flags:
        raise UsageError(f"{run}: has no config.yaml that says what to keep; give --keep_last and the like")
    names = {path.name for path in place.checkpoints}
    if unknown := [name for name in flags.get("pinned", ()) if name not in names]:
        raise UsageError(
            f"--pinned {unknown[0]}: there is no such checkpoint; {run} has {', '.join(sorted(names)) or 'none'}"
        )
    pinned = [*(saved.get("pinned") or ()), *flags.pop("pinned", ())]
    return from_tree(CheckpointConfig, saved | flags | {"pinned": pinned}, f"checkpoints of {run}")


def _refuse_unknown_metric(keep: retention.Keep, verified: Iterable[retention.Held]) -> None:
    names = sorted({name for one in verified for name in one.metrics})
    if keep.keep_best > 0 and keep.best_metric not in names:
        raise UsageError(
            f"best_metric: {keep.best_metric!r} is in no checkpoint of this run, so none would be kept as the best; "
            f"they have {', '.join(names) or 'no figures'}; give one of these with --best_metric, or --keep_best 0"
        )


def _state_bytes(path: Path) -> int:
    state = path / "trainer_state.json"
    return disk_bytes(path / "optimizer") + (state.stat().st_size if state.is_file() else 0)


def _print_plan(done: retention.Plan, stays: Mapping[str, str], sizes: Mapping[Path, int], dry_run: bool) -> None:
    lines = {path.name: ("remove", readable_size(sizes[path])) for path in done.remove}
    lines |= {name: ("keep", reason) for name, reason in stays.items()}
    for path in done.strip:
        lines[path.name] = ("strip", f"{stays[path.name]}; its optimizer state goes, {readable_size(sizes[path])}")
    lines |= {name: ("FAILED", reason) for name, reason in done.failed.items()}
    _print_table([(name, *line) for name, line in sorted(lines.items(), key=lambda item: (len(item[0]), item[0]))])
    gone = [size for path, size in sizes.items() if path.name not in done.failed]
    counts = f"{len(done.remove)} to remove, {len(done.strip)} to strip of their optimizer state"
    freed = readable_size(sum(gone))
    print(f"{counts}: {freed} would be freed; nothing was touched" if dry_run else f"{counts}: {freed} freed")


@contextmanager
def _lock_held(run: Path, *, needed: bool) -> Generator[None]:
    """The run's own lock, which training holds: two must not delete, nor one delete what the other is about to read."""
    if not needed:
        yield
        return
    try:
        held = lock.take(run, " (accel-train checkpoints prune)")
    except lock.HeldError as holder:
        raise UsageError(
            f"{run} is in use by {holder}, which keeps and deletes by itself; end it first, or look with --dry-run"
        ) from None
    except OSError as error:
        raise UsageError(f"{run}: cannot be written ({error.strerror}); prune as a user who may") from None
    with held:
        yield


def push(place: str, flags: Mapping[str, Any]) -> int:
    """Push a checkpoint, or what waits in a run, to the Hub, in the foreground. 1 where the Hub cannot be had.

    ``flags`` are options of ``HubConfig`` that go over those in the run's config.yaml; None values are left out.
    """
    from accel_train.hub.pusher import HubConfig, HubError, push_now

    found = find_place(place)
    saved = _options(found.run, "hub") if found.run is not None else {}
    given = {key: value for key, value in flags.items() if value is not None}
    options = {key: value for key, value in (saved | given).items() if key in option_names(HubConfig)}
    config = from_tree(HubConfig, options, f"hub options of {found.path}")
    try:
        urls = push_now(found.path if found.single else found.run or found.path, config)
    except HubError as error:
        print(f"not pushed: {error}")
        return 1
    print("\n".join(urls))
    return 0
