"""Held-out metrics that do not depend on the number of processes, on the batch size or on what training left behind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.data import heldout
from accel_train.data.reading import MapDataset
from accel_train.training.accumulation import widest
from accel_train.training.ema import Ema

B = TypeVar("B")


@contextmanager
def evaluating(model: nn.Module, average: Ema) -> Generator[None]:
    """Run the body with the averaged weights, in eval mode, without gradients. All processes.

    The trained weights come back bit for bit, and every module's mode as it was.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with average.applied(), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def heldout_batches(
    accelerator: Accelerator, dataset: MapDataset, samples: int, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """This process's part of the first ``samples``, as ``data.heldout.heldout_batches``: equally many on every process,
    with ``weight`` 0 for what only keeps them in step."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    return heldout.heldout_batches(dataset, samples, batch_size, rank, world_size, accelerator.device)


def heldout_pairs(
    accelerator: Accelerator, dataset: MapDataset, samples: int, batch_size: int
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """``heldout_batches``, each beside its shuffled partner."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    return heldout.heldout_pairs(dataset, samples, batch_size, rank, world_size, accelerator.device)


def first_samples(accelerator: Accelerator, dataset: MapDataset, samples: int) -> dict[str, Tensor]:
    """The first ``samples`` as one batch, the same on every process: to be shown."""
    return next(heldout.heldout_batches(dataset, samples, samples, 0, 1, accelerator.device))


def weighted_sums(
    accelerator: Accelerator, batches: Iterable[B], sums_of: Callable[[B], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Add ``sums_of(batch)`` over the batches of all processes: name -> fp64 sum, on the CPU.

    All processes call it with equally many batches (``heldout_batches``), because a forward of a sharded model waits
    for the others. Each value is a sum over the batch's samples of weight x figure, of any shape, the same in every
    batch; with the sum of the weights among them, the caller divides. A mean over a batch would count the samples of a
    short batch for more. No gradients; one reduction, and one wait for the device, whatever the number of batches.
    """
    totals: dict[str, Tensor] = {}
    with torch.no_grad():
        for batch in batches:
            stopping_point()
            for name, value in sums_of(batch).items():
                totals[name] = totals[name] + widest(value) if name in totals else widest(value)
    if not totals:
        raise ValueError("no batch to evaluate: the held-out set is empty, or sums_of returned nothing")
    local = torch.cat([value.flatten() for value in totals.values()])
    reduced: Any = accelerator.reduce(local, "sum")
    parts = reduced.cpu().double().split([value.numel() for value in totals.values()])
    return {name: part.view(value.shape) for part, (name, value) in zip(parts, totals.items(), strict=True)}


class EvaluationStopped(BaseException):
    """A stop was asked for during an evaluation: every process raises it, at the same forward. Not an ``Exception``,
    so that nobody's ``except Exception`` goes on."""


_asked: Callable[[], bool] | None = None


@contextmanager
def stoppable(asked: Callable[[], bool]) -> Generator[None]:
    """Inside, ``stopping_point`` raises ``EvaluationStopped`` once ``asked`` says so, which every process must be told
    alike."""
    global _asked
    before, _asked = _asked, asked
    try:
        yield
    finally:
        _asked = before


def stopping_point() -> None:
    """A place where an evaluation may end: raises ``EvaluationStopped`` on all processes if one was asked to stop.

    Every process must come by equally often: it is a small collective on the host. Nothing outside of training.
    """
    if _asked is not None and _asked():
        raise EvaluationStopped


def interruptible(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with a ``stopping_point`` before each call: an evaluation or a sampler ends between two forwards.
    Every process must call it equally often, as a sharded model demands anyway."""

    def call(*inputs: Any, **named: Any) -> Any:
        stopping_point()
        return forward(*inputs, **named)

    return call
