"""Order of rows that are stored in blocks, for data that do not fit into memory.

In each epoch the blocks are permuted and cut into windows of `window` blocks. The rows of a window are permuted among
themselves. So a reader needs the blocks of one window at a time (two, where a batch spans the border), and reads each
block once per epoch. What is random within what:

    blocks          any block may come anywhere in an epoch, with any others in its window
    rows            any row of a window may come anywhere in the window
    not random      two rows of one block are always in one window, so never further apart than its rows

All permutations are keyed by (seed, epoch) and evaluated on demand: any position is found without those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from accel_train import rng
from accel_train.config import UsageError

CHUNK = 4096
"""Rows computed at a time. Has no effect on the order."""
Ints = NDArray[np.int64]


# Compared and hashed by identity: the caches below are keyed by this object.
@dataclass(frozen=True, eq=False)
class BlockOrder:
    """Keyed order of the rows of blocks. Row numbers count through the blocks as they are stored."""

    sizes: Sequence[int]
    """Rows of each block, 0 allowed."""
    window: int
    """Blocks whose rows are mixed, at least 1. More mixes better and needs more memory."""
    starts: Ints = field(init=False, repr=False)
    """First row of each block, and the number of rows in all."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"window={self.window}: at least 1 block is required, whose rows are mixed. Raise it.")
        ends = np.cumsum(self.sizes, dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), ends])
        object.__setattr__(self, "starts", starts)  # the dataclass is frozen

    def __len__(self) -> int:
        return int(self.starts[-1])

    def rows(self, seed: int, epoch: int, offset: int, count: int) -> Sequence[int]:
        """Return the rows of an epoch from place `offset` on: at least 1, at most `count`.

        They end with the window, or earlier. Call it again for the rows after them.
        """
        layout = _layout(self, seed, epoch)
        # side="right" skips windows without rows.
        window = int(np.searchsorted(layout.ends, offset, side="right"))
        first = int(layout.ends[window - 1]) if window else 0
        chunk, within = divmod(offset - first, CHUNK)
        return _shuffled_rows(self, seed, epoch, window, chunk)[within : within + count]


class _Layout(NamedTuple):
    """Order of the blocks in one epoch."""

    blocks: Ints
    """Blocks in the order of the epoch."""
    ends: Ints
    """Number of rows up to the end of each window."""


@lru_cache(maxsize=4)
def _layout(order: BlockOrder, seed: int, epoch: int) -> _Layout:
    count = len(order.sizes)
    places = torch.arange(count, device="cpu")
    blocks = rng.permute(places, count, rng.key(seed, "blocks", epoch)).numpy()
    rows = np.cumsum(np.diff(order.starts)[blocks])
    ends = np.arange(order.window, count + order.window, order.window)
    last = np.minimum(ends, count) - 1
    return _Layout(blocks, rows[last])


@lru_cache(maxsize=32)
def _shuffled_rows(order: BlockOrder, seed: int, epoch: int, window: int, chunk: int) -> Sequence[int]:
    """Return up to CHUNK rows of a window, from its place chunk * CHUNK on."""
    layout = _layout(order, seed, epoch)
    blocks = layout.blocks[window * order.window : (window + 1) * order.window]
    sizes = np.diff(order.starts)[blocks]
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    end = min(total, (chunk + 1) * CHUNK)
    places = torch.arange(chunk * CHUNK, end, device="cpu")
    # Keyed by the epoch and then by the window: one key alone takes one counter.
    # Cut to 32 bits, the range of a seed.
    of_epoch = rng.key(seed, "windows", epoch) & 0xFFFFFFFF
    key = rng.key(of_epoch, "rows", window)
    permuted = rng.permute(places, total, key).numpy()
    block = np.searchsorted(ends, permuted, side="right")
    rows = order.starts[blocks[block]] + permuted - (ends - sizes)[block]
    return rows.tolist()
