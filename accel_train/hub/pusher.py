"""Training's side of pushing to the Hub.

Training offers each committed checkpoint. A queue on disk and a worker process do the rest. No error of the Hub is
raised into training: errors are logged, kept in the queue and summarized at the end.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import accel_train
from accel_train.hub.errors import describe
from accel_train.hub.options import HubConfig, refuse_choice_of_pushes
from accel_train.hub.queue import Entry, HubQueue, Reason
from accel_train.store import names, run_file
from accel_train.store.manifest import Checkpoint
from accel_train.store.strict_json import Json

logger = logging.getLogger(__name__)

LAST_STARTS = 5
"""Maximum number of worker starts in ``finish``."""


@dataclass(frozen=True)
class HubStatus:
    """Names of a run's checkpoints by the outcome of their push."""

    pushed: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    """Still in the queue."""
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons of those that the Hub has refused, or that were gone or damaged before they were pushed."""

    @property
    def code(self) -> int:
        """0 if nothing is waiting or failed, else 1. It is not the exit code of training."""
        return int(bool(self.waiting or self.failed))


class Pusher:
    """Queue checkpoints and run the worker process for their pushes.

    Every rank may hold one. It acts on the main process only, and only if a repository is configured. Build it after
    ``check_repository``. Entries left in the queue by an earlier start are pushed from then on, and so are those that
    the repository refused. Raises ``UsageError`` for ``push: best`` without a metric.
    """

    def __init__(
        self,
        run: Path,
        config: HubConfig,
        *,
        is_main: bool,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
    ) -> None:
        refuse_choice_of_pushes(config, best_metric)
        self._config = config
        self._metric = best_metric
        self._mode = best_mode
        self._queue = HubQueue(run)
        self._worker: subprocess.Popen[bytes] | None = None
        # Older events were repeated in the log of their own start.
        self._log_position = self._queue.log_size()
        """Bytes of the worker's log already repeated in the log of training."""
        self._offers: Json = {}
        """Record of the checkpoints offered so far (``HubQueue.offers``). Empty until it has been read."""
        self._newest: Checkpoint | None = None
        self._held: Checkpoint | None = None
        """The last commit until it is offered. The metrics of an evaluation may still join it."""
        self.broken_off = False
        """True if ``finish`` was asked to stop while it waited."""
        self._on = is_main and config.repo_id is not None
        if is_main:
            self._guarded(self._take_over_queue)

    def offer(self, checkpoint: Checkpoint) -> None:
        """Queue a committed checkpoint if the options select it. Costs a few small file operations. Never raises.

        Offering one twice changes nothing, so a resumed run offers its checkpoint again: the process may have died
        between commit and offer.
        """
        if self._on:
            self._guarded(lambda: self._offer(checkpoint))

    def hold(self, checkpoint: Checkpoint) -> None:
        """Keep a committed checkpoint for ``offer_held``. Replaces one held before."""
        self._held = checkpoint

    def offer_held(self) -> None:
        """Offer the held checkpoint, if any. One step after the commit it has the metrics of its evaluation."""
        if self._held is not None:
            self.offer(self._held)
            self._held = None

    def busy(self) -> set[str]:
        """Return the names of waiting checkpoints and the one being pushed. Retention must keep them. Any process."""
        return self._queue.names()

    def finish(self, *, preempted: bool = False, asked_to_stop: Callable[[], bool] = lambda: False) -> HubStatus:
        """Wait up to ``finish_minutes`` for the queue, end the worker and log the status. Main process. Never raises.

        ``preempted`` skips the wait and leaves ``push: last`` to the next start. ``asked_to_stop`` is polled and ends
        the wait early. Unfinished entries stay in the queue.
        """
        if not self._on:
            return HubStatus()
        try:
            if not preempted:
                self._guarded(lambda: self._finish(asked_to_stop))
        finally:
            self.close()
        self._guarded(self._repeat_log)
        # Counted after the worker has ended, so that nothing moves between the folders meanwhile.
        status = self._status()
        self._guarded(lambda: self._record(status))
        self._log_status(status)
        return status

    def close(self) -> None:
        """Kill the worker process. Unfinished entries stay in the queue."""
        if self._worker is not None:
            if self._worker.stdin is not None:
                self._worker.stdin.close()
            # Killed at once, because the next start continues a push from what the Hub has by then.
            self._worker.kill()
            self._worker.wait()
            self._worker = None

    def _take_over_queue(self) -> None:
        """Push the entries left by an earlier start, or name the command for it if pushing is off."""
        if self._on:
            # The check has passed: the right token, or the repository, is there now.
            self._queue.retry_failed(refused_by=self._config.repo_id)
        left = sorted(self._queue.names())
        if not left:
            return
        if not self._on:
            logger.warning("hub: %s still to be pushed; %s", ", ".join(left), self._command())
            return
        targets: dict[str, list[str]] = {}
        for entry in self._queue.entries():
            targets.setdefault(entry.repo_id, []).append(entry.checkpoint)
        for repo_id, waiting in targets.items():
            logger.info("hub: %s left by the last start will be pushed to %s", ", ".join(waiting), repo_id)
        self._wake()

    def _offer(self, checkpoint: Checkpoint) -> None:
        self._newest = checkpoint
        name = checkpoint.path.name
        offers = dict(self._offers) or self._queue.offers(str(checkpoint.manifest.get("run_id")))
        # A resume offers its checkpoint again, and it must count once.
        if offers.get("last") != name:
            # Counted over all starts of the run, so that every n-th stays every n-th.
            offers["committed"] = int(offers["committed"]) + 1
            offers["last"] = name
            if self._due(checkpoint, offers):
                self._queue.add(new_entry(checkpoint, self._config, self._config.push))
            # Saved after the entry is queued: a crash in between repeats the offer and loses nothing.
            self._queue.save_offers(offers)
        self._offers = offers
        # Not only for this offer: entries may be left, and the worker may have died since the last one.
        if self._queue.names():
            self._wake()
        self._repeat_log()

    def _due(self, checkpoint: Checkpoint, offers: Json) -> bool:
        """Return True if the options select this checkpoint. Updates ``offers["best"]``."""
        if self._config.push == "every":
            return int(offers["committed"]) % self._config.push_every == 0
        if self._config.push == "last":
            return False
        metric = checkpoint.manifest.get("metrics", {}).get(self._metric)
        if not isinstance(metric, (int, float)) or not math.isfinite(metric):
            # Not an error: with evaluations rarer than saves most checkpoints have no metrics.
            logger.warning("hub.push best: %s has no metric %s and is not pushed", checkpoint.path.name, self._metric)
            return False
        if "best" in offers and not self._is_better(metric, float(offers["best"])):
            return False
        offers["best"] = metric
        return True

    def _is_better(self, metric: float, best: float) -> bool:
        if self._mode == "min":
            return metric < best
        return metric > best

    def _wake(self) -> None:
        """Start the worker if it is not running, else wake it."""
        if self._worker is not None and self._worker.poll() is not None:
            self.close()
        if self._worker is None:
            self._worker = _start_worker(self._queue.run)
        elif self._worker.stdin is not None:
            # A full pipe wakes the worker anyway. A worker that has just ended is restarted by the next offer.
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._worker.stdin.fileno(), b"\n")

    def _finish(self, asked_to_stop: Callable[[], bool]) -> None:
        queue = self._queue
        # Only now is it known which one was the last.
        if self._config.push == "last" and self._newest is not None:
            queue.add(new_entry(self._newest, self._config, "last"))
        minutes = self._config.finish_minutes
        waiting = sorted(queue.names())
        if waiting:
            logger.info("hub: waiting up to %g minutes for %s", minutes, ", ".join(waiting))
        deadline = time.monotonic() + 60 * minutes
        starts = 0
        while queue.names() and time.monotonic() < deadline:
            if self._worker is None or self._worker.poll() is not None:
                starts += 1
                # Otherwise a worker that cannot even start would be restarted until the time is over.
                if starts > LAST_STARTS:
                    break
                self._wake()
            if asked_to_stop():
                self.broken_off = True
                logger.info("hub: asked to stop; what still waits is pushed by the next start")
                break
            # Polled, because the queue is a folder, which reports no changes.
            time.sleep(0.05)

    def _status(self) -> HubStatus:
        return HubStatus(
            pushed=tuple(sorted(self._queue.pushed())),
            waiting=tuple(sorted(self._queue.names())),
            failed=self._queue.failed(),
        )

    def _record(self, status: HubStatus) -> None:
        """Write the status into ``run.json``, if the run has one."""
        run = self._queue.run
        if (run / names.RUN_FILE).exists():
            hub: Json = {
                "repo_id": self._config.repo_id,
                "pending": list(status.waiting),
                "failed": dict(status.failed),
            }
            run_file.write_run(run, run_file.load(run) | {"hub": hub})

    def _log_status(self, status: HubStatus) -> None:
        # An earlier start may have pushed to another repository.
        pushed = Counter(str(record.get("repo_id")) for record in self._queue.pushed().values())
        own = str(self._config.repo_id)
        others = "".join(f" (and {pushed[name]} to {name})" for name in sorted(pushed) if name != own)
        text = f"hub: {own}: {pushed[own]} pushed{others}, {len(status.waiting)} waiting, "
        text += f"{len(status.failed)} failed; hub status {status.code}"
        if status.code == 0:
            logger.info("%s", text)
            return
        for name, reason in status.failed.items():
            logger.warning("hub: %s failed: %s", name, reason)
        waiting = ", ".join(status.waiting) or "none"
        logger.warning("%s; waiting: %s; %s", text, waiting, self._command())

    def _command(self) -> str:
        command = shlex.join(["accel-train", "checkpoints", "push", str(self._queue.run)])
        return f"why: {self._queue.directory}/log.jsonl; resume with: {command}"

    def _repeat_log(self) -> None:
        """Repeat the new events of the queue's log in the log of training."""
        events, self._log_position = self._queue.events(self._log_position)
        for event, following in zip(events, [*events[1:], {}], strict=False):
            kind = event["event"]
            if kind == "retry" and following.get("event") == "retry":
                continue  # the last of several retries in a row is enough
            level = logging.WARNING
            if kind in ("pushed", "coalesced"):
                level = logging.INFO
            details = event.get("url") or event.get("reason")
            logger.log(level, "hub: %s %s: %s", kind, event.get("checkpoint", ""), details)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an action and log its error, so that training continues."""
        try:
            action()
        except Exception as error:
            logger.warning("hub: %s", describe(error).reason)


def push_the_rest(
    run: Path, newest: Checkpoint, config: HubConfig, best_metric: str | None, best_mode: Literal["min", "max"]
) -> HubStatus:
    """Push the remaining checkpoints of a run without steps left, as the end of training does. Main process.

    Its last start may have left a queue, or no ``push: last`` because it was asked to stop in its last step.
    Raises and waits like ``Pusher``.
    """
    pusher = Pusher(run, config, is_main=True, best_metric=best_metric, best_mode=best_mode)
    pusher.offer(newest)
    return pusher.finish()


def _start_worker(run: Path) -> subprocess.Popen[bytes]:
    """Start a worker bound to the life of this process."""
    # Progress bars would fill worker.log.
    variables = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}
    # The worker must import this package even if the script's directory alone is on the path.
    package = str(Path(accel_train.__file__).parents[1])
    search_path = [package]
    if os.environ.get("PYTHONPATH"):
        search_path.append(os.environ["PYTHONPATH"])
    variables["PYTHONPATH"] = os.pathsep.join(search_path)
    with (run / "hub" / "worker.log").open("ab") as output:
        # Not in a new session. The end of the pipe tells the worker to end.
        worker = subprocess.Popen(
            [sys.executable, "-m", "accel_train.hub.worker", str(run), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
        )
    assert worker.stdin is not None
    # Training must not block on a pipe that nobody reads.
    os.set_blocking(worker.stdin.fileno(), False)
    return worker


def new_entry(checkpoint: Checkpoint, config: HubConfig, reason: Reason) -> Entry:
    """Build the queue entry of a checkpoint with the current options. ``repo_id`` must be set."""
    assert config.repo_id is not None
    return Entry(
        checkpoint.path.name,
        checkpoint.step,
        str(checkpoint.manifest.get("run_id") or "unknown"),
        config.repo_id,
        include_state=config.include_state,
        private=config.private,
        revisions=config.revisions,
        reason=reason,
        license=config.license or "",
    )
