"""Which checkpoints stay: a plan made from facts alone, and its carrying out.

Only what verifies counts, the order is that of the steps, and no clock is asked. Standard library only: the process
that writes checkpoints applies this too.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from accel_train.atomic_files import fsync_directory
from accel_train.store import commit
from accel_train.store import manifest as manifests
from accel_train.store.commit import Checkpoint

PIECE_BYTES = 8 << 20
STATE_FILES = ("optimizer/", "trainer_state.json")
"""What a checkpoint loses when its optimizer state is stripped, by the beginning of the name."""

FileFacts = tuple[int, int, int, int, str]
"""Size in bytes, mtime_ns, ctime_ns, inode, and the sha256 that the content had then."""
VerifyCache = dict[Path, dict[str, FileFacts]]
"""What ``verified_once`` has read before, by checkpoint and file. Belongs to one process; start with ``{}``."""


class Keep(Protocol):
    """The options of retention. A checkpoint stays if any of them keeps it; ``CheckpointConfig`` has them all."""

    @property
    def keep_last(self) -> int:
        """Newest verified checkpoints kept; 0 keeps all."""
        ...

    @property
    def keep_best(self) -> int:
        """How many of the best by ``best_metric`` are kept; 0 none."""
        ...

    @property
    def best_metric(self) -> str | None:
        """A name in the manifest's ``metrics``."""
        ...

    @property
    def best_mode(self) -> Literal["min", "max"]:
        """Whether the smallest or the largest figure is the best."""
        ...

    @property
    def keep_every(self) -> int:
        """Checkpoints whose step is a multiple of it are kept for ever; 0 none."""
        ...

    @property
    def keep_window_steps(self) -> int:
        """All at most so many steps older than the newest are kept; 0 none."""
        ...

    @property
    def keep_window_epochs(self) -> float:
        """All at most so many epochs older than the newest are kept; 0 none."""
        ...

    @property
    def pinned(self) -> Sequence[str]:
        """Names of checkpoints that are left alone."""
        ...

    @property
    def keep_state_last(self) -> int:
        """How many of the newest checkpoints that have optimizer state keep it; 0 lets all keep it."""
        ...


@dataclass(frozen=True)
class Held:
    """What retention needs to know of one checkpoint."""

    path: Path
    step: int
    epoch: float = math.nan
    """NaN where the manifest does not say: no window of epochs reaches it."""
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    state: bool = True
    """The manifest lists optimizer state."""
    leftover: bool = False
    """State files that the manifest no longer lists: a stripping was interrupted after its rename."""


@dataclass(frozen=True)
class Plan:
    """What goes and why the rest stays; after ``apply`` also what could not go."""

    remove: tuple[Path, ...] = ()
    strip: tuple[Path, ...] = ()
    """Those that stay and lose their optimizer state."""
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of each checkpoint that stays, and why."""
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of each checkpoint that could not be removed or stripped, and the error. Empty before ``apply``."""


