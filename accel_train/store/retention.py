"""Retention: decide from facts alone which checkpoints stay, then apply the plan.

Only verified checkpoints count, they are ordered by step, and no clock is involved. Standard library only, because the
writer process runs this too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from accel_train.store import commit
from accel_train.store import manifest as manifests
from accel_train.store.atomic_files import fsync_directory
from accel_train.store.manifest import CheckpointFacts, facts_from_manifest, list_facts, ranked, read_if_valid
from accel_train.store.strict_json import Json, UnreadableError

PIECE_BYTES = 8 << 20
STATE_FILES = ("optimizer/", "trainer_state.json")
"""Prefixes of the files deleted when the optimizer state is stripped."""
NONE: Mapping[Path, str] = MappingProxyType({})


class Keep(Protocol):
    """Options of retention. A checkpoint stays if any of them keeps it. ``CheckpointConfig`` implements them."""

    @property
    def keep_last(self) -> int:
        """Number of newest verified checkpoints to keep; 0 keeps all."""
        ...

    @property
    def keep_best(self) -> int:
        """Number of best checkpoints by ``best_metric`` to keep; 0 is off."""
        ...

    @property
    def best_metric(self) -> str | None:
        """A key of the manifest's ``metrics``."""
        ...

    @property
    def best_mode(self) -> Literal["min", "max"]:
        """Direction of ``best_metric``: ``min`` for the smallest value."""
        ...

    @property
    def keep_every(self) -> int:
        """Keep checkpoints forever if their step is a multiple of this; 0 is off."""
        ...

    @property
    def keep_window_steps(self) -> int:
        """Keep all checkpoints at most this many steps older than the newest; 0 is off."""
        ...

    @property
    def keep_window_epochs(self) -> float:
        """Keep all checkpoints at most this many epochs older than the newest; 0 is off."""
        ...

    @property
    def pinned(self) -> Sequence[str]:
        """Names of checkpoints to leave untouched."""
        ...

    @property
    def keep_state_last(self) -> int:
        """Number of newest checkpoints with optimizer state to leave it in; 0 strips none."""
        ...


