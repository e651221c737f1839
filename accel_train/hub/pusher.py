"""Checkpoints on the Hub: pushed by a process beside the loop, checked before it starts, loaded back by step.

Training offers each committed checkpoint; a queue on the disk and a pusher process do the rest. Nothing that the Hub
does or fails to do raises into training: it is said in the log, kept in the queue and shown at the end.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import accel_train
from accel_train.hub.errors import describe
from accel_train.hub.options import HubConfig, refuse_without_metric
from accel_train.hub.queue import Entry, HubQueue, Reason
from accel_train.store import names, run_file
from accel_train.store.manifest import Checkpoint

logger = logging.getLogger(__name__)

LAST_STARTS = 5
"""How often the end of training starts the pusher anew after it ended by itself."""


@dataclass(frozen=True)
class HubStatus:
    """What became of the checkpoints of a run that were to be pushed."""

    pushed: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    """Still in the queue."""
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Refused by the Hub, with the reason."""

    @property
    def code(self) -> int:
        """0 if all that was to be pushed is on the Hub, else 1. Not the exit code of training."""
        return 1 if self.waiting or self.failed else 0


class Pusher:
    """The training process's side. Every rank may hold one; it does something on the main process alone, if it is on.

    Made after ``check_repository``. What an earlier start left in the queue is pushed from then on. Raises
    ``UsageError`` for ``push: best`` without a metric.
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
        refuse_without_metric(config, best_metric)
        self._config = config
        self._metric, self._sign = best_metric, 1.0 if best_mode == "min" else -1.0
        self._queue = HubQueue(run)
        self._worker: subprocess.Popen[bytes] | None = None
        self._told = self._queue.log_size()
        self._newest: Checkpoint | None = None
        self.broken_off = False
        """``finish`` was asked to stop while it waited."""
        self._on = is_main and config.repo_id is not None
        if is_main and (left := sorted(self._queue.names())):
            if self._on:
                logger.info("hub: %s left by the last start will be pushed", ", ".join(left))
                self._guarded(self._wake)
            else:
                logger.warning("hub: %s still to be pushed; %s", ", ".join(left), self._command())

    def offer(self, checkpoint: Checkpoint) -> None:
        """Take note of a committed checkpoint. A few small file operations; never raises.

        Offering one again changes nothing, so a resumed run offers the one that it resumes from: the process may have
        died between its commit and its offer.
        """
        if self._on:
            self._guarded(lambda: self._offer(checkpoint))

    def busy(self) -> set[str]:
        """Names of checkpoints that retention must keep: waiting or being pushed. Every process may ask."""
        return self._queue.names()

    def finish(self, *, preempted: bool = False, asked_to_stop: Callable[[], bool] = lambda: False) -> HubStatus:
        """End the pusher, after at most ``finish_minutes``; says what is pushed and what is not. Never raises.

        ``preempted`` waits for nothing, and leaves ``push: last`` to the start that goes on; ``asked_to_stop`` ends the
        waiting, and what still waits stays in the queue. Main process.
        """
        if not self._on:
            return HubStatus()
        try:
            if not preempted:
                self._guarded(lambda: self._finish(asked_to_stop))
        finally:
            self.close()
        self._guarded(self._tell)
        status = self._status()
        self._guarded(lambda: self._record(status))
        self._say(status)
        return status

    def close(self) -> None:
        """End the pusher process at once. What it had not finished stays in the queue."""
        if self._worker is not None:
            if self._worker.stdin is not None:
                self._worker.stdin.close()
            self._worker.kill()
            self._worker.wait()
            self._worker = None

    def _offer(self, checkpoint: Checkpoint) -> None:
        self._newest = checkpoint
        name, run_id = checkpoint.path.name, str(checkpoint.manifest.get("run_id"))
        offers = self._queue.offers(run_id)
        if offers.get("last") != name:
            offers |= {"committed": int(offers["committed"]) + 1, "last": name}
            if self._due(checkpoint, offers):
                self._queue.add(new_entry(checkpoint, self._config, self._config.push))
            self._queue.save_offers(offers)
        if self._queue.names():
            self._wake()
        self._tell()

    def _due(self, checkpoint: Checkpoint, offers: dict[str, Any]) -> bool:
        if self._config.push == "every":
            return int(offers["committed"]) % self._config.push_every == 0
        if self._config.push == "last":
            return False
        figure = checkpoint.manifest.get("metrics", {}).get(self._metric)
        if not isinstance(figure, (int, float)) or not math.isfinite(figure):
            logger.warning("hub.push best: %s has no figure %s and is not pushed", checkpoint.path.name, self._metric)
            return False
        better = "best" not in offers or self._sign * figure < self._sign * float(offers["best"])
        if better:
            offers["best"] = figure
        return better

    def _wake(self) -> None:
        """Start the pusher if it does not run, else tell it to look."""
        if self._worker is not None and self._worker.poll() is not None:
            self.close()
        if self._worker is None:
            self._worker = _start_worker(self._queue.run)
        elif self._worker.stdin is not None:
            # Full of bytes not read yet, or it has just ended: the next offer starts it again.
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._worker.stdin.fileno(), b"\n")

    def _finish(self, asked_to_stop: Callable[[], bool]) -> None:
        newest, queue = self._newest, self._queue
        if self._config.push == "last" and newest is not None:
            queue.add(new_entry(newest, self._config, "last"))
        minutes = self._config.finish_minutes
        if waiting := sorted(queue.names()):
            logger.info("hub: waiting up to %g minutes for %s", minutes, ", ".join(waiting))
        deadline, starts = time.monotonic() + 60 * minutes, 0
        while queue.names() and time.monotonic() < deadline:
            if self._worker is None or self._worker.poll() is not None:
                starts += 1
                if starts > LAST_STARTS:
                    break
                self._wake()
            if asked_to_stop():
                self.broken_off = True
                logger.info("hub: asked to stop; what still waits is pushed by the next start")
                break
            time.sleep(0.05)

    def _status(self) -> HubStatus:
        queue = self._queue
        return HubStatus(tuple(sorted(queue.pushed())), tuple(sorted(queue.names())), queue.failed())

    def _record(self, status: HubStatus) -> None:
        """Into run.json, beside what else a person looks for there."""
        run = self._queue.run
        if (run / names.RUN_FILE).exists():
            hub = {"repo_id": self._config.repo_id, "pending": list(status.waiting), "failed": dict(status.failed)}
            run_file.write_run(run, run_file.load(run) | {"hub": hub})

    def _say(self, status: HubStatus) -> None:
        text = f"hub: {self._config.repo_id}: {len(status.pushed)} pushed, {len(status.waiting)} waiting, "
        text += f"{len(status.failed)} failed; hub status {status.code}"
        if status.code == 0:
            logger.info("%s", text)
            return
        for name, reason in status.failed.items():
            logger.warning("hub: %s failed: %s", name, reason)
        logger.warning("%s; waiting: %s; %s", text, ", ".join(status.waiting) or "none", self._command())

    def _command(self) -> str:
        command = shlex.join(["accel-train", "checkpoints", "push", str(self._queue.run)])
        return f"why: {self._queue.directory}/log.jsonl; go on with: {command}"

    def _tell(self) -> None:
        """Repeat in training's log what the pusher has written since the last time."""
        events, self._told = self._queue.events(self._told)
        for event, following in zip(events, [*events[1:], {}], strict=False):
            if event["event"] == following.get("event") == "retry":
                continue  # of many tries in a row the last says enough
            level = logging.INFO if event["event"] in ("pushed", "coalesced") else logging.WARNING
            details = event.get("url") or event.get("reason")
            logger.log(level, "hub: %s %s: %s", event["event"], event.get("checkpoint", ""), details)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Whatever the Hub's side meets, training goes on."""
        try:
            action()
        except Exception as error:
            logger.warning("hub: %s", describe(error).reason)


def push_the_rest(
    run: Path, newest: Checkpoint, config: HubConfig, best_metric: str | None, best_mode: Literal["min", "max"]
) -> HubStatus:
    """For a run that has no step left: push what its last start had no time for, as its end would have. Main process.

    That start may have been asked to stop in its last step, which leaves ``push: last`` to the next one, or have ended
    with a queue. Raises and waits as ``Pusher`` does.
    """
    pusher = Pusher(run, config, is_main=True, best_metric=best_metric, best_mode=best_mode)
    pusher.offer(newest)
    return pusher.finish()


def _start_worker(run: Path) -> subprocess.Popen[bytes]:
    """Not in a session of its own: it ends with the training process, and its pipe is how it knows."""
    package = str(Path(accel_train.__file__).parents[1])
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}
    search = {"PYTHONPATH": os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)}
    with (run / "hub" / "worker.log").open("ab") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "accel_train.hub.worker", str(run), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | quiet | search,
        )
    assert worker.stdin is not None
    os.set_blocking(worker.stdin.fileno(), False)
    return worker


def new_entry(checkpoint: Checkpoint, config: HubConfig, reason: Reason) -> Entry:
    """What the queue keeps of a checkpoint and of the options at that time. ``repo_id`` must be set."""
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
    )
