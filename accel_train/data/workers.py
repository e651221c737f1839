"""torch's DataLoader as the reader of requests, with errors naming the request and its worker."""

import contextlib
import copy
import ctypes
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, get_worker_info

from accel_train.config import UsageError
from accel_train.data.datasets import Batch
from accel_train.data.options import LoaderSettings
from accel_train.data.reading import IDLE, WHOLE_BATCH, LoadingError, Reader, advice_on_memory
from accel_train.data.sampler import Request

POLL_SECONDS = 2.0
"""Time between checks of the workers while a micro-batch is late."""


class Workers:
    """Iteration of the DataLoader over all requests of a process."""

    def __init__(self, reader: Reader, requests: Iterator[Request], settings: LoaderSettings) -> None:
        self._settings = settings
        self._progress = reader.progress
        # The DataLoader does not tell which request it returns or fails at, so the same list is read alongside.
        requests, expected = itertools.tee(requests)
        self._expected = enumerate(expected)
        has_workers = settings.num_workers > 0
        # The DataLoader times out often so that `_wait` can check the workers. `_wait` counts timeout_seconds itself.
        poll_seconds = min(POLL_SECONDS, settings.timeout_seconds)
        loader = DataLoader(
            cast(Any, reader),
            batch_sampler=cast(Any, requests),  # any iterable will do, and each item goes to __getitems__ as it is
            num_workers=settings.num_workers,
            collate_fn=_identity,
            pin_memory=settings.pin_memory,
            timeout=poll_seconds if has_workers else 0,
            prefetch_factor=settings.prefetch_factor if has_workers else None,
            generator=torch.Generator(device="cpu"),  # by default it draws from the global generator
            worker_init_fn=_begin_worker,
            multiprocessing_context=_context_without_shared_lock() if has_workers else None,
        )
        with _preserve_sigchld_handler():
            self._batches: Iterator[Batch] | None = iter(loader)

    def read(self) -> Batch:
        """Return the micro-batch of the next request."""
        number, request = next(self._expected)
        assert self._batches is not None, "read after close"
        if self._settings.num_workers == 0:
            return next(self._batches)
        batch = self._wait(self._batches, number, request)
        if isinstance(batch, LoadingError | UsageError):
            self.close()  # before the error is raised, or the other workers would go on reading
            raise batch
        return batch

    def _wait(self, batches: Iterator[Batch], number: int, request: Request) -> Batch | LoadingError | UsageError:
        """Return the batch, or a new error: the one raised would keep the iterator and its workers alive."""
        started = time.monotonic()
        while True:
            try:
                return next(batches)
            except (LoadingError, UsageError) as error:
                _clear_frames(error)
                kind = type(error)
                # torch puts the worker's traceback before the text.
                return kind(str(error).partition(f"{kind.__name__}: ")[2].rstrip() or str(error))
            except Exception as error:
                # A dying worker also shows as OSError, EOFError or UnpicklingError.
                _clear_frames(error)
                waited = time.monotonic() - started
                # A timeout is the only error without a dead worker.
                if "timed out" not in str(error):
                    return LoadingError(self._explain_death(f"{type(error).__name__}: {error}".strip(), request))
                if waited >= self._settings.timeout_seconds:
                    return LoadingError(self._explain_hang(number % self._settings.num_workers, waited, request))

    def _explain_death(self, message: str, request: Request) -> str:
        dead = "".join(f"It was {self._describe(worker)}. " for worker in self._dead_workers())
        return (
            f"{request} did not arrive: {message.rstrip('.')}. {dead}Often the host ran out of memory: lower "
            "loader.num_workers or prefetch_factor. loader.num_workers=0 shows a crash of the dataset where it happens."
        )

    def _dead_workers(self) -> list[int]:
        """Return the workers that have read something and are dead now."""
        # Retried for a second: closed pipes may be noticed before the end of the process.
        for _ in range(10):
            alive = {process.pid for process in multiprocessing.active_children()}
            pids: list[int] = self._progress[:, 0].tolist()
            dead = [worker for worker, pid in enumerate(pids) if pid > 0 and pid not in alive]
            if dead:
                return dead
            time.sleep(0.1)
        return []

    def _explain_hang(self, worker: int, waited: float, request: Request) -> str:
        return (
            f"loader.timeout_seconds: {self._settings.timeout_seconds:g}: {request} did not arrive within {waited:.0f} "
            f"seconds from {self._describe(worker)}; raise it if the storage is slow; --loader.num_workers 0 shows "
            "where the dataset waits"
        )

    def _describe(self, worker: int) -> str:
        pid, step, sample = self._progress[worker].tolist()
        if sample == IDLE:
            activity = "between two micro-batches"
        elif sample == WHOLE_BATCH:
            activity = f"reading a micro-batch of step {step + 1} at once"
        else:
            activity = f"reading sample {sample} of step {step + 1}"
        return f"worker {worker} (pid {pid}), {activity}"

    def close(self) -> None:
        """End the workers."""
        batches: Any = self._batches
        processes: list[Any] = []
        if batches is not None and self._settings.num_workers > 0:
            processes = batches._workers
        # Deleting the DataLoader's iterator, of which this was the last reference, ends its workers.
        self._batches = None
        del batches
        for process in processes:
            # A hanging worker ignores the DataLoader's SIGTERM.
            if process.is_alive():
                process.kill()
                process.join()


