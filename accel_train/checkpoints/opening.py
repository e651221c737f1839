"""Open a run directory: take its lock, compare the experiment, and decide between a fresh start and a resume."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.checkpoints import fetch, refused, run
from accel_train.checkpoints.fetch import CheckpointsUnusableError
from accel_train.checkpoints.policy import POLICIES, RunOptions
from accel_train.checkpoints.run import Run
from accel_train.config import UsageError, disk_error, expand_path
from accel_train.hub.client import check_repository
from accel_train.runtime.main_alone import on_main
from accel_train.store import atomic_files, commit, manifest, names, strict_json
from accel_train.store import lock as locks
from accel_train.store.manifest import Checkpoint
from accel_train.store.run_file import (
    has_trained,
    new_run,
    options_since,
    read_run,
    recall,
    refuse_changes,
    with_changes,
)
from accel_train.store.strict_json import Json
from accel_train.training.health import rollback
from accel_train.wording import shortened

PATIENCE_SECONDS = 5.0
"""Longest wait for files of another host. Network file systems may show a new file late."""
LOADING_ATTEMPTS = 3
"""Set a checkpoint aside after this many starts died while loading it."""

logger = logging.getLogger(__name__)


def open_run(
    options: RunOptions, accelerator: Accelerator, data_fingerprint: str, resolved: Mapping[str, Any] | None = None
) -> Run:
    """Open ``options.output_dir`` and decide between a start and a resume. All ranks must call it.

    ``resolved`` has the values derived by the first start and kept by later ones, such as ``schedule.decay_steps``. If
    the experiment leaves such an option at None, the saved value is used. Raises ``UsageError`` for an unusable
    directory or a different experiment (with both values), and ``CheckpointsUnusableError`` if checkpoints exist and
    none verifies. Errors of the main process are raised on every process.
    """
    directory = expand_path(options.output_dir)
    derived = dict(resolved or {})
    # Stays empty on other processes: a lock cannot be sent to them.
    held: list[locks.Lock] = []

    fetch.download_weights(accelerator, options)
    with _released_on_error(held):
        opened = on_main(accelerator, lambda: _open(options, directory, data_fingerprint, derived, held))
        opened["checkpoint"] = fetch.as_seen_here(opened["checkpoint"], directory)
        opened["initial_weights"] = fetch.weights_seen_here(opened["initial_weights"], options.init_from)
        _check_shared(directory, opened["checkpoint"], accelerator)
    lock = None
    if held:
        lock = held[0]
    return Run(directory=directory, timeout_seconds=options.collective_timeout_seconds, **opened, _lock=lock)


@contextmanager
def _released_on_error(held: list[locks.Lock]) -> Generator[None]:
    try:
        yield
    except BaseException as error:
        # Cleaning up after a refused start takes the lock again (`refused.remove_new`).
        for lock in held:
            lock.release(type(error))
        raise


def _open(options: RunOptions, directory: Path, data_fingerprint: str, resolved: Json, held: list[locks.Lock]) -> Json:
    """Open the directory on the main process and return the fields of ``Run``. Puts the lock into ``held``."""
    refused.find_saved(directory)  # raises if they are on a disk that is not mounted
    if options.hub is not None and not options.evaluate_only:
        check_repository(options.hub)
    weights, notes = fetch.find_weights(run.weights_to_read(options))
    # Checked before `_prepare_directory`, which would delete them.
    inside = weights is not None and weights.resolve().is_relative_to(directory.resolve())
    if options.overwrite and inside:
        raise UsageError(f"overwrite: true would delete the weights of init_from: {weights}; copy them first")
    # Held from here on, so that it is released after any error below.
    held.append(_prepare_directory(directory, overwrite=options.overwrite))
    experiment = dict(options.experiment) | {names.DATA_FINGERPRINT: data_fingerprint}
    if _is_used(directory):
        opened = _resume(options, directory, experiment)
    else:
        opened = _start(options, directory, experiment, resolved)
    if opened["checkpoint"] is None:
        # Written with the first step, which binds the directory.
        opened["saved"] = fetch.with_commit(opened["saved"], options.init_from)
    rollbacks = rollback.recorded(directory)
    decision = "; ".join([opened["decision"], *notes])
    return opened | {"initial_weights": weights, "decision": decision, "rollbacks": rollbacks}


def _prepare_directory(directory: Path, overwrite: bool) -> locks.Lock:
    """Create the directory, check write access, and take its lock. Returns the lock, held until the process ends."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"output_dir: {directory} is a file; give a directory")
    checkpoints = directory / "checkpoints"
    if checkpoints.exists() and not checkpoints.is_dir():
        raise UsageError(f"output_dir: {checkpoints} is not a directory; move it away")
    try:
        atomic_files.make_directory(directory)
        # Try to write instead of reading the permissions, which say little on network disks.
        probe = directory / f".probe-{os.getpid()}"
        probe.write_text("writable")
        probe.unlink()
    except OSError as error:
        raise disk_error(error)(
            f"output_dir: {directory} cannot be written ({error.strerror}); give another --output_dir"
        ) from None
    if overwrite:
        refused.refuse_other_files(directory)
    try:
        lock = locks.acquire(directory)
    except locks.LockedError as holder:
        raise locks.in_use(directory, holder) from None
    except OSError as error:
        raise disk_error(error)(
            f"output_dir: {directory} cannot be locked: {error.filename}: {error.strerror}; it may be another user's: "
            "ask for write permission, or give another --output_dir"
        ) from None
    # Only under the lock, because another run may be writing here.
    if overwrite:
        refused.delete_run(directory)
    commit.sweep(checkpoints)
    # Left by starts that were killed.
    for leftover in (*directory.glob(".probe-*"), *directory.glob(".shared-*")):
        leftover.unlink(missing_ok=True)
    return lock


