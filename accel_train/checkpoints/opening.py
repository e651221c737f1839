"""Open the directory of a run: whose it is, whether to start or resume, and what may have changed in between."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.checkpoints import fetch, run
from accel_train.checkpoints.fetch import CheckpointsUnusableError
from accel_train.checkpoints.policy import POLICIES, RunOptions
from accel_train.checkpoints.run import Run
from accel_train.config import UsageError, expand_path
from accel_train.hub.access import check_repository
from accel_train.runtime.main_alone import on_main
from accel_train.store import atomic_files, commit, manifest
from accel_train.store import lock as locks
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import CONFIG_FILE, METRICS_FILE, REPORT, RUN_FILE
from accel_train.store.run_file import has_trained, new_run, read_run, recall, refuse_changes, renew_run

PATIENCE_SECONDS = 5.0

logger = logging.getLogger(__name__)


def open_run(
    options: RunOptions, accelerator: Accelerator, data_fingerprint: str, resolved: Mapping[str, Any] | None = None
) -> Run:
    """Open ``options.output_dir`` and decide between a start and a resume. All ranks must call it.

    ``resolved`` are values derived at the first start that later starts keep, such as ``schedule.decay_steps``; where
    the experiment leaves such an option at None, the saved value counts. Raises ``UsageError`` for a directory that
    cannot be used or belongs to another experiment (naming both values), ``CheckpointsUnusableError`` if checkpoints
    exist and none verifies. Whatever the main process raises here, every process raises at once.
    """
    directory = expand_path(options.output_dir)
    held: list[Any] = []  # the lock, which other processes cannot have

    def opening() -> dict[str, Any]:
        try:
            return _open(options, directory, data_fingerprint, dict(resolved or {}), held)
        except BaseException:
            for lock in held:
                lock.close()
            raise

    opened = on_main(accelerator, opening)
    _check_shared(directory, opened["checkpoint"], accelerator)
    timeout, lock = options.collective_timeout_seconds, held[0] if held else None
    return Run(directory=directory, timeout_seconds=timeout, **opened, _lock=lock)


def _open(
    options: RunOptions, directory: Path, data_fingerprint: str, resolved: dict[str, Any], held: list[Any]
) -> dict[str, Any]:
    """Main process: everything that is known only when it is done. Puts the lock into ``held``."""
    _refuse_lost_links(directory)
    if options.hub is not None and not options.evaluate_only:
        check_repository(options.hub)
    begins = options.overwrite or not manifest.committed(directory / "checkpoints")  # else nobody asks for weights
    weights, notes = fetch.find_weights(options.init_from if begins else None)
    if options.overwrite and weights is not None and weights.resolve().is_relative_to(directory.resolve()):
        raise UsageError(f"overwrite: true would delete the weights of init_from: {weights}; copy them first")
    held.append(_prepare_directory(directory, overwrite=options.overwrite))
    opened = _decide(options, directory, data_fingerprint, resolved)
    return opened | {"initial_weights": weights, "decision": "; ".join([opened["decision"], *notes])}


def _refuse_lost_links(directory: Path) -> None:
    """A disk that is not mounted must not look like a run that has saved nothing."""
    for place in (directory, directory / "checkpoints"):
        if lost := commit.describe_broken_link(place):
            raise UsageError(f"output_dir: {lost}; mount it, or remove the link to start without what it held")
    if (directory / "checkpoints").exists() and not (directory / "checkpoints").is_dir():
        raise UsageError(f"output_dir: {directory / 'checkpoints'} is no directory; move it away")


def _prepare_directory(directory: Path, overwrite: bool) -> Any:
    """Make it, check that it can be written, take its lock; returns the lock, held until the process ends."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"output_dir: {directory} is a file; give a directory")
    try:
        atomic_files.make_directory(directory)
        probe = directory / f".probe-{os.getpid()}"
        probe.write_text("writable")
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"output_dir: {directory} cannot be written ({error.strerror}); give another --output_dir"
        ) from None
    try:
        lock = locks.acquire(directory)
    except locks.LockedError as holder:
        raise UsageError(
            f"output_dir: {directory} is in use by {holder}; give another --output_dir or end that run first"
        ) from None
    except OSError as error:
        raise UsageError(
            f"output_dir: {directory} cannot be locked: {error.filename}: {error.strerror}; it may be another user's: "
            "ask for the right to write, or give another --output_dir"
        ) from None
    if overwrite:
        shutil.rmtree(directory / REPORT, ignore_errors=True)
        if (directory / "checkpoints").exists():
            try:
                for _, path in manifest.committed(directory / "checkpoints"):
                    commit.remove(path)  # whole, so that a crash leaves no half ones
                shutil.rmtree(directory / "checkpoints")
                shutil.rmtree(directory / "hub", ignore_errors=True)  # what was pushed was another run's
            except OSError as error:
                raise UsageError(f"overwrite: {directory} could not be emptied ({error}); empty it by hand") from None
        for name in (run.LOADING_FILE, RUN_FILE, CONFIG_FILE, METRICS_FILE):
            atomic_files.delete_file(directory / name)
    commit.sweep(directory / "checkpoints")
    for left in (*directory.glob(".probe-*"), *directory.glob(".shared-*")):  # of starts that were killed
        left.unlink(missing_ok=True)
    return lock


