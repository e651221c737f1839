"""Bytes by formula: what a strategy should hold and send.

``P`` parameters of ``b`` bytes over ``N`` processes. A ring sends ``(N - 1) / N`` of a tensor to gather or to scatter
it, and twice that to reduce it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FP32 = 4
MOMENTS = 2
"""AdamW's running means, in fp32."""


@dataclass(frozen=True)
class States:
    """Bytes on one process between steps, and of gradients before the optimizer steps."""

    parameters: int
    gradients: int
    optimizer: int
    ema: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of whole tensors in one optimizer step, and those that each process sends."""

    gathered: int
    reduced: int
    scattered: int
    sent: float


def shard_values(shape: Sequence[int], processes: int) -> int:
    """Return the values of a parameter that FSDP2 keeps on rank 0: its rows, divided and rounded up."""
    rows, *rest = shape or (1,)
    values = -(-rows // processes)
    for size in rest:
        values *= size
    return values


def replicated(values: int, *, ema: bool) -> States:
    """One process, or DDP: everything whole, in fp32."""
    size = values * FP32
    return States(size, size, MOMENTS * size, size if ema else 0)


def fsdp2(shapes: Iterable[Sequence[int]], processes: int, *, ema: bool) -> States:
    """FSDP2 in fp32: each parameter divided by rows, so small ones are not divided evenly."""
    return replicated(sum(shard_values(shape, processes) for shape in shapes), ema=ema)


def zero_12(values: int, processes: int, *, ema: bool, weight_bytes: int = FP32) -> States:
    """ZeRO-1 and -2: whole weights; masters, state and gradients divided evenly, without the padding of each group.

    ``gradients`` are the partition that the optimizer steps on.
    """
    shard = FP32 * values // processes
    return States(values * weight_bytes, shard, MOMENTS * shard, shard if ema else 0)


def zero_3(values: int, persistent: int, processes: int, *, ema: bool) -> States:
    """ZeRO-3 in fp32: everything divided; ``persistent`` values of small parameters are gathered between steps as well.

    ``values`` count the padding of each parameter to a multiple of the processes.
    """
    shard = FP32 * values // processes
    return States(shard + FP32 * persistent, shard, MOMENTS * shard, shard if ema else 0)


def zero_12_traffic(values: int, processes: int, *, reductions: int) -> Traffic:
    """ZeRO-1 and -2 in fp32: DeepSpeed all-reduces whole gradients in both, and gathers the stepped weights once.

    ``reductions`` is 1, and in stage 2 the number of micro-batches. ``values`` count the padding of each group.
    """
    size = values * FP32
    reduced = reductions * size
    return Traffic(size, reduced, 0, (size + 2 * reduced) * _share(processes))


def zero_3_traffic(values: int, persistent: int, processes: int, *, micro_batches: int) -> Traffic:
    """ZeRO-3 in fp32, for a model small enough to stay gathered from forward to backward (``max_live_parameters``).

    Each micro-batch gathers the weights and scatters the gradients; persistent weights are gathered once, after the
    step. ``values`` count the padding of each parameter.
    """
    gathered = FP32 * (micro_batches * (values - persistent) + persistent)
    scattered = FP32 * micro_batches * values
    return Traffic(gathered, 0, scattered, (gathered + scattered) * _share(processes))


def zero_2_offload(masters: int, averages: int, *, weight_bytes: int) -> int:
    """ZeRO-2 with its optimizer in host memory: bytes read and written there by the step of one process.

    Of each of ``masters`` values, which count padding: the gradient is scaled in place; AdamW's four tensors are read
    and written, by torch's declaration; the weight of the forward is written from the fp32 one. The EMA of
    ``averages`` values is read and written, and the weights are read.
    """
    scaled, stepped, converted = 2 * FP32, 8 * FP32, FP32 + weight_bytes
    return masters * (scaled + stepped + converted) + averages * 3 * FP32


def zero_2_copies(values: int, masters: int, *, micro_batches: int, weight_bytes: int) -> int:
    """ZeRO-2 with its optimizer in host memory, one process: bytes copied between device and host.

    Gradients go to the host in each micro-batch, where those before come back to be added first, unless there is one
    micro-batch; then once more in fp32. Stepped weights come back.
    """
    passes = 0 if micro_batches == 1 else 1 + 2 * (micro_batches - 1)
    return values * (passes * weight_bytes + FP32) + masters * weight_bytes


def zero_3_copies(values: int, persistent: int, *, micro_batches: int, weight_bytes: int) -> int:
    """ZeRO-3 with weights and optimizer in host memory, one process, a model that stays gathered to its backward.

    Weights come to the device in each micro-batch, and persistent ones once, after the step. Gradients cross twice in
    each micro-batch, to the host and back or the other way round, and in the last once more in fp32.
    """
    weights = micro_batches * (values - persistent) + persistent
    return weights * weight_bytes + values * (2 * micro_batches * weight_bytes + FP32)


def ddp_traffic(values: int, processes: int, *, reductions: int = 1) -> Traffic:
    """DDP: one all-reduce of the fp32 gradients per optimizer step, ``2 P b (N - 1) / N``, or per micro-batch."""
    reduced = reductions * values * FP32
    return Traffic(gathered=0, reduced=reduced, scattered=0, sent=2 * reduced * _share(processes))


def fsdp2_traffic(
    values: int,
    root_values: int,
    processes: int,
    *,
    micro_batches: int,
    reductions: int = 1,
    gathers: int = 2,
    bytes_each: int = FP32,
) -> Traffic:
    """FSDP2: blocks are gathered in forward and backward, the root once, of each micro-batch; fp32 reduce-scatters.

    ``values`` and ``root_values`` count the padding of each parameter to a multiple of the processes. ``reductions`` is
    1, and with ``sync: every`` the number of micro-batches. ``gathers`` is 1 without ``fsdp_reshard_after_forward``.
    ``bytes_each`` is the width of gathered weights, 2 in bf16.
    """
    blocks = values - root_values
    gathered = micro_batches * (gathers * blocks + root_values) * bytes_each
    scattered = reductions * values * FP32
    return Traffic(gathered, 0, scattered, (gathered + scattered) * _share(processes))


def hsdp_traffic(
    values: int, root_values: int, replicas: int, shards: int, *, micro_batches: int = 1, reductions: int = 1
) -> Traffic:
    """HSDP: that of FSDP2 within each group of ``shards`` processes, and an all-reduce of a shard over ``replicas``."""
    inside = fsdp2_traffic(values, root_values, shards, micro_batches=micro_batches, reductions=reductions)
    reduced = inside.scattered // shards
    return Traffic(inside.gathered, reduced, inside.scattered, inside.sent + 2 * reduced * _share(replicas))


def _share(processes: int) -> float:
    return (processes - 1) / processes
