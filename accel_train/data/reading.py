"""Read micro-batches one after another, in worker processes or in the training process.

Samples are seeded one by one. Every error names the samples being read, their step and their worker.
"""

import contextlib
import os
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from accel_train import rng
from accel_train.config import MendedError, UsageError
from accel_train.data.datasets import Batch, BatchDataset, MapDataset, VariableLengthDataset, collate_of, sample_of
from accel_train.data.sampler import Draw, Request
from accel_train.rng import preserve_random_states, seed_generators

ReadAtOnce = Callable[[list[int]], Mapping[str, Tensor]]
Row = np.ndarray[Any, np.dtype[np.int64]]

ADDED_FIELDS = ("sample", "occurrence", "position", "weight")
# In place of the index of the sample being read.
IDLE = -1
WHOLE_BATCH = -2
SHARED_MEMORY = "/dev/shm"
"""Directory in which workers put micro-batches for the training process."""
MIB = 2**20


class LoadingError(RuntimeError):
    """A sample could not be read. The text names step, samples and worker. All workers are closed."""


def advice_on_memory(error: Exception) -> str:
    """Return advice to add to the error of a worker without room for a micro-batch. Empty for other errors."""
    if "shared memory" not in str(error):
        return ""
    room = shutil.disk_usage(SHARED_MEMORY)
    return (
        f". {SHARED_MEMORY} has {room.total / MIB:.0f} MiB, of which {room.free / MIB:.0f} MiB are free: start the "
        "container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir of medium Memory), or lower "
        "loader.num_workers or loader.prefetch_factor; loader.num_workers=0 needs none of it"
    )


class Reader:
    """Reads and collates one request, in a worker or in the training process.

    Samples are read one by one, with global generators seeded by their occurrence. A `BatchDataset` is read at once,
    unseeded.
    """

    def __init__(
        self,
        dataset: MapDataset,
        seed: int,
        num_workers: int,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate_of(dataset)
        self._read_at_once: ReadAtOnce | None = None
        if _reads_batches(dataset):
            self._read_at_once = dataset.batch
        # One row per worker: its process id, and the step and sample being read. In shared memory, to be readable
        # after the worker's death.
        self.progress = torch.full((num_workers, 3), IDLE, dtype=torch.int64, device="cpu").share_memory_()

    def __getitems__(self, request: Request) -> Batch:
        """Read a whole batch. The DataLoader calls it by this name."""
        worker = get_worker_info()
        if worker is None:
            row = np.empty(3, np.int64)
            # Reading at once draws nothing at random.
            keeps_states = contextlib.nullcontext() if self._read_at_once else preserve_random_states()
            with keeps_states:
                return self._read(request, row, "the training process")
        row = self.progress[worker.id].numpy()
        row[0] = os.getpid()
        try:
            return self._read(request, row, f"worker {worker.id} (pid {row[0]})")
        finally:
            row[2] = IDLE

    def _read(self, request: Request, row: Row, reader: str) -> Batch:
        row[1] = request.step
        try:
            if self._read_at_once is None:
                collated = self._one_by_one(request, row)
            else:
                collated = self._at_once(request, row, self._read_at_once)
            if request.length is not None:
                collated = cast(VariableLengthDataset, self._dataset).trim(collated, request.length)
            return _with_added_fields(collated, request.draws)
        except Exception as error:
            activities = {IDLE: "collating", WHOLE_BATCH: "reading"}
            activity = activities.get(int(row[2]), f"sample {row[2]}")
            for kind in (MendedError, UsageError):
                if isinstance(error, kind):
                    # It has the remedy and needs no traceback.
                    raise kind(f"{activity} of {request}, in {reader}: {error}") from None
            cause = f"{type(error).__name__}: {error}{advice_on_memory(error)}"
            text = f"{activity} of {request}, in {reader}: {cause}"
            if get_worker_info() is None:
                raise LoadingError(text) from error
            # A worker's exception arrives as text only, so the traceback becomes part of it.
            raise LoadingError(f"{text}\n{traceback.format_exc()}") from None

    def _one_by_one(self, request: Request, row: Row) -> Mapping[str, Tensor]:
        # Keyed without the step: a sample is augmented alike wherever its epoch has it.
        occurrences = torch.tensor([draw.occurrence for draw in request.draws], device="cpu")
        keys = rng.sample_keys(self._seed, "augmentation", 0, occurrences).tolist()
        samples: list[Mapping[str, Tensor]] = []
        for draw, key in zip(request.draws, keys, strict=True):
            row[2] = draw.sample
            seed_generators(key)
            samples.append(sample_of(self._dataset, draw.sample))
        row[2] = IDLE
        return self._collate(samples)

    def _at_once(self, request: Request, row: Row, read: ReadAtOnce) -> Mapping[str, Tensor]:
        row[2] = WHOLE_BATCH
        try:
            batch = read([draw.sample for draw in request.draws])
        except Exception:
            # Reading one by one names the failing sample, if it is a single one.
            with preserve_random_states():
                self._one_by_one(request, row)
            row[2] = WHOLE_BATCH
            raise
        row[2] = IDLE
        return batch


def _reads_batches(dataset: MapDataset) -> TypeGuard[BatchDataset]:
    """Return True if `batch` is defined in the class that defines `__getitem__`, or in a subclass of it.

    A class that inherits `batch` and overrides `__getitem__` must be read by the latter.
    """
    if not isinstance(dataset, BatchDataset):
        return False
    classes = type(dataset).__mro__
    return _first_definition(classes, "batch") <= _first_definition(classes, "__getitem__")


def _first_definition(classes: Sequence[type], name: str) -> int:
    for index, cls in enumerate(classes):
        if name in vars(cls):
            return index
    return len(classes)


def _with_added_fields(collated: Mapping[str, Tensor], draws: list[Draw]) -> Batch:
    batch: Any = collated
    if not isinstance(batch, Mapping):
        raise UsageError(f"collate of the dataset must return a dict of tensors, got a {type(batch).__name__}")
    for name, value in cast(Mapping[str, Any], batch).items():
        if name in ADDED_FIELDS:
            raise UsageError(f"field {name!r} is added by the loader. Rename the dataset's field")
        required = f"field {name!r}: a tensor with leading dimension {len(draws)} is required"
        if not isinstance(value, Tensor):
            raise UsageError(f"{required}, got a {type(value).__name__}. Encode it as numbers, or leave it out")
        if value.shape[:1] != (len(draws),):
            raise UsageError(f"{required}, got shape {tuple(value.shape)}")
    samples, occurrences, positions, weights = zip(*draws, strict=True)
    return {
        **collated,
        "sample": torch.tensor(samples, dtype=torch.int64),
        "occurrence": torch.tensor(occurrences, dtype=torch.int64),
        "position": torch.tensor(positions, dtype=torch.int64),
        "weight": torch.tensor(weights, dtype=torch.float32),
    }
