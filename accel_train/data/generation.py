"""Generate blocks of data in order, in worker processes if the work outweighs their start."""

import itertools
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Literal, TypeVar

from accel_train.cores import usable_cores

T = TypeVar("T")

SECONDS_WORTH_WORKERS = 15.0
"""Shortest work worth starting workers for. Each imports torch and the main script, which takes seconds."""

AHEAD_PER_WORKER = 2
"""Maximum number of blocks per worker that are being made or wait to be taken."""


def blocks_in_order(
    make: Callable[[int], T],
    count: int,
    workers: int | Literal["auto"],
) -> Iterator[T]:
    """Yield make(0), make(1), ..., make(count - 1). All should take about the same time.

    The first two are made in this process. With `workers` auto, the rest goes to one worker per core if it would take
    longer than 15 seconds. Workers are spawned, not forked, so the caller may have threads and a process group. `make`
    must be picklable. Workers end with the iterator, and with this process, even if killed.
    """
    if count > 0:
        # Not timed: the first block also pays for imports.
        yield make(0)
    if count > 1:
        started = time.perf_counter()
        yield make(1)
        seconds = (count - 2) * (time.perf_counter() - started)
        if workers == "auto":
            cores, _ = usable_cores()
            workers = cores if seconds > SECONDS_WORTH_WORKERS else 0
        remaining = range(2, count)
        if workers:
            yield from _map_in_workers(make, remaining, workers)
        else:
            yield from map(make, remaining)


def _map_in_workers(make: Callable[[int], T], numbers: range, workers: int) -> Iterator[T]:
    context = multiprocessing.get_context("spawn")
    # `make` is sent to each worker only once, because it may be large.
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(make,))
    made: deque[Future[T]] = deque()
    try:
        for number in numbers:
            made.append(pool.submit(_make_in_worker, number))
            # Blocks that wait to be taken are in memory, so workers are never far ahead.
            if len(made) > AHEAD_PER_WORKER * workers:
                yield made.popleft().result()
        while made:
            yield made.popleft().result()
    finally:
        # Without this, a caller that stops early would wait for all queued blocks.
        pool.shutdown(cancel_futures=True)


_make_block: Callable[[int], Any] | None = None


def _start_worker(make: Callable[[int], Any]) -> None:
    global _make_block
    _make_block = make
    _exit_with_parent()


def _make_in_worker(number: int) -> Any:
    assert _make_block is not None, "set when the worker started"
    return _make_block(number)


def _exit_with_parent() -> None:
    """End this worker when its parent dies.

    A worker waits for work on a pipe that it holds open itself, so it would outlive a killed parent.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)  # sys.exit would end this thread alone

    threading.Thread(target=watch, daemon=True).start()


def split_evenly(total: int | None, default: Sequence[int]) -> Sequence[int]:
    """Split `total` into `len(default)` whole numbers that differ by at most 1. None: return `default`."""
    if total is None:
        return default
    parts = len(default)
    bounds = [total * part // parts for part in range(parts + 1)]
    return [stop - start for start, stop in itertools.pairwise(bounds)]
