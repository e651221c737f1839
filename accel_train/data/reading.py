"""Reading one micro-batch after another, in worker processes or in the training process.

Samples are seeded one by one, and every failure says which samples were being read, in which step, by whom.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from accel_train import rng
from accel_train.data.sampler import Cut, Draw, StepSampler

Batch = dict[str, Tensor]
Collate = Callable[[list[Mapping[str, Tensor]]], Mapping[str, Tensor]]

ADDED_FIELDS = ("sample", "occurrence", "position", "weight")
POLL_SECONDS = 2.0


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


class Request(NamedTuple):
    """One micro-batch to read."""

    step: int
    micro_batch: int
    draws: list[Draw]

    def __str__(self) -> str:
        samples = [draw.sample for draw in self.draws]
        shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
        return f"step {self.step}, micro-batch {self.micro_batch} (samples {shown})"


class Plan(NamedTuple):
    """The DataLoader's batch sampler: all requests of this process, computed as they are needed."""

    sampler: StepSampler
    cut: Cut
    start_step: int
    max_steps: int

    def requests(self) -> Iterator[Request]:
        for step in range(self.start_step, self.max_steps):
            for index, draws in enumerate(self.sampler.micro_batches(step, *self.cut)):
                yield Request(step, index, draws)


class Reader:
    """Reads and collates one request, in a worker or in the training process."""

    def __init__(self, dataset: MapDataset, seed: int, collate: Collate, num_workers: int) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate
        # One row for each worker: its process id, the step and the sample it is reading (-1: none). Shared, so
        # that it can still be read when the worker is gone.
        self.progress = torch.full((num_workers, 3), -1, dtype=torch.int64, device="cpu").share_memory_()

    def __getitems__(self, request: Request) -> Batch:
        """The DataLoader's name for reading a whole batch at once."""
        worker = get_worker_info()
        if worker is None:
            with _random_states_kept():
                return self._read(request, np.empty(3, np.int64), "the training process")
        row = self.progress[worker.id].numpy()
        row[0] = os.getpid()
        try:
            return self._read(request, row, f"worker {worker.id} (pid {row[0]})")
        finally:
            row[2] = -1

    def _read(self, request: Request, row: np.ndarray[Any, np.dtype[np.int64]], reader: str) -> Batch:
        occurrences = torch.tensor([draw.occurrence for draw in request.draws], device="cpu")
        keys = rng.sample_keys(self._seed, "augmentation", 0, occurrences).tolist()
        row[1] = request.step
        samples: list[Mapping[str, Tensor]] = []
        try:
            for draw, key in zip(request.draws, keys, strict=True):
                row[2] = draw.sample
                _seed_generators(key)
                samples.append(self._dataset[draw.sample])
            row[2] = -1
            return _with_added_fields(self._collate(samples), request.draws)
        except Exception as error:
            what = "collating" if row[2] == -1 else f"sample {row[2]}"
            text = f"{what} of {request}, in {reader}: {type(error).__name__}: {error}"
            if get_worker_info() is None:
                raise LoadingError(text) from error
            # A worker's exception arrives as text only, so the traceback goes into it.
            raise LoadingError(f"{text}\n{traceback.format_exc()}") from None


class Workers:
    """The DataLoader's iteration with errors that say what was being read, and by whom."""

    def __init__(self, reader: Reader, plan: Plan, settings: LoaderSettings) -> None:
        self._settings, self._progress = settings, reader.progress
        self._expected = enumerate(plan.requests())
        workers = settings.num_workers > 0
        # A timeout of the DataLoader is our chance to look; the patience asked for is counted in `_wait`.
        poll = min(POLL_SECONDS, settings.timeout_seconds)
        loader = DataLoader(
            cast(Any, reader),
            batch_sampler=cast(Any, plan.requests()),
            num_workers=settings.num_workers,
            collate_fn=_as_it_is,
            pin_memory=settings.pin_memory,
            timeout=poll if workers else 0,
            prefetch_factor=settings.prefetch_factor if workers else None,
            generator=torch.Generator(device="cpu"),  # else it draws from the global one
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
        doing = f"reading sample {sample} of step {step}" if sample >= 0 else "between two micro-batches"
        return f"worker {worker} (pid {pid}), {doing}"

    def close(self) -> None:
        self._batches = None


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


def _seed_generators(key: int) -> None:
    """About 14 µs; torch.manual_seed would also visit every accelerator, for ten times that."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


@contextlib.contextmanager
def _random_states_kept() -> Generator[None, None, None]:
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
