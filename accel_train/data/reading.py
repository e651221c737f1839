"""Reading one micro-batch after another, in worker processes or in the training process.

Samples are seeded one by one, and every failure says which samples were being read, in which step, by whom.
"""

import contextlib
import copy
import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, Protocol, TypeGuard, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from accel_train import rng
from accel_train.data.bucketing import Buckets, Measured
from accel_train.data.sampler import Cut, Draw, Sampler

Batch = dict[str, Tensor]
Collate = Callable[[list[Mapping[str, Tensor]]], Mapping[str, Tensor]]
Row = np.ndarray[Any, np.dtype[np.int64]]

ADDED_FIELDS = ("sample", "occurrence", "position", "weight")
POLL_SECONDS = 2.0
NOTHING, WHOLE = -1, -2
"""In place of the sample that a worker is reading: none, or all of a micro-batch at once."""


class LoadingError(RuntimeError):
    """A sample could not be read; the text names step, samples and worker. All workers are closed."""


class LoaderSettings(NamedTuple):
    """What `LoaderConfig` came to on this machine."""

    num_workers: int
    prefetch_factor: int
    pin_memory: bool
    timeout_seconds: float
    reason: str


class MapDataset(Protocol):
    """len and index. Random augmentation may use python's, numpy's and torch's global generators."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]: ...


@runtime_checkable
class WholeReader(Protocol):
    """A dataset that reads many samples at once, for less than one by one: a memory-mapped table."""

    def batch(self, indices: list[int], /) -> Mapping[str, Tensor]:
        """What torch's `default_collate` makes of these samples, in this order. It must not draw at random."""
        ...


class Request(NamedTuple):
    """One micro-batch to read."""

    step: int
    micro_batch: int
    draws: list[Draw]
    length: int | None = None
    """What the batch is trimmed to; None: as the dataset pads it."""

    def __str__(self) -> str:
        samples = [draw.sample for draw in self.draws]
        shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
        return f"step {self.step}, micro-batch {self.micro_batch} (samples {shown})"


class Plan(NamedTuple):
    """The DataLoader's batch sampler: all requests of this process, computed as they are needed."""

    sampler: Sampler
    cut: Cut
    start_step: int
    max_steps: int
    buckets: Buckets | None = None

    def requests(self) -> Iterator[Request]:
        for step in range(self.start_step, self.max_steps):
            for index, (draws, length) in enumerate(self._micro_batches(step)):
                yield Request(step, index, draws, length)

    def _micro_batches(self, step: int) -> Sequence[tuple[list[Draw], int | None]]:
        if self.buckets is not None:
            return self.buckets.micro_batches(self.sampler.draws(step), self.cut)
        return [(draws, None) for draws in self.sampler.micro_batches(step, *self.cut)]


class Reader:
    """Reads and collates one request, in a worker or in the training process.

    One sample after another, each with global generators seeded by its occurrence; or all at once, unseeded, where
    the dataset is a `WholeReader` and collated by torch's `default_collate`.
    """

    def __init__(self, dataset: MapDataset, seed: int, collate: Collate, num_workers: int) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate
        self._whole = dataset.batch if collate is default_collate and _reads_whole(dataset) else None
        # One row for each worker: its process id, the step and the sample it is reading. Shared, so that it can
        # still be read when the worker is gone.
        self.progress = torch.full((num_workers, 3), NOTHING, dtype=torch.int64, device="cpu").share_memory_()

    def __getitems__(self, request: Request) -> Batch:
        """The DataLoader's name for reading a whole batch at once."""
        worker = get_worker_info()
        if worker is None:
            with contextlib.nullcontext() if self._whole else random_states_kept():
                return self._read(request, np.empty(3, np.int64), "the training process")
        row = self.progress[worker.id].numpy()
        row[0] = os.getpid()
        try:
            return self._read(request, row, f"worker {worker.id} (pid {row[0]})")
        finally:
            row[2] = NOTHING

    def _read(self, request: Request, row: Row, reader: str) -> Batch:
        row[1] = request.step
        try:
            collated = self._each(request, row) if self._whole is None else self._all(request, row, self._whole)
            if request.length is not None:
                collated = cast(Measured, self._dataset).trim(collated, request.length)
            return _with_added_fields(collated, request.draws)
        except Exception as error:
            what = {NOTHING: "collating", WHOLE: "reading"}.get(int(row[2]), f"sample {row[2]}")
            text = f"{what} of {request}, in {reader}: {type(error).__name__}: {error}"
            if get_worker_info() is None:
                raise LoadingError(text) from error
            # A worker's exception arrives as text only, so the traceback goes into it.
            raise LoadingError(f"{text}\n{traceback.format_exc()}") from None

    def _each(self, request: Request, row: Row) -> Mapping[str, Tensor]:
        occurrences = torch.tensor([draw.occurrence for draw in request.draws], device="cpu")
        keys = rng.sample_keys(self._seed, "augmentation", 0, occurrences).tolist()
        samples: list[Mapping[str, Tensor]] = []
        for draw, key in zip(request.draws, keys, strict=True):
            row[2] = draw.sample
            seed_generators(key)
            samples.append(self._dataset[draw.sample])
        row[2] = NOTHING
        return self._collate(samples)

    def _all(self, request: Request, row: Row, read: Callable[[list[int]], Mapping[str, Tensor]]) -> Batch:
        row[2] = WHOLE
        try:
            batch = dict(read([draw.sample for draw in request.draws]))
        except Exception:
            with random_states_kept():
                self._each(request, row)  # names the sample, where one is to blame
            row[2] = WHOLE
            raise
        row[2] = NOTHING
        return batch


