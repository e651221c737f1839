"""Held-out metrics, independent of the number of processes, the batch size and the state of training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import NonNegativeInt, UsageError
from accel_train.data import heldout
from accel_train.data.datasets import Batch, MapDataset
from accel_train.training.ema import Ema
from accel_train.training.parameters import widest

B = TypeVar("B")
SAMPLES = "samples"
"""Name of the sum of the weights, the denominator of the other sums."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out samples with the EMA weights."""

    every: NonNegativeInt = 0
    """Optimizer steps between evaluations. 0: one evaluation, at the end. Every run has that one."""

    def due(self, done: int, max_steps: int) -> bool:
        """Return True if an evaluation follows ``done`` completed steps."""
        return done == max_steps or (self.every > 0 and done % self.every == 0)


@contextmanager
def evaluating(model: nn.Module, ema: Ema) -> Generator[None]:
    """Run the body with the EMA weights, in eval mode and without gradients. All processes must call it.

    Afterwards the trained weights are back bit for bit, and every module is in its previous mode.
    """
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # Metrics must not depend on the rank whose running statistics are used.
        ema.shards.agree_on_buffers()
        with ema.applied(), torch.no_grad():
            yield
    finally:
        # Module by module: model.train() would also switch on modules that the recipe keeps in eval mode.
        for module, training in was_training.items():
            module.training = training


def heldout_batches(accelerator: Accelerator, dataset: MapDataset, samples: int, batch_size: int) -> Iterator[Batch]:
    """Yield this process's batches of the first ``samples``, equally many on every process.

    As in ``data.heldout.heldout_batches``, padding samples have ``weight`` 0.
    """
    rank = accelerator.process_index
    world_size = accelerator.num_processes
    size = samples_at_once(batch_size)
    return heldout.heldout_batches(dataset, samples, size, rank, world_size, accelerator.device)


def first_samples(accelerator: Accelerator, dataset: MapDataset, samples: int) -> Batch:
    """Return the first ``samples``, or all if they are fewer, as one batch for display, the same on every process."""
    shown = min(samples, len(dataset))  # a larger batch would repeat the last sample
    # As rank 0 of 1, so that every process gets the same samples.
    return next(heldout.heldout_batches(dataset, shown, shown, 0, 1, accelerator.device))


def weighted_sums(
    accelerator: Accelerator, batches: Iterable[B], sums_of: Callable[[B], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Add ``sums_of(batch)`` over the batches of all processes. Return name -> fp64 sum on the CPU.

    All processes must call it with equally many batches (``heldout_batches``), because a forward of a sharded model is
    a collective. Each value is a sum of weight x metric over the samples of the batch, with the same shape in every
    batch. One of the values is the sum of weights, and the caller divides by it: means over batches would overweight
    the samples of a short batch. One reduction and one device wait for any number of batches. No gradients. Raises
    ``UsageError`` for no batch or no value.
    """
    totals: dict[str, Tensor] = {}
    call: Call = []
    if _recorded is not None:
        _recorded.append(call)
    with torch.no_grad():
        for batch in batches:
            stopping_point()  # before the forward, whose collectives need every process
            sums = sums_of(batch)
            if _recorded is not None:
                call.append({name: widest(value).cpu().double() for name, value in sums.items()})
            for name, value in sums.items():
                # fp64 where the device has it: a mean over a million samples loses digits in fp32.
                wide = widest(value)
                totals[name] = totals[name] + wide if name in totals else wide
    if not totals:
        raise UsageError(
            "weighted_sums: no batch to evaluate, or sums_of returned nothing, and at least one of each is required; "
            "check the path, split and filters of the held-out set, and the dict that sums_of returns"
        )
    # One vector for all names, because a reduction of this size costs its latency only.
    local = torch.cat([value.flatten() for value in totals.values()])
    reduced: Any = accelerator.reduce(local, "sum")
    lengths = [value.numel() for value in totals.values()]
    parts = reduced.cpu().double().split(lengths)  # on the host first, as Apple's devices have no fp64
    by_name = zip(totals, parts, strict=True)
    return {name: part.view(totals[name].shape) for name, part in by_name}


def require_samples(metrics: Mapping[str, Tensor], weight: Tensor) -> None:
    """Raise ``UsageError`` for a metric whose shape is not (B,), that of ``weight``: one value per sample.

    Also for a metric named ``samples``, a name reserved for their count.
    """
    if SAMPLES in metrics:
        raise UsageError(f"metrics_of: {SAMPLES!r} counts the samples of the evaluation; give the metric another name")
    for name, values in metrics.items():
        if values.shape != weight.shape:
            raise UsageError(
                f"metrics_of: {name!r} has shape {tuple(values.shape)}, and one value for each of the {len(weight)} "
                f"samples of the batch, {tuple(weight.shape)}, is required; do not average over them "
                "(reduction='none'), and sum or average over any further dimensions, as by .flatten(1).mean(1)"
            )


def paired_sums(
    accelerator: Accelerator,
    dataset: MapDataset,
    samples: int,
    batch_size: int,
    sums_of: Callable[[Batch, Batch], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Return ``weighted_sums`` of ``sums_of(batch, shuffled)`` over the first ``samples`` of a held-out set.

    The batches are those of ``heldout_batches``, each with its shuffled partner (``data.heldout.heldout_pairs``).
    """
    rank = accelerator.process_index
    world_size = accelerator.num_processes
    size = samples_at_once(batch_size)
    pairs = heldout.heldout_pairs(dataset, samples, size, rank, world_size, accelerator.device)
    return weighted_sums(accelerator, pairs, lambda pair: sums_of(*pair))


Call = list[dict[str, Tensor]]
"""Sums of one call of ``weighted_sums``: a dictionary per sample, in the order of the evaluation, fp64 on the CPU."""
_recorded: list[Call] | None = None


@contextmanager
def recorded_by_sample() -> Generator[list[Call]]:
    """Record the sums of each held-out sample in the body, for ``accel-train better`` to pair. One process only.

    Held-out batches then have one sample each, so that the sums of a batch are those of its sample. Noise is keyed by
    sample, so only the rounding changes. Costs a device wait per sample.
    """
    global _recorded
    before = _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = before


def samples_at_once(batch_size: int) -> int:
    """Return the size of a held-out batch: ``batch_size``, or 1 while samples are recorded."""
    return batch_size if _recorded is None else 1


class EvaluationStopped(BaseException):
    """A stop request during an evaluation. Every process raises it at the same forward.

    A ``BaseException``, so that an ``except Exception`` in an evaluation does not swallow it.
    """


_stop_requested: Callable[[], bool] | None = None


@contextmanager
def stoppable(stop_requested: Callable[[], bool]) -> Generator[None]:
    """Have ``stopping_point`` raise ``EvaluationStopped`` once ``stop_requested()`` is true on every process."""
    global _stop_requested
    # Restored afterwards, because evaluations of two runs in one process may be nested.
    before = _stop_requested
    _stop_requested = stop_requested
    try:
        yield
    finally:
        _stop_requested = before


def stopping_point() -> None:
    """Raise ``EvaluationStopped`` on all processes if one of them got a stop request. No effect outside of training.

    A small collective on the host, so every process must call it equally often.
    """
    if _stop_requested is not None and _stop_requested():
        raise EvaluationStopped


def interruptible(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` with a ``stopping_point``, so that an evaluation or sampler can end between two calls.

    Every process must call it equally often, as a sharded model requires anyway.
    """

    def call(*inputs: Any, **named: Any) -> Any:
        stopping_point()
        return forward(*inputs, **named)

    return call
