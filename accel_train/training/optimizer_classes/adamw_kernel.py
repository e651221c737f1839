"""One Triton kernel for AdamW on all tensors of a group and their moving averages, in one pass over memory.

torch's fused kernel writes the scaled gradient back, and the average reads the weights once more. On a GPU all of this
is bound by memory: 44 bytes per value in two kernels, 36 here (weight, both moments and average read and written, the
gradient read). Imported where Triton is installed and the parameters are on a GPU.
"""

# pyright: reportMissingParameterType=false
# Triton compiles annotations too, and knows only its own.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 1024
"""Values of one tensor that a program of the kernel holds in registers at a time."""
CHUNK = 16 * BLOCK
"""Values for one program. Of the sizes tried on an H200 (8 Ki to 32 Ki, 4 and 8 warps) the fastest with an average."""
WARPS = 8
ALIGNMENT = 16
"""Bytes. Pointers that are multiples of it are read in the widest loads."""
HEAD = tl.constexpr(8)
"""Entries of 8 bytes before the rows of a table: two addresses and the numbers of `Rates` and of the average."""
ROW = tl.constexpr(6)
"""Entries of a row: addresses of weight, gradient, both moments and average, and the number of values in each."""


@dataclass(frozen=True)
class Rates:
    """Hyperparameters of one group's step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@triton.jit
def adamw_one_pass(
    table,
    counts,
    chunks,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    AVERAGED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update the values of one chunk. ``chunks`` (C, 2) holds the index of its tensor and of its first value."""
    address = tl.load(table)
    found_inf = address.to(tl.pointer_type(tl.float32))
    if tl.load(found_inf, mask=address != 0, other=0.0) != 0.0:
        return
    chunk = chunks + 2 * tl.program_id(0)
    tensor = tl.load(chunk)
    first = tl.load(chunk + 1)
    row = table + HEAD + ROW * tensor
    size = tl.load(row + 5)
    parameters = tl.load(row).to(tl.pointer_type(tl.float32))
    gradients = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    means = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    squares = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    averages = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        first = tl.multiple_of(first, 16)
        parameters = tl.multiple_of(parameters, 16)
        gradients = tl.multiple_of(gradients, 16)
        means = tl.multiple_of(means, 16)
        squares = tl.multiple_of(squares, 16)
        averages = tl.multiple_of(averages, 16)
    scale, beta1, rest1, beta2, rest2, eps, kept, weight = _numbers(table)
    count = tl.load(counts + tensor)
    rate, correction = _corrected(table, count)
    for offset in range(0, CHUNK, BLOCK):
        at = first + offset + tl.arange(0, BLOCK)
        inside = at < size
        gradient = tl.load(gradients + at, mask=inside)
        gradient = gradient / scale
        mean = tl.load(means + at, mask=inside)
        mean = beta1 * mean + rest1 * gradient
        tl.store(means + at, mean, mask=inside)
        square = tl.load(squares + at, mask=inside)
        square = beta2 * square + rest2 * gradient * gradient
        tl.store(squares + at, square, mask=inside)
        parameter = tl.load(parameters + at, mask=inside)
        root = tl.sqrt(square) / correction
        parameter = kept * parameter - rate * mean / (root + eps)
        tl.store(parameters + at, parameter, mask=inside)
        if AVERAGED:
            average = tl.load(averages + at, mask=inside)
            # The two branches of torch's lerp, which give its bits.
            if weight < 0.5:
                average = average + weight * (parameter - average)
            else:
                average = parameter - (parameter - average) * (1.0 - weight)
            tl.store(averages + at, average, mask=inside)