def _reads_whole(dataset: MapDataset) -> TypeGuard[WholeReader]:
    """A class that inherits `batch` and has samples of its own must not lose them."""
    if not isinstance(dataset, WholeReader):
        return False
    order = type(dataset).__mro__
    names = ("__getitem__", "batch")
    item, whole = (next((i for i, c in enumerate(order) if name in vars(c)), len(order)) for name in names)
    return whole <= item


class Workers:
    """The DataLoader's iteration with errors that say what was being read, and by whom."""

    def __init__(self, reader: Reader, plan: Plan, settings: LoaderSettings) -> None:
        self._settings, self._progress = settings, reader.progress
        requests, expected = itertools.tee(plan.requests())
        self._expected = enumerate(expected)
        workers = settings.num_workers > 0
        # A timeout of the DataLoader is our chance to look; the patience asked for is counted in `_wait`.
        poll = min(POLL_SECONDS, settings.timeout_seconds)
        loader = DataLoader(
            cast(Any, reader),
            batch_sampler=cast(Any, requests),
            num_workers=settings.num_workers,
            collate_fn=_as_it_is,
            pin_memory=settings.pin_memory,
            timeout=poll if workers else 0,
            prefetch_factor=settings.prefetch_factor if workers else None,
            generator=torch.Generator(device="cpu"),  # else it draws from the global one
            worker_init_fn=_begin_worker,
            multiprocessing_context=_context_without_shared_lock() if workers else None,
        )
        with _child_signal_kept():
            self._batches: Iterator[Batch] | None = iter(loader)

    def read(self) -> Batch:
        """The next micro-batch of the plan."""
        number, request = next(self._expected)
        assert self._batches is not None, "read after close"
        if self._settings.num_workers == 0:
            return next(self._batches)
        batch = self._wait(self._batches, number, request)
        if isinstance(batch, str):
            self.close()
            raise LoadingError(batch)
        return batch

    def _wait(self, batches: Iterator[Batch], number: int, request: Request) -> Batch | str:
        """The batch, or what went wrong as text: the error itself would keep the iterator, and so the workers."""
        started = time.monotonic()
        while True:
            try:
                return next(batches)
            except LoadingError as error:
                _forget_frames(error)
                return str(error).partition("LoadingError: ")[2] or str(error)
            except Exception as error:  # a dying worker is also seen as OSError, EOFError or UnpicklingError
                _forget_frames(error)
                waited = time.monotonic() - started
                if "timed out" not in str(error):
                    return self._explain_death(f"{type(error).__name__}: {error}".strip(), request)
                if waited >= self._settings.timeout_seconds:
                    return self._explain_hang(number % self._settings.num_workers, waited, request)

    def _explain_death(self, message: str, request: Request) -> str:
        who = "".join(f"It was {self._describe(worker)}. " for worker in self._dead())
        return (
            f"{request} did not arrive: {message.rstrip('.')}. {who}Often the host ran out of memory: lower "
            "num_workers or prefetch_factor. num_workers=0 shows a crash of the dataset where it happens."
        )

    def _dead(self) -> list[int]:
        """Workers that began to read and are gone. Its closed pipes may be seen before its end."""
        for _ in range(10):
            alive = {process.pid for process in multiprocessing.active_children()}
            pids: list[int] = self._progress[:, 0].tolist()
            if dead := [worker for worker, pid in enumerate(pids) if pid > 0 and pid not in alive]:
                return dead
            time.sleep(0.1)
        return []

    def _explain_hang(self, worker: int, waited: float, request: Request) -> str:
        return (
            f"timeout_seconds={self._settings.timeout_seconds:g}: {request} did not arrive within {waited:.0f} "
            f"seconds from {self._describe(worker)}. Raise it if the storage is slow; num_workers=0 shows where "
            "the dataset waits."
        )

    def _describe(self, worker: int) -> str:
        pid, step, sample = self._progress[worker].tolist()
        what = {NOTHING: "between two micro-batches", WHOLE: f"reading a micro-batch of step {step} at once"}
        doing = what.get(sample, f"reading sample {sample} of step {step}")
        return f"worker {worker} (pid {pid}), {doing}"

    def close(self) -> None:
        batches: Any = self._batches
        processes: list[Any] = batches._workers if batches is not None and self._settings.num_workers > 0 else []
        self._batches = None
        for process in processes:
            if process.is_alive():  # one that hangs; it does not hear the DataLoader's SIGTERM
                process.kill()
                process.join()