def _decide(options: RunOptions, directory: Path, data_fingerprint: str, resolved: dict[str, Any]) -> dict[str, Any]:
    """Main process: compare with what is there, choose the checkpoint, write run.json and config.yaml."""
    experiment = dict(options.experiment) | {"data_fingerprint": data_fingerprint}
    evaluating = options.evaluate_only
    if not _is_used(directory):
        if options.resume == "must" or evaluating:
            asked = "evaluate_only: true" if evaluating else "resume: must"
            raise UsageError(
                f"{asked}, but {directory} holds no run; give the --output_dir of one that has a checkpoint"
            )
        return _start(options, directory, experiment, resolved)
    if options.resume == "never":
        raise UsageError(
            f"resume: never, but {directory} is already used; give another --output_dir, or --overwrite to delete "
            "what is there and start anew"
        )
    saved = read_run(directory)
    refuse_changes(saved, experiment, options.allow, options.free_to_change, directory)
    if options.resume not in POLICIES:
        _refuse_another_origin(options.resume, saved, directory)
    checkpoint, reasons = newest_loadable(directory, with_state=not evaluating)
    if checkpoint is None and (reasons := reasons or set_aside(directory)):
        raise CheckpointsUnusableError(
            f"{directory}: checkpoints exist and none can be loaded; training does not start again by itself:\n  "
            + "\n  ".join(reasons)
        )
    if checkpoint is None and (options.resume == "must" or evaluating):
        asked = "evaluate_only: true" if evaluating else "resume: must"
        raise UsageError(f"{asked}, but {directory} holds no checkpoint yet; train first, with --resume auto")
    if not evaluating:  # looking at a run leaves it as it is
        saved = renew_run(directory, options.config_text, _with_loader(saved, options), experiment)
    decision = f"resuming {directory} at step {checkpoint.step}" if checkpoint else f"{directory} has no checkpoint yet"
    if reasons:
        decision += "; newer checkpoints were refused: " + "; ".join(reasons)
    if checkpoint is not None and (extra := commit.unlisted(checkpoint)):
        logger.warning("%s holds files that its manifest does not list; they are not read: %s", checkpoint.path, extra)
    return {"run_id": saved["run_id"], "checkpoint": checkpoint, "saved": saved, "decision": decision}


def _with_loader(saved: Mapping[str, Any], options: RunOptions) -> dict[str, Any]:
    return dict(saved) | ({} if options.loads_with is None else {"loads_with": options.loads_with})


def _start(
    options: RunOptions, directory: Path, experiment: dict[str, Any], resolved: dict[str, Any]
) -> dict[str, Any]:
    """An unused directory: from nothing, or from a checkpoint that ``resume`` names."""
    checkpoint, origin = None, None
    if options.resume not in POLICIES:
        origin = options.resume
        checkpoint = fetch.fetch(origin, directory / "checkpoints")  # raises before anything else is written
        resolved = dict(checkpoint.manifest.get("resolved", resolved))
        there = {"experiment": checkpoint.manifest["experiment"], "resolved": resolved}
        try:
            refuse_changes(there, experiment, options.allow, options.free_to_change, checkpoint.path)
        except UsageError:
            commit.remove(checkpoint.path)
            raise
        resolved |= {key: experiment[key] for key in resolved if experiment.get(key) is not None}  # as allowed
    facts = {"origin": origin, "loads_with": options.loads_with}
    saved = new_run(directory, options.config_text, experiment, resolved, facts)
    decision = f"fresh start in {directory}"
    if checkpoint is not None:
        decision = f"fresh start in {directory} from step {checkpoint.step} of {origin}"
    return {"run_id": saved["run_id"], "checkpoint": checkpoint, "saved": saved, "decision": decision}