def unknown_pins(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that no checkpoint can have, such as ``step_100`` or ``checkpoint_100``."""
    matches = ((name, manifests.NAME.fullmatch(name)) for name in names)
    return [name for name, match in matches if not match or manifests.checkpoint_name(int(match[1])) != name]


def held(directory: Path) -> list[Held]:
    """Checkpoints of ``directory`` whose manifest can be read, oldest first. Reads manifests only, hashes nothing."""
    found: list[Held] = []
    for _, path in commit.committed(directory):
        manifest = read_manifest(path)
        if manifest is not None:
            found.append(held_from(path, manifest))
    return found


def held_from(path: Path, manifest: Mapping[str, Any]) -> Held:
    """The facts of one manifest. The step is that of the name: the file system orders by it too."""
    match = manifests.NAME.fullmatch(path.name)
    has_state = any(name.startswith("optimizer/") for name in manifest["files"])
    return Held(
        path,
        int(match[1]) if match else manifest["step"],
        epoch=float(manifest.get("epoch", math.nan)),
        metrics=manifest.get("metrics", {}),
        state=bool(manifest.get("state", has_state)),
        leftover=not has_state and any((path / "optimizer").glob("*")),
    )


def read_manifest(path: Path) -> dict[str, Any] | None:
    """A manifest that can be believed, else None: ``commit.verify`` then tells the reason."""
    try:
        return manifests.read(path)
    except ValueError:
        return None


def plan(
    verified: Sequence[Held], damaged: Sequence[Path], keep: Keep, *, newest: int, busy: Collection[str] = ()
) -> Plan:
    """Decide what goes. Touches nothing and asks nothing but its arguments.

    ``newest`` is the step just committed: nothing goes unless it is among ``verified``. ``busy`` are names being
    pushed. Later steps than ``newest`` are of a future that the run went back from: they go, and take no place.
    Damaged ones take no place either; they go once ``keep_last`` newer ones verify.
    """
    everything = {one.path.name for one in verified} | {path.name for path in damaged}
    if all(one.step != newest for one in verified):
        return Plan(reasons=dict.fromkeys(sorted(everything), f"step {newest} does not verify, so nothing goes"))
    past = sorted((one for one in verified if one.step <= newest), key=lambda one: -one.step)
    reasons = _reasons(past, keep)
    full = keep.keep_last > 0 and len(past) >= keep.keep_last
    oldest = past[keep.keep_last - 1].step if full else -1
    for path in damaged:
        if (why := _damaged_reason(step_of(path), oldest, newest, keep)) is not None:
            reasons[path.name] = [f"damaged, {why}"]
    protected = dict.fromkeys(keep.pinned, "pinned") | dict.fromkeys(busy, "being pushed")
    for name in everything & protected.keys():
        reasons.setdefault(name, []).append(protected[name])
    gone = sorted(
        (path for path in (*(one.path for one in verified), *damaged) if path.name not in reasons),
        # The future first: if this is interrupted, the next start must not go on from it.
        key=lambda path: (step_of(path) <= newest, step_of(path)),
    )
    strip = [one.path for one in _to_strip(past, keep) if one.path.name in reasons.keys() - protected.keys()]
    return Plan(tuple(gone), tuple(strip), {name: ", ".join(reasons[name]) for name in sorted(reasons)})


def _reasons(past: Sequence[Held], keep: Keep) -> dict[str, list[str]]:
    """Why each of ``past`` (newest first, all verified) stays; those that nothing keeps are not in it."""
    newest = past[0]
    best = {one.path.name for one in _best(past, keep)}
    reasons: dict[str, list[str]] = {}
    for place, one in enumerate(past):
        rules = {
            "newest": place == 0,
            "keep_last: 0 keeps all": keep.keep_last <= 0,
            f"last {keep.keep_last}": place < keep.keep_last,
            f"best {keep.keep_best} by {keep.best_metric}": one.path.name in best,
            f"every {keep.keep_every} steps": keep.keep_every > 0 and one.step % keep.keep_every == 0,
            f"within {keep.keep_window_steps} steps": 0 < keep.keep_window_steps >= newest.step - one.step,
            f"within {keep.keep_window_epochs:g} epochs": _within_epochs(one, newest, keep.keep_window_epochs),
        }
        if found := [rule for rule, applies in rules.items() if applies]:
            reasons[one.path.name] = found
    return reasons


def _within_epochs(one: Held, newest: Held, epochs: float) -> bool:
    """With room for the rounding of epochs, which are fractions of the data set."""
    return epochs > 0 and newest.epoch - one.epoch <= epochs * (1 + 1e-9)


def _best(past: Sequence[Held], keep: Keep) -> list[Held]:
    """The ``keep_best`` best of ``past`` (newest first), of those that have a finite figure; ties go to the newer."""
    figures = [(one, _figure(one, keep.best_metric)) for one in past]
    finite = [(one, figure) for one, figure in figures if figure is not None]
    sign = -1.0 if keep.best_mode == "max" else 1.0
    ordered = sorted(finite, key=lambda pair: sign * pair[1])  # stable: of equal ones the newer stays first
    return [one for one, _ in ordered[: max(0, keep.keep_best)]]


def _figure(one: Held, metric: str | None) -> float | None:
    value = one.metrics.get(metric) if metric is not None else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _damaged_reason(step: int, oldest: int, newest: int, keep: Keep) -> str | None:
    """Why a damaged checkpoint stays; ``oldest`` is the oldest step of a full ``keep_last``, else -1."""
    if step > newest:
        return None
    if keep.keep_every > 0 and step % keep.keep_every == 0:
        return f"every {keep.keep_every} steps"  # what is kept for ever is not ours to delete, a disk may come back
    return "newer than the oldest that keep_last keeps" if step > oldest else None


def _to_strip(past: Sequence[Held], keep: Keep) -> list[Held]:
    """Those of ``past`` (newest first) whose optimizer state goes, and those where its going was interrupted."""
    with_state = [one for one in past if one.state]
    surplus = with_state[keep.keep_state_last :] if keep.keep_state_last > 0 else []
    return [*surplus, *(one for one in past if one.leftover and not one.state)]


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = manifests.NAME.fullmatch(path.name)
    assert match, f"{path} is not a checkpoint name"
    return int(match[1])


def apply(plan: Plan) -> Plan:
    """Carry it out; returns the plan with what failed. Never raises ``OSError``: what could not go now goes next time.

    At every instant each final name that is there verifies as it did before.
    """
    failed: dict[str, str] = {}
    for act, paths in ((commit.remove, plan.remove), (strip_state, plan.strip)):
        for path in paths:
            try:
                act(path)
            except (OSError, ValueError) as error:
                failed[path.name] = f"{type(error).__name__}: {error}"
    return replace(plan, failed=failed)


def strip_state(path: Path) -> None:
    """Take the optimizer state from a checkpoint that verifies; its weights and average stay. One process.

    Where ``save_precision`` exported the weights in low precision, their fp32 masters belong to the state and go with
    it. The manifest is replaced before anything is deleted, and the files in ``optimizer`` go last: they are the mark
    of work left to do. Raises ``OSError`` and ``ValueError``; called again, it finishes.
    """
    manifest = manifests.read(path)
    files: dict[str, Any] = manifest["files"]
    state = {name for name in files if name.startswith(STATE_FILES)}
    if state or manifest.get("state", True):
        remaining = {name: facts for name, facts in files.items() if name not in state}
        commit.rewrite_manifest(path, {"state": False, "files": remaining})
    listed = {path / name for name in files if name not in state}
    for file in (path / "trainer_state.json", *sorted((path / "optimizer").rglob("*"), reverse=True)):
        if file in listed:
            continue
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
    if (path / "optimizer").exists():
        (path / "optimizer").rmdir()
    fsync_directory(path)


def verified_once(cache: VerifyCache, path: Path) -> Checkpoint:
    """``commit.verify``, but a file that is still the one hashed before is not hashed again; ``ValueError`` likewise.

    The same is: size, time of change, inode. A bit that rots on the disk changes none of them, so this is for deciding
    what to delete, not for deciding what to load.
    """
    known = cache.setdefault(path, {})

    def sha256(file: Path) -> str:
        name = file.relative_to(path).as_posix()
        known[name] = _facts(file, known.get(name))
        return known[name][4]

    return commit.verify(path, sha256)


def _facts(file: Path, known: FileFacts | None) -> FileFacts:
    stat = file.stat()
    now = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    if known is not None and known[:4] == now:
        return known
    return (*now, commit.hash_file(file))


def remember(cache: VerifyCache, path: Path) -> None:
    """Count a checkpoint that this process has just written and hashed as verified, so that it is not read again."""
    manifest = read_manifest(path)
    if manifest is not None:
        stats = {name: ((path / name).stat(), facts["sha256"]) for name, facts in manifest["files"].items()}
        cache[path] = {
            name: (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, sha256) for name, (s, sha256) in stats.items()
        }


def survey(directory: Path, cache: VerifyCache) -> tuple[list[Held], dict[Path, str]]:
    """Verify every checkpoint of ``directory``: those that do, oldest first, and the reason for each that does not."""
    verified: list[Held] = []
    damaged: dict[Path, str] = {}
    for _, path in commit.committed(directory):
        try:
            verified.append(held_from(path, verified_once(cache, path).manifest))
        except ValueError as error:
            damaged[path] = str(error)
    return verified, damaged


def keeps_all(directory: Path, keep: Keep, newest: int) -> bool:
    """Whether nothing is to go, so that nothing need be hashed."""
    if keep.keep_last > 0 or keep.keep_state_last > 0:
        return False
    if any(step > newest for step, _ in commit.committed(directory)):
        return False
    return not any(one.leftover for one in held(directory))


def hash_ahead(directory: Path, cache: VerifyCache) -> Iterator[None]:
    """Hash what ``prune`` will want to know, newest first, into ``cache``. Yields after each piece that was read."""
    for _, path in reversed(commit.committed(directory)):
        known = cache.setdefault(path, {})
        for name in (read_manifest(path) or {"files": ()})["files"]:
            if (path / name).is_file():
                yield from _hash_in_pieces(path / name, name, known)


def _hash_in_pieces(file: Path, name: str, known: dict[str, FileFacts]) -> Iterator[None]:
    with suppress(OSError), file.open("rb") as opened:  # what cannot be read, `prune` says
        stat, digest = os.fstat(opened.fileno()), hashlib.sha256()
        now = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        if name in known and known[name][:4] == now:
            return
        while piece := opened.read(PIECE_BYTES):
            digest.update(piece)
            yield
        known[name] = (*now, digest.hexdigest())


def prune(directory: Path, keep: Keep, newest: int, busy: Collection[str], cache: VerifyCache) -> Plan:
    """List, verify, plan, apply, after step ``newest`` was committed. One process; what could not go is in ``failed``.

    The first call of a process hashes every checkpoint there is, unless all are kept and nothing need be known.
    """
    if keeps_all(directory, keep, newest):
        return Plan(reasons={path.name: "keep_last: 0 keeps all" for _, path in commit.committed(directory)})
    verified, damaged = survey(directory, cache)
    done = apply(plan(verified, list(damaged), keep, newest=newest, busy=busy))
    for path in done.remove:
        cache.pop(path, None)
    return done
