"""A checkpoint back from the Hub: downloaded beside its place, verified, then given its name."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accel_train.config import UsageError
from accel_train.hub.client import hub_api, limited_silence
from accel_train.hub.errors import HubError
from accel_train.hub.repository import revision_name
from accel_train.hub.retry import GaveUpError, retried
from accel_train.store import atomic_files, commit, strict_json
from accel_train.store import manifest as manifests
from accel_train.store.atomic_files import fsync_directory

T = TypeVar("T")

SPEC = re.compile(r"(?:hub:)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
ATTEMPTS = 5
"""Tries of one file beyond those of ``huggingface_hub`` itself."""


def download(spec: str, directory: Path) -> Path:
    """Download a pushed checkpoint into ``directory``; returns its path there, ``checkpoint_<step>``. One process.

    ``spec`` is ``org/name@1200`` or ``org/name@step-00001200`` (a step), ``org/name@REVISION`` (any branch, tag or
    commit) or ``org/name`` (main, the newest). It may begin with ``hub:``. Takes what the manifest lists, into a
    temporary directory that gets its name only after every sha256 is right. What is there already is kept if it is
    the same, and refused if it is another. Raises ``UsageError`` for what can be put right, else ``HubError``.
    """
    repo, revision = _parse(spec)
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / commit.temporary_name(0, atomic_files.new_nonce())
    try:
        with limited_silence(60.0):
            _fetch(repo, revision, temporary)
        return _settle(temporary, directory, spec)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def download_manifest(spec: str) -> dict[str, Any]:
    """The manifest alone of what ``download`` would take. One process; raises as ``download``."""
    repo, revision = _parse(spec)
    with limited_silence(60.0), tempfile.TemporaryDirectory() as temporary:
        return _get_manifest(repo, revision, _resolve(repo, revision), Path(temporary))


def _parse(spec: str) -> tuple[str, str | None]:
    match = SPEC.fullmatch(spec.strip())
    if match is None:
        raise UsageError(
            f"hub checkpoint: {spec!r} is not ORGANISATION/NAME or ORGANISATION/NAME@STEP; write it as in "
            "hub:org/name@1200"
        )
    asked = match["revision"]
    return match["repo"], revision_name(int(asked)) if asked and asked.isdigit() else asked


def _fetch(repo: str, revision: str | None, temporary: Path) -> None:
    """Every file that the manifest lists, of one commit: a push meanwhile cannot mix two checkpoints."""
    oid = _resolve(repo, revision)
    for name in _get_manifest(repo, revision, oid, temporary)["files"]:
        _get(repo, name, oid, temporary)
    shutil.rmtree(temporary / ".cache", ignore_errors=True)  # bookkeeping of huggingface_hub


def _get(repo: str, name: str, oid: str, folder: Path) -> Path:
    return Path(_persist(lambda: hub_api().hf_hub_download(repo, name, revision=oid, local_dir=folder), repo))


def _get_manifest(repo: str, revision: str | None, oid: str, folder: Path) -> dict[str, Any]:
    try:
        return manifests.parse(strict_json.read_bytes(_get(repo, manifests.MANIFEST, oid, folder), manifests.MAX_BYTES))
    except UsageError:
        raise
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(f"{repo} at {revision or 'main'}: manifest.json cannot be read ({error})") from None


def _resolve(repo: str, revision: str | None) -> str:
    """The commit that a revision stands for now."""
    from huggingface_hub.errors import RevisionNotFoundError

    api = hub_api()
    try:
        info = _persist(lambda: api.repo_info(repo, revision=revision), repo)
    except RevisionNotFoundError:
        refs = _persist(lambda: api.list_repo_refs(repo), repo)
        names = sorted({ref.name for ref in (*refs.branches, *refs.tags)})
        more = f"{len(names) - 12} older and " if len(names) > 12 else ""
        raise UsageError(
            f"hub checkpoint: {repo} has no revision {revision}; it has {more}{', '.join(names[-12:])}; "
            "name one of them, or none for the newest"
        ) from None
    return str(info.sha)


def _persist(call: Callable[[], T], repo: str) -> T:
    """Call until it succeeds; network trouble is tried again for a while. Raises as ``download`` says."""
    from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError

    try:
        return retried(call, attempts=ATTEMPTS)
    except GaveUpError as given_up:
        error, problem = given_up.__cause__, given_up.problem
    if isinstance(error, RevisionNotFoundError):
        raise error
    if isinstance(error, RemoteEntryNotFoundError):
        raise UsageError(
            f"hub checkpoint: {repo} lacks a file of a checkpoint ({problem.reason}); it was not pushed by "
            "accel_train, or only in part; for plain weights use --init_from"
        )
    if problem.status in (401, 403, 404):
        raise UsageError(f"hub checkpoint: {repo} cannot be read: {problem.reason}")
    raise HubError(f"{repo} could not be downloaded: {problem.reason}") from error


def _settle(temporary: Path, directory: Path, spec: str) -> Path:
    """Verify, flush, and give it its final name."""
    try:
        checkpoint = commit.verify(temporary)
    except ValueError as error:
        raise HubError(f"{spec} does not verify after the download: {error}") from None
    final = directory / manifests.checkpoint_name(checkpoint.step)
    commit.clear_name(final)
    if final.exists():
        return _same_or_refuse(final, checkpoint, spec)
    for path in temporary.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    commit.fsync_folders(temporary)
    os.rename(temporary, final)
    fsync_directory(directory)
    return final


def _same_or_refuse(final: Path, wanted: manifests.Checkpoint, spec: str) -> Path:
    try:
        here = commit.verify(final).manifest["files"]
    except ValueError as error:
        raise UsageError(f"hub checkpoint: {spec} cannot replace {final} ({error}); delete that one first") from None
    if any(here.get(name) != facts for name, facts in wanted.manifest["files"].items()):
        raise UsageError(
            f"hub checkpoint: {final} exists and differs from {spec}; give an --output_dir of its own, or leave "
            "--resume hub: out to go on from what is there"
        )
    return final