def _requiring_option(options: RunOptions) -> str | None:
    """Return the option that requires an existing checkpoint, for error messages, or None."""
    # With `resume: never` the initial weights are evaluated.
    if options.evaluate_only and options.resume != "never":
        return "evaluate_only: true"
    if options.resume == "must":
        return "resume: must"
    return None


def _resume(options: RunOptions, directory: Path, experiment: Json) -> Json:
    """Compare the experiment with a used directory and choose the checkpoint.

    Allowed changes are written after the first step (``Run.note_training``), because this start can still be refused.
    """
    if options.resume == "never":
        raise UsageError(
            f"resume: never, but {directory} is already used; give another --output_dir, or --overwrite to delete "
            "what is there and start again"
        )
    saved = read_run(directory)
    if manifest.committed(directory / "checkpoints"):
        refused.refuse_other_weights(options.init_from, saved, directory)
    allowed = _refuse_changes(options, saved, experiment, ("output_dir", directory))
    added = options_since(saved["experiment"], experiment)
    if options.resume not in POLICIES:
        _refuse_another_origin(options.resume, saved, directory)
    # An evaluation needs no optimizer state, and leaves the run unchanged.
    checkpoint, reasons = newest_loadable(directory, with_state=not options.evaluate_only)
    if checkpoint is None:
        _refuse_without_checkpoint(options, directory, reasons)
    if options.loads_with is not None:
        saved["loads_with"] = options.loads_with
    # For an evaluation too, although it writes nothing: the log compares these options with the checkpoint's.
    saved = with_changes(saved, experiment)
    decision = f"{directory} has no checkpoint yet"
    if checkpoint is not None:
        decision = f"resuming {directory} at step {checkpoint.step}"
    if allowed:
        decision += "; changed, as --allow permits: " + "; ".join(allowed)
    decision += added
    if reasons:
        decision += "; newer checkpoints were refused: " + "; ".join(reasons)
    if checkpoint is not None:
        _warn_about_unlisted(checkpoint)
    return {
        "run_id": saved["run_id"],
        "checkpoint": checkpoint,
        "saved": saved,
        "decision": decision,
        "unwritten_config": None if options.evaluate_only else options.config_text,
    }


def _refuse_changes(options: RunOptions, saved: Json, experiment: Json, place: tuple[str, object]) -> list[str]:
    free, shapes = options.free_to_change, options.decides_shapes
    return refuse_changes(saved, experiment, options.allow, free, place, options.defaults, shapes)


