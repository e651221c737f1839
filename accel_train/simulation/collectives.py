"""Collectives of a step: kind, group, bytes of the whole tensor, and the modelled bytes that each process sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accel_train.simulation.ledger import COMMUNICATION, Ledger
from accel_train.simulation.tensors.fake_tensors import tensors_in

KINDS: Mapping[str, str] = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
}
"""Kind of collective by the name of torch's operator, in the namespaces c10d and _c10d_functional."""
# Operators of the same namespaces that send no tensor.
NOT_COUNTED = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


@dataclass(frozen=True)
class Collective:
    """One collective, as called on one process."""

    kind: str
    group_size: int
    size: int
    """Bytes of the whole tensor that is reduced, gathered or scattered. All-to-all: this process's larger side."""
    stride: int = 1
    """Distance between the ranks of the group: above 1 under HSDP, between processes with the same shards."""

    @property
    def sent(self) -> int:
        """Bytes sent by each process in a ring algorithm."""
        return sent_bytes(self.kind, self.group_size, self.size)


@dataclass(frozen=True)
class Row:
    """All collectives of one kind and group."""

    kind: str
    group_size: int
    count: int
    size: int
    """Sum of the bytes of the whole tensors."""
    sent: int
    """Bytes sent by each process in a ring algorithm."""
    stride: int = 1
    """Distance between the ranks of the group."""


@dataclass
class Collectives:
    """Collectives seen so far. ``ledger``, if given, is told which storages they read and write."""

    ledger: Ledger | None = None
    seen: list[Collective] = field(default_factory=list[Collective])
    gathered: str = COMMUNICATION
    """Category of the tensors of an all-gather that have no other category."""

    def watch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the operator if it is a collective. Raises ``ValueError`` for an unknown one."""
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        name = func._schema.name.partition("::")[2]
        if name in NOT_COUNTED:
            return
        # An error, because traffic that is not counted would silently make the table wrong.
        if name not in KINDS:
            raise ValueError(f"collective {func}: not known to the simulation")
        kind = KINDS[name]
        values = [*args, *kwargs.values()]
        group = _group(values)
        tensors = list(tensors_in(values))
        size = _whole(kind, name, tensors, group.size())
        self.seen.append(Collective(kind, group.size(), size, _stride(group)))
        if self.ledger is not None:
            # Only a suggestion: a tensor that has a category, such as a bucket of gradients, keeps it.
            self.ledger.suggest(tensors, self.gathered if kind == "all-gather" else COMMUNICATION)

    def rows(self) -> list[Row]:
        """Return the sums by kind and group, largest first."""
        sums: dict[tuple[str, int, int], list[int]] = {}
        for call in self.seen:
            count_and_size = sums.setdefault((call.kind, call.group_size, call.stride), [0, 0])
            count_and_size[0] += 1
            count_and_size[1] += call.size
        rows: list[Row] = []
        for (kind, group_size, stride), (count, size) in sums.items():
            rows.append(Row(kind, group_size, count, size, sent_bytes(kind, group_size, size), stride))
        return sorted(rows, key=lambda row: -row.size)


def sent_bytes(kind: str, group_size: int, size: int) -> int:
    """Return the bytes each process sends in a ring: ``(N - 1) / N`` of ``size``, and twice that for an all-reduce."""
    passes = 2 if kind == "all-reduce" else 1
    return round(passes * size * (group_size - 1) / group_size)


def _stride(group: dist.ProcessGroup) -> int:
    """Return the distance between the ranks of a group. In torch's device meshes it is constant."""
    ranks = dist.get_process_group_ranks(group)
    return ranks[1] - ranks[0] if len(ranks) > 1 else 1


def _group(values: Sequence[Any]) -> dist.ProcessGroup:
    value: Any
    for value in values:
        if isinstance(value, str) and value.isdigit():
            # Functional collectives refer to their group by name.
            resolve: Any = dist.distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateUsage]
            return resolve(value)
        if "ProcessGroup" in str(getattr(value, "_type", lambda: "")()):
            unbox: Any = dist.ProcessGroup.unbox
            return unbox(value)
        if isinstance(value, dist.ProcessGroup):
            return value
    raise ValueError(f"no process group among {values}")


def _whole(kind: str, name: str, tensors: Sequence[Tensor], group_size: int) -> int:
    """Return the bytes of the whole tensor. The arguments may contain it, its shards, or both."""
    if kind in ("all-reduce", "broadcast", "reduce"):
        return sum(map(_bytes, tensors))
    if len(tensors) == 1:
        size = _bytes(tensors[0])
        # Functional collectives return their result, so their only argument is the shard or the whole.
        return size * group_size if kind == "all-gather" else size
    if name in ("allgather_", "reduce_scatter_") or "_coalesced" in name:
        # One side has lists of shards, or several whole tensors, and the other the process's own shards.
        # So the sum is N + 1 shards of each tensor.
        return sum(map(_bytes, tensors)) * group_size // (group_size + 1)
    return max(map(_bytes, tensors))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
