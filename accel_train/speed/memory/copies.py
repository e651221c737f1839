"""Copies between host and device beside the kernels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def copy_beside(
    stream: torch.cuda.Stream, device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]]
) -> torch.cuda.Event:
    """Begin to copy each (source, target) on ``stream``, and return the event behind the last one.

    Nothing waits on the host, if the side in host memory is pinned.
    """
    # What has been launched so far may still write a source, or read what lies in a target now.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(stream)
    return copied