def _refuse_without_checkpoint(options: RunOptions, directory: Path, reasons: list[str]) -> None:
    """Raise if checkpoints exist and none is loadable, or if the options require one."""
    reasons = reasons or set_aside(directory)
    if reasons:
        raise CheckpointsUnusableError(
            f"{directory}: checkpoints exist and none can be loaded; refusing to restart from step 0:\n  "
            + "\n  ".join(reasons)
        )
    demand = _requiring_option(options)
    if demand is not None:
        raise UsageError(f"{demand}, but {directory} has no checkpoint yet; train first, with --resume auto")


def _warn_about_unlisted(checkpoint: Checkpoint) -> None:
    extra = commit.unlisted(checkpoint)
    if extra:
        logger.warning(
            "%s contains files that its manifest does not list; they are not read: %s", checkpoint.path, extra
        )


def _start(options: RunOptions, directory: Path, experiment: Json, resolved: Json) -> Json:
    """Start in an unused directory, from step 0 or from the checkpoint named by ``resume``."""
    demand = _requiring_option(options)
    if demand is not None:
        initial = "; or give --resume never as well, to evaluate the initial weights" if options.evaluate_only else ""
        raise UsageError(
            f"{demand}, but {directory} contains no run; give the --output_dir of one that has a checkpoint{initial}"
        )
    checkpoint = None
    origin = None
    parent = None
    decision = f"fresh start in {directory}"
    if options.resume not in POLICIES:
        origin = options.resume
        # Raises before anything else is written.
        checkpoint = fetch.fetch(origin, directory / "checkpoints")
        resolved = _check_fetched(checkpoint, options, experiment, resolved)
        parent = fetch.describe_parent(checkpoint)
        decision = f"fresh start in {directory} from step {checkpoint.step} of {origin}"
    facts = {"origin": origin, "parent": parent, "loads_with": options.loads_with}
    saved = new_run(directory, options.config_text, experiment, resolved, facts)
    return {"run_id": saved["run_id"], "checkpoint": checkpoint, "saved": saved, "decision": decision}


def _check_fetched(checkpoint: Checkpoint, options: RunOptions, experiment: Json, resolved: Json) -> Json:
    """Compare the experiment with a fetched checkpoint's and return the resolved values of the new run.

    Deletes the checkpoint and raises ``UsageError`` if it belongs to a different experiment.
    """
    # The schedule keeps the length planned at the first start of the checkpoint's run.
    resolved = dict(checkpoint.manifest.get("resolved", resolved))
    saved = {"experiment": checkpoint.manifest["experiment"], "resolved": resolved}
    try:
        # The same `init_from` tells where the checkpoint's run began. A different one would have no effect.
        if experiment.get("init_from") not in (None, saved["experiment"].get("init_from")):
            raise UsageError(
                f"init_from: {options.init_from}: the weights come from resume: {options.resume}; leave init_from "
                "out, or leave --resume out to begin at step 0 from init_from"
            )
        _refuse_changes(options, saved, experiment, ("resume", options.resume))
    except UsageError:
        # If it stayed, the next start would find a used directory and resume from it.
        commit.remove(checkpoint.path)
        raise
    # Differences that were not refused are allowed.
    resolved |= {key: experiment[key] for key in resolved if experiment.get(key) is not None}
    return resolved


def _refuse_another_origin(resume: str, saved: Mapping[str, Any], directory: Path) -> None:
    """Raise ``UsageError`` if ``resume`` is neither the origin of the run in ``directory`` nor its newest checkpoint.

    The same command therefore continues the run after a crash, even once the checkpoint that it names is gone.
    """
    if resume == saved.get("origin"):
        return
    name = "none"
    checkpoints = manifest.committed(directory / "checkpoints")
    if checkpoints:
        _, newest = checkpoints[-1]
        if fetch.is_path_of(resume, newest):
            return
        name = newest.name
    raise UsageError(
        f"resume: {resume}, but {directory} already contains a run whose newest checkpoint is {name}; give an unused "
        "--output_dir, or --resume auto to continue here"
    )


def _is_used(directory: Path) -> bool:
    """Return True if the directory has a run to lose: a trained one, a checkpoint, or one set aside."""
    if has_trained(directory):
        return True
    return bool(refused.find_saved(directory) or set_aside(directory))


