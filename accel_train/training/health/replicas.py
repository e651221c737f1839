"""Weights that several processes hold whole, compared bit by bit.

Every process applies the same update to its own copy, and nothing compares the copies afterwards: a bit that flips in
one memory, or code that touches the weights of one process only, goes unnoticed. Each process then computes its
gradient with different weights, and a checkpoint holds pieces of different models.
"""

from __future__ import annotations

import socket
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.wording import shortened

if TYPE_CHECKING:
    from accel_train.training.ema import Ema

COLUMNS = 1024
"""Words per row of the table whose rows and columns are summed. A word is 8 bytes."""
STEP = -7046029254386353131
"""The golden ratio in 64 bits. This and ``SHIFTS`` are the constants of SplitMix64."""
SHIFTS = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))


EVERYWHERE = 0.9
"""Share of differing tensors that suggests unreduced gradients. A flipped bit changes one tensor, and its EMA."""


class ReplicasDifferError(RuntimeError):
    """The processes hold different weights. Raised on every one of them, and nothing is saved."""


class Difference(NamedTuple):
    """Difference between the weights of the processes."""

    parameters: list[str]
    """Names. Those of the EMA are prefixed by ``EMA of``."""
    processes: list[int]
    """Processes that differ from the majority of those with the same part of the weights. Without a majority, all."""
    has_majority: bool
    hosts: list[str]
    """Host of each process."""
    devices: list[str]
    """Model of each process's device."""
    compared: int
    """Number of tensors compared, with those of the EMA."""

    @property
    def explanation(self) -> str:
        """The finding and the remedy, for a message."""
        names = shortened(self.parameters, 3)
        if len(self.parameters) > 3:
            names = f"{len(self.parameters)} tensors: {names}"
        where = ", ".join(f"{process} ({self.hosts[process]})" for process in self.processes)
        who = f"process {where} differs from the majority"
        if not self.has_majority:
            who = f"processes {where} differ, and no majority shows which of them is right"
        mixed = ""
        if len(set(self.devices)) > 1:
            kinds = shortened(sorted(set(self.devices)), 3)
            mixed = f" The processes compute on different devices ({kinds}), whose kernels may round differently."
        causes = (
            "memory errors of that machine (nvidia-smi -q -d ECC; dmesg), for other versions of packages or drivers on "
            "it, and for code that changes weights on some processes only"
        )
        finding = f"the processes no longer hold the same weights: {names}: {who}.{mixed}"
        kept = "Nothing is saved, and the newest checkpoint is unchanged."
        again = "start the same command again to continue from the checkpoint"
        if self.is_everywhere:
            return (
                f"{finding} Nearly all tensors differ, as they do when gradients are not reduced: the forward of the "
                "loop must go through prepared.model, not through accelerator.unwrap_model(prepared.model) or the "
                f"model that was prepared. {kept} If it does go through prepared.model, look for {causes}; correct it "
                f"and {again}"
            )
        return (
            f"{finding} {kept} Look for {causes}; {again}. --health.check_replicas_every 0 continues without this check"
        )

    @property
    def is_everywhere(self) -> bool:
        """True if nearly all tensors differ without a majority: each process has trained by itself."""
        return not self.has_majority and len(self.parameters) >= EVERYWHERE * self.compared


def _mixed(words: Tensor) -> Tensor:
    """Return SplitMix64's hash of each word and its position, so that changes do not cancel out in a sum."""
    mixed = words + STEP * torch.arange(words.numel(), device=words.device)
    for shift, factor in SHIFTS:
        # A shift of int64 keeps the sign, which the mask takes away.
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed


def _sums(tensor: Tensor) -> list[Tensor]:
    """Return the bits of a tensor as sums of 8-byte words modulo 2^64: by column, by row, and the rest unsummed.

    A change of one or two words always changes a sum. An aligned contiguous tensor is not copied.
    """
    data = tensor.detach().contiguous().view(-1)
    # Copied where it is not aligned to a word, as within DeepSpeed's flat buffer.
    if data.data_ptr() % 8:
        data = data.clone()
    data = data.view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    rows = words.numel() // COLUMNS
    sums = [words[rows * COLUMNS :]]
    if whole < data.numel():
        sums.append(data[whole:].long())
    if rows:
        table = words[: rows * COLUMNS].view(rows, COLUMNS)
        sums += [table.sum(0), table.sum(1)]
    return sums


