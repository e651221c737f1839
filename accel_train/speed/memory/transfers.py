"""Copies between host and device that overlap with kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

PIECE_BYTES = 2 << 20
"""Unit of pinned memory, so that inputs of any size can reuse what others have freed. A power of two, because torch
rounds each allocation up to one."""


@torch.no_grad()
def copy_beside(
    stream: torch.cuda.Stream, device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]]
) -> torch.cuda.Event:
    """Begin to copy each (source, target) on ``stream``, and return the event after the last one.

    The host does not wait, if the host memory is pinned.
    """
    # What has been launched so far may still write a source, or read what lies in a target now.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(stream)
    return copied


class Transfers(Protocol):
    """Copies between a device and host memory, made in the order of the calls."""

    device: torch.device

    def send(self, source: Tensor) -> tuple[Any, Any]:
        """Begin to copy bytes to the host. Return the host's copy and the event of its completion."""
        ...

    def fetch(self, host: Any, target: Tensor) -> Any:
        """Begin to copy the host's copy to ``target``. Return the event of the completion."""
        ...

    def wait(self, event: Any) -> None:
        """Let the kernels that are launched from now on wait for the event."""
        ...

    def free(self, host: Any) -> None:
        """Release host memory for later copies."""
        ...


class _Copied(NamedTuple):
    """The end of a copy, and the stream whose memory it reads or writes."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream


class PinnedTransfers:
    """Transfers of a CUDA device on a stream of their own, with pinned memory that is kept for the run.

    torch's own cache of pinned memory hands a piece out again only when the host sees that the device is done with it.
    The host is ahead of the device, so the cache would grow. Here the order of the one stream is enough.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._free: list[Tensor] = []

    def send(self, source: Tensor) -> tuple[Sequence[Tensor], _Copied]:
        """Begin to copy bytes to pinned memory."""
        parts = source.split(PIECE_BYTES)
        host = [self._piece() for _ in parts]
        pairs = [(part, piece[: len(part)]) for part, piece in zip(parts, host, strict=True)]
        return host, self._copy(pairs)

    def fetch(self, host: Sequence[Tensor], target: Tensor) -> _Copied:
        """Begin to copy pinned memory to the device."""
        parts = target.split(PIECE_BYTES)
        pairs = [(piece[: len(part)], part) for part, piece in zip(parts, host, strict=True)]
        return self._copy(pairs)

    def wait(self, event: _Copied) -> None:
        """Let the current stream wait, and the stream whose memory the copy uses."""
        torch.cuda.current_stream(self.device).wait_event(event.event)
        # A graph, and with it the memory, may be freed while another stream is current.
        event.stream.wait_event(event.event)

    def free(self, host: Sequence[Tensor]) -> None:
        """Keep the pieces for the next inputs."""
        self._free.extend(host)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> _Copied:
        event = copy_beside(self._stream, self.device, pairs)
        return _Copied(event, torch.cuda.current_stream(self.device))

    def _piece(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