@triton.jit
def _numbers(table):
    address = tl.load(table + 1)
    grad_scale = address.to(tl.pointer_type(tl.float32))
    scale = tl.load(grad_scale, mask=address != 0, other=1.0)
    numbers = table.to(tl.pointer_type(tl.float64))
    lr = tl.load(numbers + 2)
    beta1 = tl.load(numbers + 3)
    beta2 = tl.load(numbers + 4)
    eps = tl.load(numbers + 5)
    decay = tl.load(numbers + 6)
    weight = tl.load(numbers + 7)
    return (
        scale,
        beta1.to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
        eps.to(tl.float32),
        (1.0 - lr * decay).to(tl.float32),
        weight.to(tl.float32),
    )


@triton.jit
def _corrected(table, count):
    # In fp64: with beta2 near 1 the correction of the first steps would lose half of its digits.
    numbers = table.to(tl.pointer_type(tl.float64))
    count = count.to(tl.float64)
    lr = tl.load(numbers + 2)
    beta1 = tl.load(numbers + 3)
    beta2 = tl.load(numbers + 4)
    # A beta of 0 has no logarithm.
    log1 = tl.log(tl.maximum(beta1, 1e-300))
    log2 = tl.log(tl.maximum(beta2, 1e-300))
    first = 1.0 - tl.exp(count * log1)
    second = 1.0 - tl.exp(count * log2)
    rate = lr / first
    return rate.to(tl.float32), tl.sqrt(second).to(tl.float32)


class Chunks:
    """Division of a group's tensors into chunks, one for each program of the kernel, by their sizes."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = tuple(sizes)
        pairs = [(number, start) for number, size in enumerate(sizes) for start in range(0, size, CHUNK)]
        self._pairs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        self._device = device
        self._is_aligned = torch.ones(len(sizes), dtype=torch.bool)
        self._launches = [(True, _sent(self._pairs, device))]
        """Chunks of each launch, and whether every address of their tensors is aligned."""

    def step(
        self,
        columns: Sequence[Sequence[Tensor]],
        counts: Tensor,
        rates: Rates,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        weight: float | None,
    ) -> None:
        """Update all tensors of ``columns``, each contiguous and fp32: weights, gradients, both moments, averages.

        With ``weight`` None there are no averages, and four columns. ``counts`` (P,) counts the steps of each tensor,
        this one included. Gradients stay as they are. Does not wait for the device.
        """
        if not len(self._pairs):
            return  # this rank has no value of any of them
        # Read in every step: a load replaces state, and each backward makes new gradients.
        addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
        if weight is None:
            addresses.append(addresses[0])  # never read
        rows = torch.tensor([*addresses, self.sizes], dtype=torch.int64)
        self._divide(~(rows[:5] % ALIGNMENT).any(0))
        head = _head(rates, grad_scale, found_inf, weight or 0.0)
        table = _sent(torch.cat((head, rows.T.flatten())), counts.device)
        kernel: Any = adamw_one_pass
        constants = {"BLOCK": BLOCK, "CHUNK": CHUNK, "AVERAGED": weight is not None}
        for is_aligned, chunks in self._launches:
            kernel[(len(chunks),)](table, counts, chunks, **constants, ALIGNED=is_aligned, num_warps=WARPS)

    def _divide(self, is_aligned: Tensor) -> None:
        """Launch tensors with an unaligned address apart, so that one does not cost all the wide loads. (P,)."""
        if torch.equal(is_aligned, self._is_aligned):
            return
        self._is_aligned = is_aligned
        of_chunk = is_aligned[self._pairs[:, 0]]
        parts = [(True, self._pairs[of_chunk]), (False, self._pairs[~of_chunk])]
        self._launches = [(aligned, _sent(part, self._device)) for aligned, part in parts if len(part)]


def _head(rates: Rates, grad_scale: Tensor | None, found_inf: Tensor | None, weight: float) -> Tensor:
    """Return the head of the table as int64: addresses (0 if absent), then the bits of numbers in fp64."""
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (found_inf, grad_scale)]
    numbers = torch.tensor([rates.lr, *rates.betas, rates.eps, rates.weight_decay, weight], dtype=torch.float64)
    return torch.cat((torch.tensor(addresses, dtype=torch.int64), numbers.view(torch.int64)))


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without a wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
