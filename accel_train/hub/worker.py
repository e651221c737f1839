"""Push checkpoints in the background of training: ``python -m accel_train.hub.worker RUN TRAINER_PID``.

The process takes checkpoints from the queue of the run one at a time and retries until the Hub has accepted or refused
each. It exits with the training process. All of its state is in the queue, so the next start continues from there. A
separate process keeps the interpreter lock and hanging connections away from the training loop.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from accel_train.hub.errors import NotPushableError, Problem, describe
from accel_train.hub.queue import Entry, HubQueue
from accel_train.hub.retry import backoff_seconds
from accel_train.store.strict_json import UnreadableError

NICENESS = 10
"""Lowers the priority, so that the training loop goes first when cores are short."""
POLL_SECONDS = 30.0
"""Seconds between an idle worker's checks for entries queued by hand. Training wakes it immediately."""
LOCK_PATIENCE_SECONDS = 60.0


def push_one(queue: HubQueue, entry: Entry) -> Problem | None:
    """Make one attempt and return its problem, if any. The entry is then pushed, failed or still waiting.

    A checkpoint that is gone or damaged has failed: it should have been pushed, and the status of the run must show
    that. One that cannot be read now waits.
    """
    from accel_train.hub.repository import push_checkpoint

    path = queue.run / "checkpoints" / entry.checkpoint
    try:
        if _is_gone(path):
            raise NotPushableError(f"{path} no longer exists")
        where = push_checkpoint(path, entry, queue.run)
    except NotPushableError as error:
        queue.fail(entry, str(error))
        return None
    except Exception as error:
        # Every error of the Hub, its client and the disk ends here: none may end the worker.
        problem = describe(error)
        if problem.retry:
            queue.log("retry", checkpoint=entry.checkpoint, reason=problem.reason)
        else:
            queue.fail(entry, problem.reason, problem.status)
        return problem
    queue.done(entry, where)
    return None


def _is_gone(path: Path) -> bool:
    """Return True if no directory is there. Raises ``UnreadableError`` if that cannot be determined now."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read now: {error.strerror or error}") from None


def serve(queue: HubQueue, idle: Callable[[], None]) -> None:
    """Push waiting entries forever. ``idle`` blocks until the queue may have changed."""
    failures = 0
    stuck: Entry | None = None
    while True:
        entry = queue.next(stuck)
        stuck = None
        if entry is None:
            idle()
            continue
        problem = push_one(queue, entry)
        if problem is None or not problem.retry:
            failures = 0
            continue
        if problem.of_checkpoint:
            stuck = entry
        failures += 1
        time.sleep(backoff_seconds(failures, problem))


def end_with(trainer: int, woken: threading.Event) -> None:
    """Watch the pipe from the training process. A byte wakes the worker, and the end of the pipe or trainer ends it.

    An interrupted push stays in the queue for the next start, so there is nothing to clean up.
    """
    # The parent is checked as well as the pipe: a process forked by the trainer would keep the pipe open.
    while os.getppid() == trainer:
        ready, _, _ = select.select([0], [], [], 0.5)
        if not ready:
            continue
        received = os.read(0, 4096)
        if not received:
            break
        woken.set()
    # This is not the main thread, where `sys.exit` would end the process.
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Serve the queue of a run. ``arguments`` are RUN and TRAINER_PID. Standard input is the pipe from the trainer."""
    run = Path(arguments[0])
    trainer = int(arguments[1])
    # These signals are meant for the trainer, which decides when to end.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.nice(NICENESS)
    woken = threading.Event()
    threading.Thread(target=end_with, args=(trainer, woken), daemon=True).start()
    from accel_train.hub.client import limit_silence

    limit_silence()
    queue = HubQueue(run)

    def idle() -> None:
        woken.wait(POLL_SECONDS)
        woken.clear()

    # The worker of an earlier start may hold the lock until it notices that its trainer is gone.
    with queue.pushing(LOCK_PATIENCE_SECONDS) as holder:
        if holder is None:
            serve(queue, idle)
        # `serve` never returns, so another process has the lock.
        queue.log("waits", reason=f"{holder} is pushing this run")


if __name__ == "__main__":
    main(sys.argv[1:])