@dataclass(frozen=True)
class Plan:
    """Checkpoints to remove or strip, and reasons to keep the rest. ``apply`` adds the failures."""

    remove: tuple[Path, ...] = ()
    strip: tuple[Path, ...] = ()
    """Checkpoints to keep without their optimizer state."""
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason to keep each remaining checkpoint, by name."""
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Error of each checkpoint kept because it cannot be read now, by name."""
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Error of each failed removal or strip, by name of the checkpoint. Empty before ``apply``."""


def plan(
    verified: Sequence[CheckpointFacts],
    damaged: Sequence[Path],
    keep: Keep,
    *,
    newest: int,
    busy: Collection[str] = (),
    unreadable: Mapping[Path, str] = NONE,
) -> Plan:
    """Decide on removals and strips. A pure function of its arguments.

    ``newest`` is the step just committed; unless it is in ``verified``, nothing is removed. ``busy`` are names of
    checkpoints being pushed. If the run went back to an earlier checkpoint, steps after ``newest`` do not count for
    ``keep_last``, and those with optimizer state are removed. Damaged checkpoints do not count either. They are
    removed once ``keep_last`` newer ones verify. ``unreadable`` checkpoints, with the errors of ``survey``, do not
    count and are never removed.
    """
    planned = _plan(verified, damaged, keep, newest, busy)
    unread = {path.name: error for path, error in unreadable.items()}
    return replace(planned, reasons={**planned.reasons, **unread}, unreadable=unread)


def _plan(
    verified: Sequence[CheckpointFacts], damaged: Sequence[Path], keep: Keep, newest: int, busy: Collection[str]
) -> Plan:
    paths = [*(facts.path for facts in verified), *damaged]
    names = {path.name for path in paths}
    if all(facts.step != newest for facts in verified):
        return Plan(reasons=dict.fromkeys(sorted(names), f"step {newest} does not verify, so nothing is deleted"))
    past = sorted((facts for facts in verified if facts.step <= newest), key=lambda facts: -facts.step)
    reasons = _reasons(past, damaged, keep) | _later_weights(verified, newest)
    protected = dict.fromkeys(keep.pinned, "pinned") | dict.fromkeys(busy, "being pushed")
    for name in names & protected.keys():
        reasons.setdefault(name, []).append(protected[name])

    remove = _to_remove(paths, reasons, newest)
    # A push reads the files that a strip would delete, and a pinned checkpoint is left untouched.
    strip = _to_strip(past, keep, reasons.keys() - protected.keys())
    return Plan(remove, strip, {name: ", ".join(reasons[name]) for name in sorted(reasons)})


def _later_weights(verified: Sequence[CheckpointFacts], newest: int) -> dict[str, list[str]]:
    # No start resumes from them, so they do no harm, and they may be all that is left of an earlier start.
    return {one.path.name: ["weights alone of a later step"] for one in verified if one.step > newest and not one.state}


def _to_remove(paths: Sequence[Path], reasons: Collection[str], newest: int) -> tuple[Path, ...]:
    unneeded = [path for path in paths if path.name not in reasons]
    # The future first: if this is interrupted, the next start must not resume from it.
    unneeded.sort(key=lambda path: (step_of(path) <= newest, step_of(path)))
    return tuple(unneeded)


def _reasons(past: Sequence[CheckpointFacts], damaged: Sequence[Path], keep: Keep) -> dict[str, list[str]]:
    """Collect the reasons to keep checkpoints, by name. Names without any are left out.

    ``past`` is verified and sorted, newest first.
    """
    newest = past[0]
    best = {facts.path.name for facts in ranked(past, keep.best_metric, keep.best_mode)[: keep.keep_best]}
    reasons: dict[str, list[str]] = {}
    for place, facts in enumerate(past):
        age = newest.step - facts.step
        rules = {
            "newest": place == 0,
            "keep_last: 0 keeps all": keep.keep_last <= 0,
            f"last {keep.keep_last}": place < keep.keep_last,
            f"best {keep.keep_best} by {keep.best_metric}": facts.path.name in best,
            f"every {keep.keep_every} steps": _is_multiple(facts.step, keep.keep_every),
            f"within {keep.keep_window_steps} steps": 0 < keep.keep_window_steps >= age,
            f"within {keep.keep_window_epochs:g} epochs": _within_epochs(facts, newest, keep.keep_window_epochs),
        }
        found = [rule for rule, applies in rules.items() if applies]
        if found:
            reasons[facts.path.name] = found
    for path in damaged:
        reason = _damaged_reason(step_of(path), past, keep)
        if reason is not None:
            reasons[path.name] = [f"damaged, {reason}"]
    return reasons


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _within_epochs(facts: CheckpointFacts, newest: CheckpointFacts, epochs: float) -> bool:
    # Epochs are fractions of the data set, so the bound leaves room for rounding.
    return epochs > 0 and newest.epoch - facts.epoch <= epochs * (1 + 1e-9)


def _damaged_reason(step: int, past: Sequence[CheckpointFacts], keep: Keep) -> str | None:
    """Return the reason to keep a damaged checkpoint, or None. ``past`` is verified and sorted, newest first."""
    if step > past[0].step:
        return None  # the run went back and left it behind
    if _is_multiple(step, keep.keep_every):
        return f"every {keep.keep_every} steps"  # kept forever; a failing disk may recover
    is_full = 0 < keep.keep_last <= len(past)
    if not is_full or step > past[keep.keep_last - 1].step:
        return "newer than the oldest that keep_last keeps"
    return None


def _to_strip(past: Sequence[CheckpointFacts], keep: Keep, names: Collection[str]) -> tuple[Path, ...]:
    """Select from ``past`` (newest first) those of ``names`` to strip, including those with an interrupted strip."""
    selected: list[CheckpointFacts] = []
    if keep.keep_state_last > 0:
        with_state = [facts for facts in past if facts.state]
        selected += with_state[keep.keep_state_last :]
    selected += [facts for facts in past if facts.leftover and not facts.state]
    return tuple(facts.path for facts in selected if facts.path.name in names)


def step_of(path: Path) -> int:
    """Parse the step in a checkpoint's name."""
    match = manifests.NAME.fullmatch(path.name)
    assert match, f"{path} is not a checkpoint name"
    return int(match[1])


def leftovers(directory: Path, newest: int) -> list[Path]:
    """List unfinished saves and deletions of a run that no living process holds, of this host and of others.

    ``newest`` is the newest step that verifies. A later save that is complete but not renamed is not listed.
    """
    own, others = commit.unfinished(directory)
    return [path for path in sorted(own + others) if not _only_lacks_its_name(path, newest)]


def _only_lacks_its_name(unfinished: Path, newest: int) -> bool:
    match = commit.TEMPORARY.fullmatch(unfinished.name)
    assert match, f"{unfinished} is not the name of an unfinished save"
    is_complete = unfinished.name.startswith(".tmp-") and (unfinished / manifests.MANIFEST).exists()
    return is_complete and int(match["step"]) > newest


