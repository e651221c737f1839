"""Memory of this process by category: after the first step of a start, and after running out of memory."""

from __future__ import annotations

import logging
from typing import Any

import torch

from accel_train.metrics.recorder import Recorder
from accel_train.training.ema import Ema
from accel_train.training.memory.held import Held, held, held_gradients

logger = logging.getLogger(__name__)


class MemoryReport:
    """Counts the memory of a training by category. One per process. No collective, and no wait for the device."""

    def __init__(self, ema: Ema, device: torch.device) -> None:
        """Watch the first step for its gradients, which are gone when it has ended."""
        self._ema = ema
        self._device = device
        self._gradients = Held()
        self._rest = 0
        """Bytes of the peak before the update that no category explains."""
        self._watch: Any = ema.view.optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def first_step(self, log: Recorder, step: int) -> None:
        """Write the event ``memory`` after the first step. Later calls do nothing."""
        if self._watch is None:
            return
        self._watch.remove()
        self._watch = None
        log.record("memory", self.fields(), step=step)
        self._gradients = Held()

    def _before_update(self) -> None:
        """Count gradients where they are complete. ZeRO-1 and -2 step one group after the other: the largest counts."""
        self._gradients.raise_to(held_gradients(self._ema.view, self._device))
        if self._device.type == "cuda":
            # The optimizer makes its state only now, so the activations had no more than the rest of this peak.
            peak = torch.cuda.max_memory_allocated(self._device)
            self._rest = max(self._rest, peak - held(self._ema, self._device).total)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event, with the totals of the allocator on CUDA and of the process elsewhere."""
        now = held(self._ema, self._device)
        now.raise_to(self._gradients)
        fields: dict[str, Any] = {"held_bytes": now.device}
        if now.host:
            fields["host_bytes"] = now.host
        return fields | self._totals(now)

    def _totals(self, now: Held) -> dict[str, int]:
        if self._device.type != "cuda":
            import psutil

            return {"process_rss_bytes": psutil.Process().memory_info().rss}
        peak = torch.cuda.max_memory_allocated(self._device)
        return {
            # Each is a lower bound, since not everything counted was there at the peak.
            "rest_of_peak_bytes": max(self._rest, peak - now.total, 0),
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "reserved_bytes": torch.cuda.memory_reserved(self._device),
            "peak_bytes": peak,
        }
