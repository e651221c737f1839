"""Deletion at a start: of its own files, never older ones, if it is refused, and of a run's with ``overwrite``.

Also the refusal of a missing base, and of weights other than those that a run began with.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_train.checkpoints.policy import RunOptions
from accel_train.config import UsageError, expand_path
from accel_train.runtime.exiting import SECONDS_TO_BE_HEARD
from accel_train.store import atomic_files, commit, manifest, strict_json
from accel_train.store import lock as locks
from accel_train.store.names import LOCK_FILE, OF_A_RUN, OF_A_START, REPORT
from accel_train.store.pretrained_base import refuse_missing_folder
from accel_train.store.run_file import choice_of, find_chosen, has_trained, recall
from accel_train.wording import shortened


def present(directory: Path) -> frozenset[Path]:
    """Return the existing files of a run directory and its parents. Call it before a start creates any of them."""
    places = (directory, *directory.parents, *directory.glob("*"), *directory.glob("logs/*"))
    # `lexists`, because a broken link belongs to somebody too.
    return frozenset(place for place in places if os.path.lexists(place))


def remove_new(directory: Path, before: frozenset[Path], rank: int) -> None:
    """Remove the files created by this start in a directory without a run.

    Every process calls it, after closing its log and lock. Only files of a start and the checkpoint it copied are
    removed, if absent from ``before`` and if no other process holds the lock. Empty folders go too. Never raises:
    anything undeletable stays.
    """
    with suppress(OSError, locks.LockedError):
        if rank == 0:
            _remove_all_files(directory, before)
        else:
            _wait_for_main(directory, before)
            _unlink(directory / "logs" / f"rank_{rank}.log", before)
    for folder in (directory / "logs", directory, *directory.parents):
        _rmdir(folder, before)


def _wait_for_main(directory: Path, before: frozenset[Path]) -> None:
    """Wait some seconds for the main process, because torchrun ends all processes once the first exits."""
    deadline = time.monotonic() + SECONDS_TO_BE_HEARD
    while _files_of_main(directory, before) and not has_trained(directory) and time.monotonic() < deadline:
        time.sleep(0.05)


def _remove_all_files(directory: Path, before: frozenset[Path]) -> None:
    lock = locks.acquire(directory)
    try:
        _remove_under_lock(directory, before)
    finally:
        # Restores the process name found in the lock file: no run was started here.
        lock.release()


def _remove_under_lock(directory: Path, before: frozenset[Path]) -> None:
    # Checked under the lock, because another start may have begun to train here meanwhile.
    if _holds_run(directory, before):
        return
    for checkpoint in directory.glob("checkpoints/*"):
        # If it stayed, the next start would find a used directory and resume from it.
        commit.remove(checkpoint)
    _rmdir(directory / "checkpoints", before)
    for file in (*directory.glob("logs/rank_*.log"), *_files_of_main(directory, before)):
        _unlink(file, before)


def _holds_run(directory: Path, before: frozenset[Path]) -> bool:
    """Return True if the directory holds more than an untrained start and the checkpoint that it copied."""
    if has_trained(directory):
        return True
    checkpoints = directory / "checkpoints"
    held = {path.name for path in checkpoints.glob("*")}
    if not held:
        return False
    return checkpoints in before or held != {_copied(directory)}


def _copied(directory: Path) -> str | None:
    """Return the name of the checkpoint copied by a start with ``--resume PATH``, or None."""
    saved, _ = recall(directory)
    parent = None if saved is None else saved.get("parent")
    return None if parent is None else parent["checkpoint"]


def _files_of_main(directory: Path, before: frozenset[Path]) -> list[Path]:
    """List the files created by the main process since ``before``. The lock, held here, comes last."""
    files = (directory / name for name in ("logs/rank_0.log", *OF_A_START))
    return [file for file in files if file not in before and os.path.lexists(file)]


def _unlink(file: Path, before: frozenset[Path]) -> None:
    if file not in before:
        with suppress(OSError):
            file.unlink()


def _rmdir(folder: Path, before: frozenset[Path]) -> None:
    if folder not in before:
        # It may not be empty, or another process was faster.
        with suppress(OSError):
            folder.rmdir()


def refuse_other_files(directory: Path) -> None:
    """Raise ``UsageError`` if ``overwrite`` would delete files in a directory that no run has written."""
    there = [name for name in ("checkpoints", REPORT, "hub", *OF_A_RUN) if os.path.lexists(directory / name)]
    if there and not _looks_like_a_run(directory):
        raise UsageError(
            f"overwrite: true would delete {', '.join(there)} in {directory}, which is not a run: it has neither a "
            f"checkpoint nor the {LOCK_FILE} of a start; move them away, or give another --output_dir"
        )
    checkpoints = directory / "checkpoints"
    # A link may lead to a folder that others use too.
    if checkpoints.is_symlink():
        others = [path.name for path in sorted(checkpoints.glob("*")) if "checkpoint_" not in path.name]
        if others:
            raise UsageError(
                f"overwrite: true would delete {shortened(others, 3)} in {checkpoints.resolve()}, to which "
                f"{checkpoints} is a link; move them away, or remove the link"
            )


def _looks_like_a_run(directory: Path) -> bool:
    """Return True if a start has left traces. A damaged run has them too, and ``overwrite`` is a remedy for it."""
    return (directory / LOCK_FILE).exists() or any((directory / "checkpoints").glob("checkpoint_*"))


def delete_run(directory: Path) -> None:
    """Delete the checkpoints, report and records of the run in a directory. Links to folders on other disks stay."""
    checkpoints = directory / "checkpoints"
    try:
        _empty(directory / REPORT)
        for _, path in manifest.committed(checkpoints):
            # Each disappears as a whole, so that a crash leaves no half-deleted checkpoint.
            commit.remove(path)
        _empty(checkpoints)
        # The record of pushes belongs to the deleted run, even if its checkpoints were deleted by hand.
        _empty(directory / "hub")
    except OSError as error:
        raise UsageError(f"overwrite: {directory} could not be emptied ({error}); empty it by hand") from None
    for name in OF_A_RUN:
        atomic_files.delete_file(directory / name)


def _empty(folder: Path) -> None:
    """Delete a folder with its contents, or the contents alone if it is a link. Raises ``OSError``."""
    if not folder.is_symlink():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        return
    for path in folder.glob("*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def find_saved(directory: Path, option: str = "output_dir") -> list[Path]:
    """List the checkpoints in ``directory/checkpoints``, oldest first.

    Raises ``UsageError`` that names ``option`` for a broken link and for a folder that cannot be read: a run on an
    unmounted disk must not look like a run without saves.
    """
    checkpoints = directory / "checkpoints"
    try:
        found = manifest.committed(checkpoints)
        for lost in (commit.describe_broken_link(directory), commit.describe_broken_link(checkpoints)):
            if lost is not None:
                raise _lost(option, lost)
        lost = commit.describe_lost(checkpoints)
    except strict_json.UnreadableError as error:
        raise unreadable(option, error) from None
    if lost is not None:
        raise _lost(option, lost)
    return [path for _, path in found]


def place_of(text: str, option: str) -> Path:
    """Return the path given by ``option``. ``RUN@STEP`` and ``RUN@best`` give the path of a checkpoint of that run.

    If the run does not exist, its own path is returned, and the caller refuses it like any other missing path. Raises
    ``UsageError`` if the run has no such checkpoint.
    """
    path = expand_path(text)
    chosen = choice_of(path)
    if chosen is None:
        return path
    if not os.path.lexists(chosen.run):
        return chosen.run
    beside = [path for _, path in manifest.committed(chosen.run)]
    checkpoints = beside or find_saved(chosen.run, option)
    try:
        return find_chosen(chosen, chosen.run, checkpoints)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _lost(option: str, sentence: str) -> UsageError:
    return UsageError(f"{option}: {sentence}; mount it, or remove the link to start without its contents")


def unreadable(option: str, error: Exception) -> UsageError:
    """Build the error for a checkpoint that cannot be read now. It may be intact, so it is not skipped."""
    return UsageError(
        f"{option}: {error}; it may be intact: mount its disk or correct its permissions and start again. If it is "
        "lost for good, move it away to continue without it"
    )


def refuse_missing_base(option: str | None, source: str | None, options: RunOptions) -> None:
    """Raise ``UsageError`` if ``source``, the value of ``option``, is a missing base folder.

    The message includes the record of it in the checkpoint to resume from.
    """
    if option is None or source is None:
        return
    checkpoint = _resumed_checkpoint(options)
    recorded: Mapping[str, Any] | None = None
    if checkpoint is not None:
        # A damaged manifest is reported by the resume.
        with suppress(OSError, ValueError):
            recorded = manifest.read(checkpoint).get("base")
    refuse_missing_folder(f"--{option}", source, recorded, checkpoint)


def _resumed_checkpoint(options: RunOptions) -> Path | None:
    """Return the local checkpoint to resume from, None for a fresh start."""
    if options.overwrite:
        return None
    found = find_saved(expand_path(options.output_dir))
    if found:
        return found[-1]
    # A policy such as auto, or hub:owner/name@step, is not a folder with a manifest.
    named = place_of(options.resume, "resume")
    return named if (named / manifest.MANIFEST).is_file() else None


def refuse_other_weights(init_from: str | None, saved: Mapping[str, Any], directory: Path) -> None:
    """Raise ``UsageError`` if ``init_from`` differs from the run's: it has no effect, not even with ``allow``."""
    began = saved["experiment"].get("init_from")
    if init_from in (None, began):
        return
    back = "leave init_from out"
    if began is not None:
        back = f"leave init_from out, or give --init_from {shlex.quote(began)}, as the run began,"
    raise UsageError(
        f"init_from: {init_from}: {directory} already contains a run with checkpoints, and a resume takes their "
        "weights; give an unused --output_dir to begin from init_from, --overwrite to delete what is there and begin "
        f"here, or {back} to continue the run"
    )


def refuse_held(directory: Path) -> None:
    """Raise ``UsageError`` if a living process holds the lock of the run directory ``output_dir``."""
    if holder := locks.holder_of(directory):
        raise locks.in_use(directory, holder)