def apply(plan: Plan) -> Plan:
    """Remove and strip; returns the plan with its failures. Never raises ``OSError``: a later call tries again.

    At every instant each checkpoint under its final name verifies as before.
    """
    actions: list[tuple[Callable[[Path], None], Path]] = []
    actions += [(commit.remove, path) for path in plan.remove]
    actions += [(strip_state, path) for path in plan.strip]
    failed: dict[str, str] = {}
    for act, path in actions:
        try:
            act(path)
        except (OSError, ValueError) as error:
            failed[path.name] = f"{type(error).__name__}: {error}"
    return replace(plan, failed=failed)


def strip_state(path: Path) -> None:
    """Delete the optimizer state of a verified checkpoint and keep its weights and EMA. One process.

    With a low ``save_precision`` the exact fp32 weights belong to the state and are deleted with it. Raises ``OSError``
    and ``ValueError``. A second call finishes an interrupted one.
    """
    manifest = manifests.read(path)
    files: Json = manifest["files"]
    remaining = {name: facts for name, facts in files.items() if not name.startswith(STATE_FILES)}
    # The manifest before the files: a checkpoint without listed files would not verify.
    if len(remaining) < len(files) or manifest.get("state", True):
        commit.rewrite_manifest(path, {"state": False, "files": remaining})
    # The files in `optimizer` last: they mark an unfinished strip (`CheckpointFacts.leftover`).
    state_files = sorted((path / "optimizer").rglob("*"), reverse=True)
    for file in (path / "trainer_state.json", *state_files):
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
    if (path / "optimizer").exists():
        (path / "optimizer").rmdir()
    fsync_directory(path)


class Survey(NamedTuple):
    """Checkpoints of a directory as a verification found them."""

    verified: list[CheckpointFacts]
    """Verified checkpoints, oldest first."""
    damaged: dict[Path, str]
    """Damaged checkpoints, each with the reason."""
    unreadable: dict[Path, str]
    """Checkpoints that cannot be read now, and copies under another name, each with the error. They may be whole, and
    are never removed."""


def survey(directory: Path, cache: commit.VerifyCache) -> Survey:
    """Verify every checkpoint."""
    found = Survey([], {}, {})
    for _, path in manifests.committed(directory):
        try:
            checkpoint = commit.verify_cached(cache, path)
        except (UnreadableError, manifests.OtherStepError) as error:
            found.unreadable[path] = str(error).removeprefix(f"{path}: ")
        except ValueError as error:
            found.damaged[path] = str(error)
        else:
            found.verified.append(facts_from_manifest(path, checkpoint.manifest))
    return found


def keeps_all(directory: Path, keep: Keep, newest: int) -> bool:
    """Return True if nothing is to be removed or stripped, and so no file needs hashing."""
    if keep.keep_last > 0 or keep.keep_state_last > 0:
        return False
    # Steps that the run went back from are removed even if everything else is kept.
    if any(step > newest for step, _ in manifests.committed(directory)):
        return False
    return not any(facts.leftover for facts in list_facts(directory))


def hash_ahead(directory: Path, cache: commit.VerifyCache) -> Iterator[None]:
    """Hash the files of the next ``prune``, newest first, into ``cache``. Yields after each piece."""
    for _, path in reversed(manifests.committed(directory)):
        known = cache.setdefault(path, {})
        manifest = read_if_valid(path)
        if manifest is None:
            continue
        for name in manifest["files"]:
            yield from _hash_in_pieces(path / name, name, known)


def _hash_in_pieces(path: Path, name: str, known: dict[str, commit.FileFacts]) -> Iterator[None]:
    with suppress(OSError):  # `prune` reports unreadable files
        if not path.is_file():
            return
        with path.open("rb") as file:
            # Before reading: if the file changes meanwhile, its identity no longer matches and it is hashed again.
            identity = commit.file_identity(os.fstat(file.fileno()))
            if name in known and known[name][:4] == identity:
                return
            digest = hashlib.sha256()
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                yield
            known[name] = (*identity, digest.hexdigest())


def prune(directory: Path, keep: Keep, newest: int, busy: Collection[str], cache: commit.VerifyCache) -> Plan:
    """List, verify, plan and apply, after step ``newest`` was committed. One process. Failures are in ``failed``.

    The first call of a process hashes every checkpoint, unless all are kept.
    """
    if keeps_all(directory, keep, newest):
        return Plan(reasons={path.name: "keep_last: 0 keeps all" for _, path in manifests.committed(directory)})
    found = survey(directory, cache)
    planned = plan(found.verified, list(found.damaged), keep, newest=newest, busy=busy, unreadable=found.unreadable)
    done = apply(planned)
    # Otherwise the cache would grow with every save of a long run.
    for path in done.remove:
        cache.pop(path, None)
    return done
