"""Memory of this process by category, reported after the first step of a start and after running out of memory."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_train.metrics.profiling import memory_history
from accel_train.training.memory.description import described
from accel_train.training.memory.held import Held, held, held_gradients
from accel_train.wording import FILE_ONLY

if TYPE_CHECKING:
    from accel_train.metrics.recorder import Recorder
    from accel_train.training.ema import Ema

logger = logging.getLogger(__name__)


@contextmanager
def _harmless() -> Generator[None]:
    """Log an error of the body instead of raising it, so that it neither ends a step nor hides the error that did."""
    try:
        yield
    except Exception as error:
        logger.warning("the memory could not be counted: %s: %s", type(error).__name__, error)


class MemoryReport:
    """Counts the memory of a training by category, one per process. Not collective, and never waits for the device."""

    def __init__(self, ema: Ema, device: torch.device) -> None:
        """Count the gradients during the first step, at whose end they are gone. On CUDA this resets the peak."""
        if device.type == "cuda":
            # Loading or encoding before the training may have had a higher peak.
            torch.cuda.reset_peak_memory_stats(device)
        self._ema = ema
        self._device = device
        self._gradients = Held()
        self._rest = 0
        """Bytes of the peak before the update that belong to no category, such as activations."""
        self._watch: Any = ema.shards.optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def first_step(self, log: Recorder, step: int) -> None:
        """Write the event ``memory`` after the first step. Later calls do nothing."""
        if self._watch is None:
            return
        self._watch.remove()
        self._watch = None
        with _harmless():
            log.record("memory", self._fields(), step=step)
        # Later steps have gradients of their own: if one runs out of memory, these would be wrong.
        self._gradients = Held()

    def after_running_out(self, logs: Path, rank: int) -> dict[str, Any]:
        """Log the memory held now, and return the fields of the event. Not collective. Never raises.

        On CUDA it also writes the allocator's own summary to the log file, and a snapshot to ``logs`` if memory history
        is being recorded.
        """
        fields: dict[str, Any] = {}
        with _harmless():
            fields |= self._fields()
            logger.warning("memory of this process: %s", described(fields))
            if self._device.type == "cuda":
                logger.info("%s", torch.cuda.memory_summary(self._device), extra={FILE_ONLY: True})
                snapshot = logs / f"memory_snapshot_rank_{rank}.pickle"
                if memory_history.write(snapshot):
                    logger.warning("written: %s, for https://pytorch.org/memory_viz", snapshot)
        return fields

    def _before_update(self) -> None:
        """Count gradients when they are complete. ZeRO-1 and -2 step one group after another: the largest counts."""
        with _harmless():
            self._gradients.raise_to(held_gradients(self._ema.shards, self._device))
            if self._device.type == "cuda":
                # The optimizer creates its state only after this, so the rest of this peak bounds the activations.
                peak = torch.cuda.max_memory_allocated(self._device)
                self._rest = max(self._rest, peak - held(self._ema, self._device).total)

    def _fields(self) -> dict[str, Any]:
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
            # Both are lower bounds, since not everything counted was allocated at the peak.
            "rest_of_peak_bytes": max(self._rest, peak - now.total, 0),
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "reserved_bytes": torch.cuda.memory_reserved(self._device),
            "peak_bytes": peak,
        }
