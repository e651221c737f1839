"""Download a checkpoint from the Hub into a temporary directory, verify it, and rename it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from accel_train.config import UsageError, default_cache, expand_path, refuse_unwritable
from accel_train.hub.client import hub_api, limited_silence
from accel_train.hub.errors import DownloadError
from accel_train.hub.repository import revision_name
from accel_train.hub.retry import GaveUpError, retried
from accel_train.store import atomic_files, commit, strict_json
from accel_train.store import manifest as manifests
from accel_train.store.atomic_files import fsync_directory
from accel_train.store.pretrained_base import COMMIT
from accel_train.store.strict_json import Json

T = TypeVar("T")
logger = logging.getLogger(__name__)

SPEC = re.compile(r"(?:hub:)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
STEP = re.compile(r"step-(\d{8,})(?P<more>-.+)?")
"""Branch or tag of a pushed step. It has a suffix if another run or version had taken the plain name."""
ATTEMPTS = 5
"""Attempts per file, each with the retries of ``huggingface_hub`` itself."""
SILENCE_SECONDS = 60.0
ATTEMPTS_WITH_A_COPY = 2
"""Attempts if an earlier download can be used instead, so that a machine without a network waits for seconds only."""
SILENCE_SECONDS_WITH_A_COPY = 10.0
UNWRITABLE = (
    "a model from the Hub is downloaded into the cache unless it is there: set ACCEL_TRAIN_CACHE to a folder that this "
    "process may write and that has free space"
)


def download(spec: str, directory: Path) -> Path:
    """Download a pushed checkpoint to ``directory/checkpoint_<step>`` and return the path. One process.

    ``spec`` is ``org/name@1200`` or ``org/name@step-00001200`` (a step), ``org/name@REVISION`` (any branch, tag or
    commit) or ``org/name`` (main, the newest). It may begin with ``hub:``. The files of the manifest go to a temporary
    directory, renamed once every sha256 matches. An identical checkpoint at the path is kept. Raises ``UsageError`` for
    a different one and for other errors of the user, and ``DownloadError``, which is a ``HubError`` too, if the Hub
    cannot be reached or delivers a damaged file.
    """
    repo, revision = _parse(spec)
    directory.mkdir(parents=True, exist_ok=True)
    # The step is not known before the manifest is here.
    temporary = directory / commit.temporary_name(0, atomic_files.new_nonce())
    try:
        with limited_silence(SILENCE_SECONDS):
            _fetch(repo, revision, temporary)
        return _settle(temporary, directory, spec)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def download_once(spec: str, cache: Path | None = None) -> Path:
    """Download a pushed checkpoint into ``cache`` unless it is there. One process. Raises like ``download``.

    Without ``cache`` it is the default one. A checkpoint that is already there may be read-only. If the Hub is out of
    reach, returns the checkpoint that the same ``spec`` gave last, with a warning.
    """
    return download_pinned(spec, cache)[1]


def at_commit(spec: str, cache: Path | None = None) -> str:
    """Download a pushed checkpoint like ``download_once``, and return ``spec`` with its commit in place of a branch."""
    return download_pinned(spec, cache)[0]


def download_pinned(spec: str, cache: Path | None = None) -> tuple[str, Path]:
    """Return what ``at_commit`` and ``download_once`` return, of one commit. One process. Raises like ``download``."""
    cache = cache or expand_path(default_cache())
    noted = _downloaded_before(spec, cache)
    # A commit cannot change, so the Hub is not asked.
    if noted is not None and COMMIT.fullmatch(_parse(spec)[1] or "") and _present(noted[1]) is not None:
        return noted
    try:
        pinned, pushed = _manifest_at_commit(spec, has_copy=noted is not None)
    except DownloadError as error:
        if noted is None or _present(noted[1]) is None:
            raise
        logger.warning("%s: the earlier download is used, because the Hub cannot be reached: %s", noted[1], error)
        return noted
    # Named by its files and not by the revision: a branch may have moved since the last download.
    contents = hashlib.sha256(json.dumps(pushed["files"], sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / "hub" / contents
    path = _present(folder / manifests.checkpoint_name(pushed["step"]))
    if path is None:
        # Checked now, because a client of the Hub would report the disk as an error of the network.
        with refuse_unwritable(f"ACCEL_TRAIN_CACHE: {cache}", UNWRITABLE):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        path = download(pinned, folder)
    _note_download(spec, pinned, path, cache)
    return pinned, path


def _note_download(spec: str, pinned: str, path: Path, cache: Path) -> None:
    record = {"spec": spec, "pinned": pinned, "checkpoint": f"{path.parent.name}/{path.name}"}
    # Without the notes the next call needs the Hub again, which is no reason to fail.
    with suppress(OSError):
        for name in (spec, pinned):
            atomic_files.replace_json(_note_file(name, cache), record)


def _present(path: Path) -> Path | None:
    """Return a checkpoint of the cache if it verifies, else None. A damaged one is deleted if possible."""
    if not path.is_dir():
        return None
    try:
        return commit.verify(path).path
    except strict_json.UnreadableError:
        return None  # whole perhaps, once its disk is back
    except ValueError:
        # A cache of others may be read-only.
        with suppress(OSError):
            commit.remove(path)
        return None


def _downloaded_before(spec: str, cache: Path) -> tuple[str, Path] | None:
    """Return ``spec`` with the commit of its last download, and the checkpoint, unverified. None if it is gone."""
    with suppress(OSError, ValueError, KeyError):
        noted = strict_json.read_object(_note_file(spec, cache))
        path = cache / "hub" / str(noted["checkpoint"])
        if path.is_dir():
            return str(noted["pinned"]), path
    return None


def _note_file(spec: str, cache: Path) -> Path:
    """Return the file that says which checkpoint ``spec`` gave last."""
    name = hashlib.sha256("@".join(map(str, _parse(spec))).encode()).hexdigest()[:16]
    return cache / "hub" / f"{name}.json"


def download_manifest(spec: str) -> Json:
    """Return only the manifest of the checkpoint ``spec``. One process. Raises like ``download``."""
    return _manifest_at_commit(spec)[1]


def _manifest_at_commit(spec: str, *, has_copy: bool = False) -> tuple[str, Json]:
    """Return ``spec`` with the commit of its revision, and the manifest there.

    ``has_copy`` shortens the wait for a Hub out of reach.
    """
    repo, revision = _parse(spec)
    attempts, seconds = ATTEMPTS, SILENCE_SECONDS
    if has_copy:
        attempts, seconds = ATTEMPTS_WITH_A_COPY, SILENCE_SECONDS_WITH_A_COPY
    with limited_silence(seconds), tempfile.TemporaryDirectory() as temporary:
        oid = _resolve(repo, revision, attempts)
        return f"{repo}@{oid}", _get_manifest(repo, revision, oid, Path(temporary))


def pushed_steps(spec: str) -> list[int]:
    """List the steps with a branch or tag in a repository, in order. One process. Raises like ``download``."""
    repo, _ = _parse(spec)
    with limited_silence(SILENCE_SECONDS):
        refs = _call_hub(lambda: hub_api().list_repo_refs(repo), repo)
    matches = [STEP.fullmatch(ref.name) for ref in (*refs.branches, *refs.tags)]
    return sorted({int(match[1]) for match in matches if match and not match["more"]})


def _command(repo: str, revision: str | None) -> str:
    wanted = "" if revision is None else f" --revision {revision}"
    return f"hf download {repo}{wanted} --local-dir FOLDER"


def _parse(spec: str) -> tuple[str, str | None]:
    match = SPEC.fullmatch(spec.strip())
    if match is None:
        raise UsageError(
            f"hub checkpoint: {spec!r} is not ORGANISATION/NAME or ORGANISATION/NAME@STEP; write it as in "
            "hub:org/name@1200"
        )
    revision = match["revision"]
    if revision and revision.isdecimal():
        revision = revision_name(int(revision))
    return match["repo"], revision


def _fetch(repo: str, revision: str | None, temporary: Path) -> None:
    """Download the manifest and the files it lists."""
    # All from one commit, so that a push in the meantime cannot mix two checkpoints.
    oid = _resolve(repo, revision)
    manifest = _get_manifest(repo, revision, oid, temporary)
    for name in manifest["files"]:
        _get(repo, name, oid, temporary)
    # huggingface_hub keeps its records there. They are not part of the checkpoint.
    shutil.rmtree(temporary / ".cache", ignore_errors=True)


def _get(repo: str, name: str, oid: str, folder: Path) -> Path:
    file = _call_hub(lambda: hub_api().hf_hub_download(repo, name, revision=oid, local_dir=folder), repo, oid)
    return Path(file)


def _get_manifest(repo: str, revision: str | None, oid: str, folder: Path) -> Json:
    try:
        file = _get(repo, manifests.MANIFEST, oid, folder)
        manifest = manifests.parse(strict_json.read_bytes(file, manifests.MAX_BYTES))
    except UsageError:  # a ValueError, but already worded for the user
        raise
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(f"{repo} at {revision or 'main'}: manifest.json cannot be read ({error})") from None
    _refuse_another_step(repo, revision, manifest["step"])
    return manifest


def _refuse_another_step(repo: str, revision: str | None, step: int) -> None:
    """Raise ``UsageError`` if a revision named after a step holds another step: anyone may move a branch."""
    match = STEP.fullmatch(revision or "")
    if match is None or int(match[1]) == step:
        return
    named = int(match[1])
    raise UsageError(
        f"hub checkpoint: {repo} at {revision} holds step {step}, not {named}: the name was moved; push step {named} "
        "again (accel-train checkpoints push CHECKPOINT), or give another step, or none for the newest"
    )


def _resolve(repo: str, revision: str | None, attempts: int = ATTEMPTS) -> str:
    """Return the commit id of a revision."""
    from huggingface_hub.errors import RevisionNotFoundError

    api = hub_api()
    try:
        info = _call_hub(lambda: api.repo_info(repo, revision=revision), repo, revision, attempts)
    except RevisionNotFoundError:
        refs = _call_hub(lambda: api.list_repo_refs(repo), repo)
        # Names of steps sort by step, so the last ones are the newest.
        names = sorted({ref.name for ref in (*refs.branches, *refs.tags)})
        more = ""
        if len(names) > 12:
            more = f"{len(names) - 12} older and "
        raise UsageError(
            f"hub checkpoint: {repo} has no revision {revision}; it has {more}{', '.join(names[-12:])}; "
            "name one of them, or none for the newest"
        ) from None
    return str(info.sha)


def _call_hub(call: Callable[[], T], repo: str, revision: str | None = None, attempts: int = ATTEMPTS) -> T:
    """Call with retries and translate the error of the last attempt. Raises like ``download``.

    ``revision`` is only used in the remedy. None stands for the newest.
    """
    from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError

    try:
        return retried(call, attempts=attempts)
    except GaveUpError as given_up:
        error = given_up.__cause__
        problem = given_up.problem
    if isinstance(error, RevisionNotFoundError):
        raise error  # `_resolve` answers it with the revisions that exist
    if isinstance(error, RemoteEntryNotFoundError):
        raise UsageError(
            f"hub checkpoint: {repo} lacks a file of a checkpoint ({problem.reason}); it was not pushed by "
            f"accel_train, or only in part; for an uploaded export or plain weights: {_command(repo, revision)}, and "
            "give FOLDER, or --init_from FOLDER"
        )
    if problem.status in (401, 403, 404):
        raise UsageError(f"hub checkpoint: {repo} cannot be read: {problem.reason}")
    remedy = "the Hub has problems: try again later"
    if problem.status is None:
        remedy = "give this machine access to it (HF_HUB_OFFLINE unset, HF_ENDPOINT or HTTPS_PROXY where one is needed)"
    raise DownloadError(
        f"hub checkpoint: {repo} could not be downloaded from {hub_api().endpoint}: {problem.reason}; {remedy}, or "
        f"download it elsewhere ({_command(repo, revision)}) and give FOLDER instead"
    ) from error


def _settle(temporary: Path, directory: Path, spec: str) -> Path:
    """Verify the checkpoint, flush it to disk and rename it to its final path."""
    try:
        checkpoint = commit.verify(temporary)
    except ValueError as error:
        raise DownloadError(
            f"hub checkpoint: {spec} does not verify after the download: {error}; try again, and if it still does "
            "not, push that checkpoint again or give another step"
        ) from None
    final = directory / manifests.checkpoint_name(checkpoint.step)
    commit.clear_name(final)
    if final.exists():
        return _keep_existing(final, checkpoint, spec)
    # Otherwise a power loss after the rename could leave a checkpoint of empty files.
    for path in temporary.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    commit.fsync_folders(temporary)
    try:
        os.rename(temporary, final)
    except OSError:
        # Another process was faster.
        if not final.is_dir():
            raise
        return _keep_existing(final, checkpoint, spec)
    fsync_directory(directory)
    return final


def _keep_existing(final: Path, downloaded: manifests.Checkpoint, spec: str) -> Path:
    """Return ``final`` if it holds the downloaded files. Raises ``UsageError`` if it does not."""
    try:
        existing = commit.verify(final).manifest["files"]
    except ValueError as error:
        raise UsageError(f"hub checkpoint: {spec} cannot replace {final} ({error}); delete that one first") from None
    files = downloaded.manifest["files"]
    # Only what was pushed is compared: the local one may hold its optimizer state as well.
    if any(existing.get(name) != facts for name, facts in files.items()):
        raise UsageError(
            f"hub checkpoint: {final} exists and differs from {spec}; give an --output_dir of its own, or leave "
            "--resume hub: out to continue from what is there"
        )
    return final