class _Flag:
    """Replacement for `multiprocessing.Event` in the DataLoader, without its lock.

    A worker killed while holding the lock would leave the training process waiting forever.
    """

    def __init__(self, context: BaseContext) -> None:
        # Raw: shared memory without a lock. A bool is written atomically.
        self._value = context.RawValue(ctypes.c_bool, False)

    def set(self) -> None:
        self._value.value = True

    def is_set(self) -> bool:
        return self._value.value


if TYPE_CHECKING:
    AnyQueue = Queue[Any]
else:
    # Generic for type checkers alone.
    AnyQueue = Queue


class _ReportingQueue(AnyQueue):
    """Queue that delivers an error in the place of a micro-batch that its thread could not send.

    Python's own queue prints a traceback and drops the item, and the training process would wait for it until its
    timeout.
    """

    def _on_queue_feeder_error(self, e: Exception, obj: Any) -> None:
        worker = get_worker_info()
        # The training process sends requests, which always fit.
        if worker is None:
            print(f"a request was not sent to the workers: {e}", file=sys.stderr, flush=True)
            return
        number, _ = obj
        # As it is, for `Workers.read` to raise: the DataLoader passes on whatever has the number of a request.
        reader = f"worker {worker.id} (pid {os.getpid()})"
        cause = f"{type(e).__name__}: {e}{advice_on_memory(e)}"
        self.put((number, LoadingError(f"{reader} has read a micro-batch but could not hand it over: {cause}")))


def _context_without_shared_lock() -> BaseContext:
    # A copy, because the context is shared with every other user of multiprocessing.
    context: Any = copy.copy(multiprocessing.get_context())
    context.Event = lambda: _Flag(context)
    context.Queue = lambda: _ReportingQueue(ctx=context)
    return context


def _begin_worker(_: int) -> None:
    # A launcher signals all processes. The trainer still needs its workers until the ranks agree on a step to save.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The trainer disables the garbage collector and runs it by hand.
    gc.enable()


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and its causes. They would keep a worker's error, and so its batch, alive."""
    following: BaseException | None = error
    while following is not None:
        traceback.clear_frames(following.__traceback__)
        following = following.__context__


def _identity(batch: Any) -> Any:
    return batch


@contextlib.contextmanager
def _preserve_sigchld_handler() -> Generator[None, None, None]:
    """Restore the handler of SIGCHLD after the DataLoader has replaced it.

    The DataLoader's handler raises in the middle of a collective or of a checkpoint's commit. A dead worker is
    noticed without it, when its data is needed.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    # Only the main thread may set handlers, and Windows has no SIGCHLD.
    if not is_main_thread or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
