"""Push in the foreground, as `accel-train checkpoints push` does."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from accel_train.config import UsageError
from accel_train.hub.access import check_repository
from accel_train.hub.client import limit_silence
from accel_train.hub.errors import HubError, NotPushableError, Problem
from accel_train.hub.options import HubConfig
from accel_train.hub.pusher import new_entry
from accel_train.hub.queue import Entry, HubQueue
from accel_train.hub.repository import push_checkpoint
from accel_train.hub.retry import GaveUpError, retried
from accel_train.store import commit

logger = logging.getLogger(__name__)


def push_now(run_or_checkpoint: Path, config: HubConfig) -> list[str]:
    """Push in the foreground, as ``accel-train checkpoints push`` does; returns the addresses of the commits.

    A run: all that waits and all that the Hub refused before, each as it was queued (but where ``config`` names a
    repository, as ``config`` says); with nothing of that, its newest checkpoint. A checkpoint directory: that one.
    Network trouble is tried again for ``finish_minutes``. Raises ``UsageError`` for what can be put right here and
    ``HubError`` where the Hub cannot be reached or refuses; what a run had waiting then still waits.
    """
    limit_silence()
    path = run_or_checkpoint
    if (path / "manifest.json").is_file():
        entry, minutes = _entry_of(path, config), config.finish_minutes
        check_repository(config)
        if path.parent.name == "checkpoints":
            return [_push_queued(HubQueue(path.parents[1]), entry, minutes)]
        return [_push_patiently(path, entry, path.parent, minutes)["url"]]
    if not (path / "checkpoints").is_dir():
        raise UsageError(f"{path} is neither a run nor a checkpoint: no checkpoints/ and no manifest.json there")
    queue = HubQueue(path)
    with queue.pushing() as holder:
        if holder is not None:
            raise UsageError(f"{path} is being pushed by {holder}, which goes on by itself; wait for it or end it")
        return _push_run(queue, config)


def _push_run(queue: HubQueue, config: HubConfig) -> list[str]:
    queue.retry_failed()
    entries = queue.entries()
    if config.repo_id is not None:
        entries = [_with_options(entry, config) for entry in entries]
    if not entries:
        newest, reasons = commit.newest_verified(queue.run / "checkpoints")
        if newest is None:
            raise UsageError(f"{queue.run} has no checkpoint to push{': ' if reasons else ''}{'; '.join(reasons)}")
        entries = [_entry_of(newest.path, config)]
    for repo_id, private in sorted({(entry.repo_id, entry.private) for entry in entries}):
        check_repository(replace(config, repo_id=repo_id, private=private))
    urls: list[str] = []
    problems: list[str] = []
    for entry in entries:
        try:
            urls.append(_push_queued(queue, entry, config.finish_minutes))
        except (UsageError, HubError) as error:
            problems.append(str(error))
    if problems:
        raise HubError(f"{len(urls)} pushed, {len(problems)} not: {'; '.join(problems)}")
    return urls


def _entry_of(path: Path, config: HubConfig) -> Entry:
    if config.repo_id is None:
        raise UsageError(f"{path}: where to? Nothing is queued that would say so; give hub.repo_id ORGANISATION/NAME")
    try:
        return new_entry(commit.verify(path), config, "hand")
    except ValueError as error:
        raise UsageError(f"{error}; only a checkpoint that verifies is pushed") from None


def _with_options(entry: Entry, config: HubConfig) -> Entry:
    assert config.repo_id is not None
    return replace(
        entry,
        repo_id=config.repo_id,
        include_state=config.include_state,
        private=config.private,
        revisions=config.revisions,
    )


def _push_queued(queue: HubQueue, entry: Entry, minutes: float) -> str:
    """Push one checkpoint of a run and keep the run's record of it; returns the address of its commit."""
    try:
        where = _push_patiently(queue.run / "checkpoints" / entry.checkpoint, entry, queue.run, minutes)
    except UsageError as error:
        queue.drop(entry, str(error))
        raise
    queue.done(entry, where)
    return where["url"]


def _push_patiently(path: Path, entry: Entry, run: Path, minutes: float) -> dict[str, str]:
    def waiting(seconds: float, problem: Problem) -> None:
        logger.warning("hub: %s, again in %.0f s: %s", entry.checkpoint, seconds, problem.reason)

    try:
        return retried(lambda: push_checkpoint(path, entry, run), seconds=60 * minutes, waiting=waiting)
    except NotPushableError as error:
        raise UsageError(f"{error}; only a checkpoint that verifies is pushed") from None
    except GaveUpError as error:
        raise HubError(f"{entry.checkpoint} to {entry.repo_id}: {error.problem.reason}") from error.__cause__
