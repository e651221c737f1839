"""Copy a checkpoint into a run directory, from a path or from the Hub, and find the weights of ``init_from``."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from accel_train.checkpoints import refused
from accel_train.checkpoints.policy import RunOptions
from accel_train.config import UsageError, expand_path
from accel_train.pipeline import ADAPTER_DESCRIPTION
from accel_train.runtime.exiting import current_run
from accel_train.store import atomic_files, commit, names, strict_json
from accel_train.store import manifest as manifests
from accel_train.store.atomic_files import fsync_directory
from accel_train.store.exports import peft_layout
from accel_train.store.exports.verification import EXPORTED_OPTIONS, verify_export
from accel_train.store.manifest import Checkpoint
from accel_train.store.run_file import has_trained, recall
from accel_train.store.strict_json import Json, UnreadableError

logger = logging.getLogger(__name__)

HUB = "hub:"


class _DownloadedWeights(NamedTuple):
    """Weights of ``init_from`` on the Hub, as this start reads them."""

    output_dir: str
    """Of the run that they were downloaded for."""
    place: str
    """``hub:org/name@COMMIT``."""
    directory: Path
    """The download on this host."""


_downloaded: dict[str, _DownloadedWeights] = {}
"""The download of this process by the value of ``init_from``, until its run ends."""


class CheckpointsUnusableError(RuntimeError):
    """No existing checkpoint verifies. The run stops, because a fresh start would hide the loss."""


def fetch(place: str, directory: Path) -> Checkpoint:
    """Copy the checkpoint at ``place`` into ``directory`` and verify the copy. Main process only.

    ``place`` is the path of a checkpoint or of a run (its newest resumable checkpoint), ``RUN@STEP``, ``RUN@best`` or
    ``hub:org/name@step``.
    Raises ``UsageError`` that describes the place if no usable checkpoint is there.
    """
    with _explain_errors(place):
        directory.mkdir(parents=True, exist_ok=True)
        if place.startswith(HUB):
            from accel_train.hub.download import download

            found = commit.open_verified(download(place.removeprefix(HUB), directory))  # verified by `download`
        else:
            found = _copy(_find(place), directory)
    if not found.manifest.get("state", True):
        commit.remove(found.path)
        raise UsageError(
            f"resume: {place} contains weights without optimizer state, so a run cannot continue from it; --init_from "
            f"{place} starts a new run with these weights"
        )
    return found


def describe_parent(fetched: Checkpoint) -> dict[str, Any]:
    """Return run id, name and hash of a fetched checkpoint, for ``run.json`` of a run begun from it."""
    return {
        "run_id": fetched.manifest.get("run_id"),
        "checkpoint": manifests.checkpoint_name(fetched.step),
        # The manifest has the hashes of all other files.
        "manifest_sha256": commit.hash_file(fetched.file(manifests.MANIFEST)),
    }


def read_manifest(place: str) -> Mapping[str, Any]:
    """Read the manifest of the checkpoint at ``place`` without copying it. One process. Raises like ``fetch``."""
    with _explain_errors(place):
        if place.startswith(HUB):
            from accel_train.hub import download

            return download.download_manifest(place.removeprefix(HUB))
        path = refused.place_of(place, "resume")
        # The caller needs a few options only, so nothing is hashed. `fetch` verifies the checkpoint that it copies.
        candidates = [checkpoint for _, checkpoint in reversed(manifests.committed(path / "checkpoints"))]
        for directory in (*candidates, path):
            with suppress(ValueError):
                manifest = manifests.read(directory)
                if manifest.get("state", True):
                    return manifest
        return _find(place).manifest  # raises with the reason, as a rule


@contextmanager
def _explain_errors(place: str) -> Generator[None]:
    try:
        yield
    except UsageError:  # a ValueError too, but already worded for the user
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointsUnusableError(f"resume: {place} could not be fetched: {error}") from error


def download_weights(accelerator: Accelerator, options: RunOptions) -> None:
    """Download ``init_from`` from the Hub into the cache of each host, if this start reads it. Collective.

    The main process decides on the commit for all. A run that trained but saved nothing keeps the one that it began
    with, whatever has been pushed since. An error of one process is raised on all: those of ``download``. A second call
    for the same run does nothing.
    """
    init_from = options.init_from
    if init_from is None or not init_from.startswith(HUB):
        return
    known = _downloaded.get(init_from)
    if known is not None and known.output_dir == options.output_dir:
        return
    # Imported here, because most runs need neither these nor the Hub.
    from accel_train.hub.download import download_once
    from accel_train.runtime.main_alone import failing_together, gather_on_hosts, on_main

    found = on_main(accelerator, lambda: _download_at_commit(options))
    if found is None:
        _downloaded.pop(init_from, None)
        return
    with failing_together(accelerator):
        if accelerator.is_local_main_process and not accelerator.is_main_process:
            found = found._replace(directory=download_once(found.place))
    if accelerator.num_processes > 1:
        # Launchers number the processes of a host in a row.
        found = gather_on_hosts(found)[accelerator.process_index - accelerator.local_process_index]
    _downloaded[init_from] = found
    current_run.push(lambda *_: _downloaded.clear())


def _download_at_commit(options: RunOptions) -> _DownloadedWeights | None:
    """Download ``init_from`` at the commit that the run began with, else at the present one. Main process.

    Returns None if this start reads other weights.
    """
    from accel_train.checkpoints.run import weights_to_read
    from accel_train.hub.download import download_pinned

    place = weights_to_read(options)
    if place is None:
        return None
    directory = expand_path(options.output_dir)
    if not options.overwrite and has_trained(directory):
        saved, _ = recall(directory)
        if saved is not None and saved["experiment"].get("init_from") == place:
            place = saved.get(names.INIT_FROM, place)
    pinned, path = download_pinned(place)
    return _DownloadedWeights(options.output_dir, HUB + pinned, path)


def with_commit(saved: Mapping[str, Any], init_from: str | None) -> Json:
    """Return ``saved`` for ``run.json`` with the commit of ``init_from``, if this start downloaded it from the Hub."""
    # The key of an earlier start goes: `--allow init_from` may have brought other weights.
    kept = {key: value for key, value in saved.items() if key != names.INIT_FROM}
    if init_from in _downloaded:
        kept[names.INIT_FROM] = _downloaded[init_from].place
    return kept


def place_of_weights(init_from: str) -> Path:
    """Return the path given by ``init_from``, for one on the Hub that of the download on this host.

    This process downloads what ``download_weights`` has not. Raises ``UsageError`` as ``place_of`` and ``download`` do.
    """
    if not init_from.startswith(HUB):
        return refused.place_of(init_from, "init_from")
    found = _downloaded.get(init_from)
    if found is not None:
        return found.directory
    from accel_train.hub.download import download_once

    return download_once(init_from)


def find_weights(init_from: str | None) -> tuple[Path | None, list[str]]:
    """Find the weights of ``init_from``, with notices about them, before a model is built.

    ``init_from`` is a run or a directory made by ``convert`` (the newest verified checkpoint counts), a checkpoint or
    ``RUN@STEP`` or ``RUN@best``, a pushed one as ``hub:org/name``, another program's directory with weights, or an
    export of adapters or a folder of peft. Raises ``UsageError`` for anything else, and for damaged checkpoints and
    exports.
    """
    if init_from is None:
        return None, []
    source, reasons = _verified(place_of_weights(init_from))
    named = str(source)
    if init_from in _downloaded:
        named = f"{_downloaded[init_from].place} in {source}"
    has_model = any((source / f"model.safetensors{ending}").is_file() for ending in ("", ".index.json"))
    if not has_model and peft_layout.folders(source):
        # A checkpoint was verified above, an export was not.
        verify_export(source, (ADAPTER_DESCRIPTION,))
        return source, [f"adapters of {named}{_ema_remark(source)}"]
    if has_model:
        return source, [f"weights of {named}", *(f"refused: {reason}" for reason in reasons)]
    problem = "is a file" if source.exists() else "does not exist"
    if source.is_dir():
        problem = f"holds {_listing(source)}"
    raise UsageError(
        f"init_from: {source} {problem}; a run with a checkpoint, a directory with model.safetensors, or an export of "
        "adapters or a folder of peft, is required; correct --init_from or leave it out"
        f"{peft_layout.conversion_hint(source)}"
    )


def _ema_remark(export: Path) -> str:
    """Return a remark for an export of EMA weights, else an empty text."""
    path = export / EXPORTED_OPTIONS
    is_ema = path.is_file() and strict_json.read_object(path).get("weights") == "ema"
    # The run itself would give its trained weights, and so other losses.
    return " (EMA weights)" if is_ema else ""


def _verified(source: Path) -> tuple[Path, list[str]]:
    """Return the verified checkpoint at ``source``, and the reasons against newer ones.

    Returns ``source`` itself if it neither is nor holds a checkpoint.
    """
    if source.name.startswith(names.UNFINISHED):
        raise UsageError(
            f"init_from: {source} is unfinished or half-deleted; name a checkpoint_ directory next to it, or the run"
        )
    if source.is_dir() and manifests.is_checkpoint(source):
        try:
            return commit.verify(source).path, []
        except ValueError as error:
            raise UsageError(
                f"init_from: {error}; restore it from a copy, or name another checkpoint, or the run, whose newest "
                "that verifies is used; move weights of another program to a folder without this name and manifest.json"
            ) from None
    refused.find_saved(source, "init_from")
    folder = source if manifests.committed(source) else source / "checkpoints"
    try:
        newest, reasons = commit.newest_verified(folder, strict=True)
    except UnreadableError as error:
        raise refused.unreadable("init_from", error) from None
    if newest is not None:
        return newest.path, reasons
    if reasons:
        listed = "\n  ".join(reasons)
        raise UsageError(
            f"init_from: no checkpoint of {source} verifies; restore one from a copy, or name another run:\n  {listed}"
        )
    return source, []


def is_path_of(place: str, checkpoint: Path) -> bool:
    """Return True if ``place`` is or selects this checkpoint (a path, ``RUN@STEP``). Raises ``UsageError``."""
    return not place.startswith(HUB) and refused.place_of(place, "resume").resolve() == checkpoint.resolve()


def _find(place: str) -> Checkpoint:
    path = refused.place_of(place, "resume")
    refused.find_saved(path, "resume")
    try:
        newest, reasons = commit.newest_verified(path / "checkpoints", with_state=True, strict=True)
    except UnreadableError as error:
        raise refused.unreadable("resume", error) from None
    if newest is not None:
        if reasons:
            # Otherwise a run could silently begin from an earlier step than intended.
            logger.warning(
                "resume: %s stands for %s; newer ones were refused: %s", path, newest.path, "; ".join(reasons)
            )
        return newest
    if reasons:
        raise UsageError(f"resume: no checkpoint of {path} can be resumed:\n  " + "\n  ".join(reasons))
    if path.name.startswith(".tmp-"):
        raise UsageError(f"resume: {path} is a save that was never finished; name a checkpoint_ directory next to it")
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise UsageError(
            f"resume: {place!r} is not auto, must or never, and {path} {problem}; give one of these, the directory "
            "of a checkpoint or run, RUN@STEP, or hub:org/name@step"
        )
    try:
        return commit.verify(path)
    except ValueError as error:
        raise UsageError(
            f"resume: {error} (it contains {_listing(path)}); name a checkpoint_ directory or a run"
        ) from None


def as_seen_here(checkpoint: Checkpoint | None, directory: Path) -> Checkpoint | None:
    """Return the checkpoint with its path on this host, which may mount the shared directory at another place."""
    if checkpoint is None:
        return None
    return replace(checkpoint, path=directory / "checkpoints" / checkpoint.path.name)


def weights_seen_here(weights: Path | None, init_from: str | None) -> Path | None:
    """Return the path of the initial weights on this host, whose cache of downloads may be at another place."""
    if weights is None or init_from not in _downloaded:
        return weights
    return _downloaded[init_from].directory


def _listing(directory: Path) -> str:
    found = sorted(path.name for path in directory.iterdir())
    return ", ".join(found[:6]) or "nothing"


def _copy(source: Checkpoint, directory: Path) -> Checkpoint:
    temporary = directory / commit.temporary_name(source.step, atomic_files.new_nonce())
    final = directory / manifests.checkpoint_name(source.step)
    try:
        # If the copy is killed, the next start sweeps this name. Unlisted files are unverified, so they are not copied.
        for name in (*source.manifest["files"], manifests.MANIFEST):
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.file(name), target)
            commit.seal_file(target)
        commit.fsync_folders(temporary)
        copied = commit.verify(temporary)  # before the rename: a crash during it leaves no checkpoint
    except BaseException as error:
        # A partial copy would keep a full disk full.
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in commit.DISK_FULL:
            needed = sum(int(facts["size"]) for facts in source.manifest["files"].values())
            raise OSError(commit.describe_write_error(error, directory, needed)) from error
        raise
    commit.clear_name(final)
    os.rename(temporary, final)
    fsync_directory(directory)
    return replace(copied, path=final)