def checksums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a checksum of the bits of each tensor, int64 on ``device``. A few kernels per tensor, no wait."""
    parts: list[Tensor] = []
    ends = [0]
    for tensor in tensors:
        of_tensor = [each.to(device) for each in _sums(tensor)]
        parts += of_tensor
        ends.append(ends[-1] + sum(each.numel() for each in of_tensor))
    # Hashed all at once, and summed by tensor as differences of a running sum.
    sums = _mixed(torch.cat(parts)).cumsum(0)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    running = torch.cat([start, sums])
    return running[torch.tensor(ends, device=device)].diff()


class Replicas:
    """The weights that are equal on several processes. Built on every process; ``difference`` is a collective."""

    def __init__(self, accelerator: Accelerator, ema: Ema, strategy: str) -> None:
        self._accelerator = accelerator
        self._ema = ema
        self._zero = strategy.startswith("zero")

    def _tensors(self) -> dict[str, Tensor]:
        weights = self._ema.shards
        # ZeRO-1 and -2 gather the weights of the forward on every process; masters and EMA are shards.
        if self._zero:
            return {name: parameter.data for name, parameter in weights.parameters.items()}
        # Looked up in every check, because FSDP2 may replace the tensors behind the names.
        tensors = {name: weights.master(name) for name in weights.parameters}
        return tensors | {f"EMA of {name}": shard for name, shard in self._ema.averages.items()}

    def _place(self) -> int:
        """Return a number that identifies this process's part of the weights. Equal numbers mean the same part."""
        weights = self._ema.shards
        if self._zero or weights.replicated:
            return 0
        extents = [weights.extent(name) for name in weights.parameters]
        return zlib.crc32(repr(extents).encode())

    @torch.no_grad()
    def difference(self) -> Difference | None:
        """Compare the processes. Waits for the device once, and gathers two numbers of each process.

        All processes return the same. Only a difference gathers more: host, device, and a number for each parameter.
        """
        tensors = self._tensors()
        device = self._accelerator.device
        sums = checksums(list(tensors.values()), device)
        place = torch.tensor(self._place(), device=device)
        rows = self._gather(torch.stack([place, _mixed(sums).sum()]))
        places = [place for place, _ in rows]
        # Processes with the same part have the same sum.
        if len({(place, total) for place, total in rows}) == len(set(places)):
            return None
        machines: list[tuple[str, str]] = [("", "")] * self._accelerator.num_processes
        torch.distributed.all_gather_object(machines, (socket.gethostname(), _model_of(device)))
        return compare(list(tensors), places, self._gather(sums), machines)

    def _gather(self, row: Tensor) -> list[list[int]]:
        gathered: Tensor = self._accelerator.gather(row[None])  # pyright: ignore[reportAssignmentType]
        return gathered.tolist()


def compare(
    names: Sequence[str], places: Sequence[int], rows: Sequence[Sequence[int]], machines: Sequence[tuple[str, str]]
) -> Difference:
    """Return what differs between processes of the same place, from the checksums, host and device of each process."""
    groups: dict[int, list[int]] = {}
    for process, place in enumerate(places):
        groups.setdefault(place, []).append(process)
    parameters: list[str] = []
    processes: set[int] = set()
    has_majority = True
    for column, name in enumerate(names):
        sums = [row[column] for row in rows]
        unlike = [_unlike(group, sums) for group in groups.values()]
        differing = {process for each, _ in unlike for process in each}
        if differing:
            parameters.append(name)
            processes |= differing
            has_majority = has_majority and all(clear for _, clear in unlike)
    hosts, devices = zip(*machines, strict=True)
    return Difference(parameters, sorted(processes), has_majority, list(hosts), list(devices), len(names))


def _model_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # The instructions that torch has kernels for, on which the rounding depends.
    return f"{device.type}, {torch.backends.cpu.get_cpu_capability()}"


def _unlike(group: Sequence[int], sums: Sequence[int]) -> tuple[list[int], bool]:
    """Return the processes of a group that differ from its majority (all without one), and whether there is one."""
    counts: Mapping[int, int] = Counter(sums[process] for process in group)
    usual = max(counts, key=lambda each: counts[each])
    if 2 * counts[usual] <= len(group):
        return list(group), False
    return [process for process in group if sums[process] != usual], True