def _refuse_another_origin(resume: str, saved: Mapping[str, Any], directory: Path) -> None:
    """The same command again, after a crash, goes on; a used directory takes no other checkpoint."""
    newest = max(manifest.committed(directory / "checkpoints"), default=(0, None))[1]
    if resume == saved.get("origin") or (newest is not None and fetch.is_path_of(resume, newest)):
        return
    raise UsageError(
        f"resume: {resume}, but {directory} already holds a run whose newest checkpoint is "
        f"{newest.name if newest else 'none'}; give an unused --output_dir, or --resume auto to go on here"
    )


def _is_used(directory: Path) -> bool:
    """Whether a run is there that could be lost: it has trained, has a checkpoint, or one that was set aside."""
    return has_trained(directory) or bool(manifest.committed(directory / "checkpoints") or set_aside(directory))


def kept(options: RunOptions) -> Mapping[str, Any]:
    """What an earlier start derived and this one keeps, such as ``schedule.decay_steps``: of the run in ``output_dir``,
    else of the checkpoint that ``resume`` names; nothing for a start from step 0. Main process, before ``open_run``.
    Raises as ``fetch`` where there is no such checkpoint."""
    directory = expand_path(options.output_dir)
    if options.overwrite:
        return {}
    if not _is_used(directory):
        return {} if options.resume in POLICIES else fetch.read_manifest(options.resume).get("resolved", {})
    with suppress(UsageError):  # `open_run` says it
        saved, _ = recall(directory)
        return saved["resolved"] if saved is not None else {}
    return {}


def _check_shared(directory: Path, checkpoint: Checkpoint | None, accelerator: Accelerator) -> None:
    """Every host must see the directory and what is to be loaded; network file systems may show a new file late."""
    if accelerator.num_processes == 1:
        return

    def mark() -> Path:
        made = directory / f".shared-{uuid.uuid4().hex}"
        made.touch()
        return made

    marker = on_main(accelerator, mark)
    unseen = [marker]
    if checkpoint is not None:
        unseen += [checkpoint.path, *(checkpoint.file(name) for name in checkpoint.manifest["files"])]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (unseen := [path for path in unseen if not path.exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = [host for host in gather_object([socket.gethostname() if unseen else None]) if host]
    accelerator.wait_for_everyone()
    on_main(accelerator, lambda: marker.unlink(missing_ok=True))
    if blind:
        raise UsageError(
            f"output_dir: {directory} of the main process is not seen by {len(blind)} process(es) on "
            f"{', '.join(sorted(set(blind)))}; it must be on a file system that all hosts share"
        )


LOADING_ATTEMPTS = 3
"""A checkpoint under which the process died this often while loading is set aside."""


def newest_loadable(directory: Path, *, with_state: bool) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest verified checkpoint that no three starts died of, and why newer ones are passed over.

    The others are set aside.
    """
    checkpoint, reasons = commit.newest_verified(directory / "checkpoints", with_state=with_state)
    if checkpoint is None or run.attempts(directory, checkpoint) < LOADING_ATTEMPTS:
        return checkpoint, reasons
    aside = checkpoint.path.with_name(f"{checkpoint.path.name}.bad")
    os.rename(checkpoint.path, aside)
    atomic_files.delete_file(directory / run.LOADING_FILE)
    reason = f"{aside}: {LOADING_ATTEMPTS} starts ended while it was being loaded; it is set aside"
    checkpoint, more = newest_loadable(directory, with_state=with_state)
    return checkpoint, [reason, *reasons, *more]


def set_aside(directory: Path) -> list[str]:
    """Say of each checkpoint set aside how to bring it back: without these a run would start again from step 0."""
    found = sorted((directory / "checkpoints").glob("checkpoint_*.bad"))
    return [f"{path}: set aside, because starts ended while it was loaded; rename it to try again" for path in found]
