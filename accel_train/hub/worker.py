"""The process that pushes while training goes on: ``python -m accel_train.hub.worker RUN TRAINER_PID``.

It takes checkpoints from the queue of the run one at a time, tries until the Hub has them or refuses them, and ends
when the training process does: everything it knows is in the queue, and the next start goes on from there. It is a
process so that neither the interpreter lock nor a hanging connection is the loop's.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from accel_train.hub.errors import NotPushableError, Problem, describe
from accel_train.hub.queue import Entry, HubQueue
from accel_train.hub.retry import backoff_seconds

NICENESS = 10
"""The loop goes first where cores are short."""
POLL_SECONDS = 30.0
"""How often an idle pusher looks for what was queued by hand; training wakes it at once."""
LOCK_PATIENCE_SECONDS = 60.0


def push_one(queue: HubQueue, entry: Entry) -> Problem | None:
    """One attempt; returns what went wrong. Afterwards the entry is pushed, failed, dropped, or waits as before."""
    from accel_train.hub.repository import push_checkpoint

    path = queue.run / "checkpoints" / entry.checkpoint
    if not path.is_dir():
        queue.drop(entry, f"{path} is not there any more")
        return None
    try:
        where = push_checkpoint(path, entry, queue.run)
    except NotPushableError as error:
        queue.drop(entry, str(error))
        return None
    except Exception as error:  # the one place where every error of the Hub and of its client ends
        problem = describe(error)
        if problem.retry:
            queue.log("retry", checkpoint=entry.checkpoint, reason=problem.reason)
        else:
            queue.fail(entry, problem.reason)
        return problem
    queue.done(entry, where)
    return None


def serve(queue: HubQueue, idle: Callable[[], None]) -> None:
    """Push what waits, for ever; ``idle`` returns when it is worth another look."""
    failures = 0
    while True:
        entry = queue.next()
        if entry is None:
            idle()
            continue
        problem = push_one(queue, entry)
        failures = failures + 1 if problem is not None and problem.retry else 0
        if problem is not None and problem.retry:
            time.sleep(backoff_seconds(failures, problem))


def end_with(trainer: int, woken: threading.Event) -> None:
    """Watch the pipe from the training process: a byte wakes the pusher, its end or that of the process ends it.

    Both are looked at, because a process forked by the trainer keeps the pipe open. Nothing is left to be tidied up:
    a push that is cut off is found in the queue by the next start.
    """
    while os.getppid() == trainer:
        ready, _, _ = select.select([0], [], [], 0.5)
        if ready and not os.read(0, 4096):
            break
        if ready:
            woken.set()
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """``RUN TRAINER_PID``, with the pipe from the training process as standard input."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):  # meant for the trainer, which decides when to end
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.nice(NICENESS)
    woken = threading.Event()
    threading.Thread(target=end_with, args=(int(arguments[1]), woken), daemon=True).start()
    from accel_train.hub.client import limit_silence

    limit_silence()
    queue = HubQueue(Path(arguments[0]))

    def idle() -> None:
        woken.wait(POLL_SECONDS)
        woken.clear()

    with queue.pushing(LOCK_PATIENCE_SECONDS) as holder:
        if holder is None:
            serve(queue, idle)
        queue.log("waits", reason=f"{holder} is pushing this run")


if __name__ == "__main__":
    main(sys.argv[1:])
