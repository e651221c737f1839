"""Hashes of the bits of tensors, computed where the tensors are, and those of a run's state after each step."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accel_train.metrics.records import write_json

if TYPE_CHECKING:
    from accel_train.data.datasets import MapDataset
    from accel_train.data.loader import StepBatches
    from accel_train.loop import Training
    from accel_train.train_state import TrainState

CHUNK = 1 << 22
"""Elements hashed at a time: a few temporaries of 32 MiB."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Type to read the bits of an element with, by its size in bytes."""
# Constants of SplitMix64 as signed 64-bit integers: products with them reach every bit.
STRIDE = -7046029254386353131
MIXING = ((30, -4658895280553007687), (27, -7723592293110705685))


def fingerprint(tensor: Tensor) -> Tensor | None:
    """Return a hash of the bits of a tensor, a scalar on its device. None for one without plain memory.

    The sum modulo 2^64 of a hash of each element and its place, so that the order of adding does not matter. A change
    of one bit always changes it. Two different tensors have the same with a probability of about 2^-64.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    bits = plain.contiguous().reshape(-1).view(INTEGERS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), CHUNK):
        part = bits[begin : begin + CHUNK].to(torch.int64)
        places = torch.arange(begin + 1, begin + 1 + part.numel(), device=part.device)
        mixed = part + places * STRIDE
        for shift, factor in MIXING:
            mixed = (mixed ^ _shifted(mixed, shift)) * factor
        total += (mixed ^ _shifted(mixed, 31)).sum()
    return total


def _shifted(values: Tensor, by: int) -> Tensor:
    # Without the mask the sign would fill the upper bits, and a number would hash as its complement.
    return (values >> by) & ((1 << (64 - by)) - 1)


@dataclass(frozen=True)
class Request:
    """Destination of the hashes."""

    path: str


@contextmanager
def recording(request: Request, training: Training, prepared: TrainState, _: MapDataset) -> Generator[None]:
    """Write hashes of weights, optimizer state and EMA before the first step and after each one.

    Evaluations are skipped: they change none of these.
    """
    found: dict[str, dict[str, int]] = {}
    training.steps = _steps(training.steps, prepared, training.done, found)
    without_evaluations(training)
    yield
    if prepared.accelerator.is_main_process:
        write_json(Path(request.path), {"states": found})


def without_evaluations(training: Training) -> None:
    """Let the loop's evaluations do nothing."""
    # The recipe calls the method of this one object.
    setattr(training, "evaluate", lambda *_: {})  # noqa: B010


def _steps(
    steps: Iterator[StepBatches], prepared: TrainState, begun: int, found: dict[str, dict[str, int]]
) -> Iterator[StepBatches]:
    found[str(begun)] = _state(prepared)
    for batches in steps:
        yield batches
        # Here the recipe has run the lines of this step and asks for the next one.
        found[str(batches.done)] = _state(prepared)


def _state(prepared: TrainState) -> dict[str, int]:
    """Hash the state over all processes. Collective."""
    shards = prepared.ema.shards
    state: list[Tensor] = []
    for key, names in shards.state_names().items():
        state += [shards.state(name, key) for name in names]
    parts: dict[str, Iterable[Tensor]] = {
        "weights": [shards.master(name) for name in shards.parameters],
        "optimizer": state,
        "ema": prepared.ema.averages.values(),
    }
    hashes: dict[str, int] = {}
    for name, tensors in parts.items():
        total = torch.zeros((), dtype=torch.int64, device=prepared.accelerator.device)
        for place, tensor in enumerate(tensors):
            one = fingerprint(tensor)
            if one is not None:
                # Weighted by its place, so that two swapped tensors do not match.
                total += one.to(total.device) * (2 * place + 1)
        hashes[name] = int(prepared.accelerator.reduce(total, reduction="sum"))  # pyright: ignore[reportArgumentType]
    return hashes
