"""Spikes of the gradient norm, found on the device: norms of the last trained steps, and their median."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Spikes:
    """The gradient norms of the last ``window`` trained steps, as a ring on the device.

    Threshold and comparison are tensors, so a step is judged before its update without a wait for the device. Only the
    report lags: it comes when the host reads the verdicts, at a log point or a save. All ranks decide alike, because
    they have the norm of the same reduced gradient. Costs a sort of ``window`` numbers per step.
    """

    def __init__(self, factor: float, window: int, device: torch.device) -> None:
        self._factor = factor
        self._window = window
        # Made on the device, because a copy from the host would wait.
        self._norms = torch.zeros(window, device=device)
        self._places = torch.arange(window, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def limit(self) -> Tensor:
        """Return the largest norm that is no spike. Infinite until the window is full, and while its median is 0."""
        ordered = self._norms.sort().values
        # The lower of the two middle values, which is a measured norm.
        median = ordered[(self._window - 1) // 2]
        # Steps without a gradient set no limit: a limit of 0 would scale a gradient of 0 to NaN.
        is_usual = (self._count >= self._window) & (median > 0)
        return torch.where(is_usual, self._factor * median, torch.inf)

    def add(self, norm: Tensor, trained: Tensor | None = None) -> None:
        """Replace the oldest norm, but not where ``trained`` is 0."""
        # A mask, because an index from the device would make the host wait for it.
        is_next = self._places == self._count % self._window
        if trained is None:
            self._norms = torch.where(is_next, norm, self._norms)
            self._count += 1
        else:
            self._norms = torch.where(is_next & (trained > 0), norm, self._norms)
            self._count += (trained > 0).long()

    def read(self) -> list[float]:
        """Return the norms, oldest first, for a checkpoint. Waits for the device."""
        norms: list[float] = self._norms.tolist()
        count = int(self._count)
        # Until the ring is full, its oldest entry is at 0.
        if count < self._window:
            return norms[:count]
        # The position that the next norm replaces.
        oldest = count % self._window
        return norms[oldest:] + norms[:oldest]

    def write(self, norms: Sequence[float]) -> None:
        """Continue from the norms of ``read``. A smaller window keeps the latest."""
        latest = list(norms)[-self._window :]
        self._norms.zero_()
        self._norms[: len(latest)] = torch.tensor(latest, device=self._norms.device)
        self._count.fill_(len(latest))
