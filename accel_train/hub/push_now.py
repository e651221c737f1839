"""Push in the foreground: the command ``accel-train checkpoints push``."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path

from accel_train.config import UsageError
from accel_train.hub.client import check_repository, limit_silence
from accel_train.hub.errors import HubError, NotPushableError, Problem, StateMissingError
from accel_train.hub.options import HubConfig
from accel_train.hub.pusher import new_entry
from accel_train.hub.queue import Entry, HubQueue
from accel_train.hub.repository import push_checkpoint, pushed_manifest
from accel_train.hub.retry import GaveUpError, retried
from accel_train.store import commit

logger = logging.getLogger(__name__)


def push_now(run_or_checkpoint: Path, config: HubConfig) -> list[str]:
    """Push checkpoints in the foreground and return the URLs of the commits.

    For a run: its waiting and failed entries, or its newest checkpoint if there are none. Entries are pushed with their
    queued options, or with those of ``config`` if it names a repository. For a checkpoint directory: that checkpoint.
    A checkpoint of a run is in its queue while it is pushed, so that retention keeps it. Network errors are retried for
    ``finish_minutes``. Raises ``UsageError`` for errors of the user, and ``HubError`` if the Hub is unreachable or
    refuses. Unfinished entries of a run then stay in its queue.
    """
    limit_silence()
    path = run_or_checkpoint
    if (path / "manifest.json").is_file():
        return [_push_directory(path, config)]
    if not (path / "checkpoints").is_dir():
        raise UsageError(f"{path} is neither a run nor a checkpoint: no checkpoints/ and no manifest.json there")
    queue = HubQueue(path)
    with queue.pushing() as holder:
        if holder is not None:
            raise UsageError(f"{path} is being pushed by {holder}, which continues by itself; wait for it or end it")
        return _push_run(queue, config)


def _push_directory(path: Path, config: HubConfig) -> str:
    """Push one checkpoint directory and return the URL of its commit."""
    entry = _entry_of(path, config)
    check_repository(config)
    if path.parent.name == "checkpoints":
        return _push_of_run(HubQueue(path.parents[1]), entry, config.finish_minutes)
    # Outside a run there is no queue to record the push in.
    try:
        pushed = _push_with_retries(path, entry, path.parent, config.finish_minutes)
    except NotPushableError as error:
        raise UsageError(f"{error}; it is not pushed") from None
    return pushed["url"]


def _push_of_run(queue: HubQueue, entry: Entry, minutes: float) -> str:
    """Push one checkpoint of a run, from its queue like all others, and return the URL of the commit."""
    with queue.pushing() as holder:
        is_queued = entry.checkpoint in queue.names()
        if holder is None:
            # An entry that waits already keeps its options, in case this push fails.
            if not is_queued:
                queue.add(entry)
            return _push_queued(queue, entry, minutes)
    if is_queued:
        raise UsageError(f"{entry.checkpoint} is in the queue of {holder}, which pushes it; wait for it or end it")
    queue.add(entry)
    raise HubError(
        f"{entry.checkpoint} is queued: {holder}, which is pushing this run, takes it next; if that ends first, the "
        f"next start pushes it, or: accel-train checkpoints push {shlex.quote(str(queue.run))}"
    )


def _push_run(queue: HubQueue, config: HubConfig) -> list[str]:
    queue.retry_failed()
    entries = queue.entries()
    if config.repo_id is not None:
        entries = [_with_options(entry, config) for entry in entries]
    if not entries:
        newest, reasons = commit.newest_verified(queue.run / "checkpoints")
        if newest is None:
            problem = f"{queue.run} has no checkpoint to push"
            if reasons:
                problem += ": " + "; ".join(reasons)
            raise UsageError(problem)
        entries = [_entry_of(newest.path, config)]
    repositories = {(entry.repo_id, entry.private) for entry in entries}
    # All repositories are checked before the first upload, which may take long.
    for repo_id, private in sorted(repositories):
        check_repository(replace(config, repo_id=repo_id, private=private))
    waiting = queue.names()
    for entry in entries:
        # If nothing was queued, the newest is added now: retention must not delete it during the upload.
        if entry.checkpoint not in waiting:
            queue.add(entry)
    urls: list[str] = []
    problems: list[str] = []
    for entry in entries:
        try:
            urls.append(_push_queued(queue, entry, config.finish_minutes))
        # One that cannot be pushed must not hold back the others.
        except (UsageError, HubError) as error:
            problems.append(str(error))
    if problems:
        raise HubError(f"{len(urls)} pushed, {len(problems)} not: {'; '.join(problems)}")
    return urls


def _entry_of(path: Path, config: HubConfig) -> Entry:
    if config.repo_id is None:
        raise UsageError(
            f"{path}: the target is unknown, because nothing in the queue names it; give hub.repo_id ORGANISATION/NAME"
        )
    try:
        entry = new_entry(commit.verify(path), config, "hand")
    except ValueError as error:
        raise UsageError(f"{error}; only a checkpoint that verifies is pushed") from None
    try:
        pushed_manifest(path, entry.include_state)
    except NotPushableError as error:
        raise UsageError(str(error)) from None
    return entry


def _with_options(entry: Entry, config: HubConfig) -> Entry:
    assert config.repo_id is not None
    return replace(
        entry,
        repo_id=config.repo_id,
        include_state=config.include_state,
        private=config.private,
        revisions=config.revisions,
        license=config.license or "",
    )


def _push_queued(queue: HubQueue, entry: Entry, minutes: float) -> str:
    """Push one checkpoint of a run, update the queue, and return the URL of the commit."""
    path = queue.run / "checkpoints" / entry.checkpoint
    try:
        pushed = _push_with_retries(path, entry, queue.run, minutes)
    except StateMissingError as error:
        # An entry queued without the state stays.
        if entry in queue.entries():
            queue.drop(entry, str(error))
        raise UsageError(str(error)) from None
    except NotPushableError as error:
        # The checkpoint does not verify, so a later start could not push it either.
        queue.drop(entry, str(error))
        raise UsageError(f"{error}; only a checkpoint that verifies is pushed") from None
    queue.done(entry, pushed)
    return pushed["url"]


def _push_with_retries(path: Path, entry: Entry, run: Path, minutes: float) -> dict[str, str]:
    def log_wait(seconds: float, problem: Problem) -> None:
        logger.warning("hub: %s, again in %.0f s: %s", entry.checkpoint, seconds, problem.reason)

    try:
        return retried(lambda: push_checkpoint(path, entry, run), seconds=60 * minutes, waiting=log_wait)
    except GaveUpError as error:
        raise HubError(f"{entry.checkpoint} to {entry.repo_id}: {error.problem.reason}") from error.__cause__
