"""Blocks of data made in order, by worker processes where the work is worth their start."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Literal, TypeVar

from accel_train.data.loader import usable_cores

T = TypeVar("T")

SECONDS_WORTH_WORKERS = 15.0
"""A worker imports torch and the script that was started, which takes seconds of each core."""


def blocks_in_order(
    make: Callable[[int], T], count: int, workers: int | Literal["auto"], sharing: int = 1
) -> Iterator[T]:
    """make(0), make(1), ..., make(count - 1), which may differ in nothing but the time they take.

    The first two are made here. auto: one worker a core, or fewer where `sharing` processes do the same on this host,
    if the others would take longer than 15 seconds. Workers are spawned, not forked, so that the caller may have
    threads and a process group; `make` must be picklable. They end with the iterator, and with this process even where
    it is killed.
    """
    if count:
        yield make(0)  # imports what it needs
    if count > 1:
        started = time.perf_counter()
        yield make(1)
        seconds = (count - 2) * (time.perf_counter() - started)
        if workers == "auto":
            workers = usable_cores() // sharing if seconds > SECONDS_WORTH_WORKERS else 0
        yield from _made_by(make, range(2, count), workers) if workers else map(make, range(2, count))


def _made_by(make: Callable[[int], T], numbers: range, workers: int) -> Iterator[T]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_end_with_parent)
    try:
        yield from pool.map(make, numbers)
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A worker waits for work on a pipe that it holds open itself, so that it would outlive a killed parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def even_shares(wanted: int | None, default: Sequence[int]) -> Sequence[int]:
    """``wanted`` dealt to as many as ``default`` has, as evenly as whole numbers can; None: the default itself."""
    count = len(default)
    return default if wanted is None else [wanted * (k + 1) // count - wanted * k // count for k in range(count)]