class _Flag:
    """Stand in for `multiprocessing.Event` in the DataLoader, without its lock.

    A worker killed while it holds that lock would leave the training process waiting forever.
    """

    def __init__(self, context: BaseContext) -> None:
        self._value = context.RawValue(ctypes.c_bool, False)

    def set(self) -> None:
        self._value.value = True

    def is_set(self) -> bool:
        return self._value.value


def _context_without_shared_lock() -> BaseContext:
    context: Any = copy.copy(multiprocessing.get_context())
    context.Event = lambda: _Flag(context)
    return context


def _begin_worker(_: int) -> None:
    """In a worker: the signals that a launcher sends to all processes are for the trainer, which reads on until all of
    them have agreed on the step to save; and Python's garbage collector, which the trainer runs by hand, is on."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.enable()


def _forget_frames(error: BaseException) -> None:
    """Drop what the frames of an error hold. One that came from a worker is held by its own frames."""
    following: BaseException | None = error
    while following is not None:
        traceback.clear_frames(following.__traceback__)
        following = following.__context__


def _with_added_fields(collated: Mapping[str, Tensor], draws: list[Draw]) -> Batch:
    for name, value in cast(Mapping[str, Any], collated).items():
        if name in ADDED_FIELDS:
            raise ValueError(f"field {name!r} is added by the loader; give the dataset's own another name")
        if not isinstance(value, Tensor) or value.shape[:1] != (len(draws),):
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"field {name!r}: a tensor with leading dimension {len(draws)} is needed, got {got}")
    samples, occurrences, positions, weights = zip(*draws, strict=True)
    return {
        **collated,
        "sample": torch.tensor(samples, dtype=torch.int64),
        "occurrence": torch.tensor(occurrences, dtype=torch.int64),
        "position": torch.tensor(positions, dtype=torch.int64),
        "weight": torch.tensor(weights, dtype=torch.float32),
    }


def _as_it_is(batch: Any) -> Any:
    return batch


def seed_generators(key: int) -> None:
    """About 14 µs; torch.manual_seed would also visit every accelerator, for ten times that."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


@contextlib.contextmanager
def random_states_kept() -> Generator[None, None, None]:
    """About 0.15 ms, so once for each micro-batch."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextlib.contextmanager
def _child_signal_kept() -> Generator[None, None, None]:
    """Undo the DataLoader's handler of SIGCHLD, which raises in the middle of whatever the training does then
    (a collective, a commit of a checkpoint). A dead worker is noticed when its data is needed."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