def values_of_first_start(options: RunOptions) -> Mapping[str, Any]:
    """Return the values derived by an earlier start and kept by this one, such as ``schedule.decay_steps``.

    They come from the run in ``output_dir``, else from the checkpoint named by ``resume``. A start from step 0 has
    none. Main process, before ``open_run``. Raises like ``fetch`` if there is no such checkpoint.
    """
    directory = expand_path(options.output_dir)
    if options.overwrite:
        return {}
    if not _is_used(directory):
        if options.resume in POLICIES:
            return {}
        return fetch.read_manifest(options.resume).get("resolved", {})
    # `open_run` reports this error.
    with suppress(UsageError):
        saved, _ = recall(directory)
        if saved is not None:
            return saved["resolved"]
    return {}


def _check_shared(directory: Path, checkpoint: Checkpoint | None, accelerator: Accelerator) -> None:
    """Raise ``UsageError`` on every rank unless all hosts see the directory and the files to load. Collective."""
    if accelerator.num_processes == 1:
        return

    def create_marker() -> tuple[Path, str]:
        name = f".shared-{uuid.uuid4().hex}"
        (directory / name).touch()
        return directory, name

    # A new marker for each start: an old one could have been copied to every host.
    main_directory, name = on_main(accelerator, create_marker)
    # Not by the main process's path: on this host it may lead to a different directory.
    marker = directory / name
    required = [marker]
    if checkpoint is not None:
        files = checkpoint.manifest["files"]
        required += [checkpoint.path, *(checkpoint.file(name) for name in files)]
    place = None
    if not _wait_until_visible(required):
        place = f"{directory} on {socket.gethostname()}"
    blind = [place for place in gather_object([place]) if place]
    # Keep the marker until every host has looked for it.
    accelerator.wait_for_everyone()
    on_main(accelerator, lambda: marker.unlink(missing_ok=True))
    if blind:
        raise UsageError(
            f"output_dir: {main_directory} of the main process is not visible to {len(blind)} process(es) as "
            f"{shortened(sorted(set(blind)), 5)}; it must be on a file system that all hosts share: give its absolute "
            "path, with a variable in single quotes where hosts mount it at different places"
        )


def _wait_until_visible(paths: list[Path]) -> bool:
    """Wait for files of another host. Returns False after ``PATIENCE_SECONDS``."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    unseen = [path for path in paths if not path.exists()]
    while unseen and time.monotonic() < deadline:
        time.sleep(0.1)
        unseen = [path for path in unseen if not path.exists()]
    return not unseen


def newest_loadable(directory: Path, *, with_state: bool) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest verified checkpoint, and the reasons against newer ones.

    A checkpoint is set aside once ``LOADING_ATTEMPTS`` starts died while loading it. Raises ``UsageError`` for one that
    cannot be read now: if it were skipped, it would count as abandoned by the run and be deleted.
    """
    try:
        checkpoint, reasons = commit.newest_verified(directory / "checkpoints", with_state=with_state, strict=True)
    except strict_json.UnreadableError as error:
        raise refused.unreadable("output_dir", error) from None
    if checkpoint is None or run.attempts(directory, checkpoint) < LOADING_ATTEMPTS:
        return checkpoint, reasons
    aside = checkpoint.path.with_name(f"{checkpoint.path.name}.bad")
    # The name is taken if that step was set aside before and saved again since.
    number = 2
    while os.path.lexists(aside):
        aside = aside.with_name(f"{checkpoint.path.name}.{number}.bad")
        number += 1
    # Kept, because the fault may be the machine's and not the checkpoint's.
    os.rename(checkpoint.path, aside)
    atomic_files.delete_file(directory / names.LOADING_FILE)
    reason = f"{aside}: {LOADING_ATTEMPTS} starts ended while it was being loaded; it is set aside"
    # Try the previous checkpoint, which starts with a count of its own.
    checkpoint, more = newest_loadable(directory, with_state=with_state)
    return checkpoint, [reason, *reasons, *more]


def set_aside(directory: Path) -> list[str]:
    """List the checkpoints set aside, with advice. They keep a run from starting again at step 0."""
    found = sorted((directory / "checkpoints").glob("checkpoint_*.bad"))
    return [f"{path}: set aside, because starts ended while it was loaded; rename it to try again" for path in found]
