"""Early stopping, based on the evaluations in ``metrics.jsonl``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from accelerate import Accelerator

from accel_train.metrics.logs import info
from accel_train.metrics.records import last_pass, read_metrics
from accel_train.runtime.main_alone import on_main

logger = logging.getLogger(__name__)


class EarlyStopping:
    """Counts the evaluations since the best one. All processes call it, and the main process decides.

    The count is not part of a checkpoint. On a resume the main process counts the earlier evaluations in
    ``metrics.jsonl`` again, because other hosts may not have that file.
    """

    def __init__(
        self, accelerator: Accelerator, patience: int, metric: str, mode: Literal["min", "max"] = "min", after: int = 0
    ) -> None:
        """End the run after ``patience`` evaluations without a better ``metric``: lower for ``min``, else higher.

        Evaluations in the first ``after`` steps, before the metric's loss is trained, do not count.
        """
        self.patience = patience
        self.metric = metric
        self.after = after
        self.exhausted = False
        """True once the run should end."""
        self._accelerator = accelerator
        self._sign = 1.0 if mode == "min" else -1.0
        self._best: float | None = None
        self._best_step = 0
        self._since_best = 0

    def resume(self, directory: Path, start_step: int) -> None:
        """Count the evaluations up to ``start_step``, the step to resume from. Collective."""
        self.exhausted = on_main(self._accelerator, lambda: self._count_earlier(directory, start_step))

    def notice(self, step: int) -> str:
        """Return the log line for starting a run that early stopping has already ended."""
        return (
            f"the run has ended at step {step}: no better {self.metric} for {self.patience} evaluations; give more "
            "--checkpoints.patience, or None, to continue"
        )

    def ended(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Count the evaluation after ``step`` steps. Return True to end the run, on every process. Collective."""
        self.exhausted = on_main(self._accelerator, lambda: self._count(step, metrics), training=True)
        if self.exhausted:
            info(
                logger,
                f"no better {self.metric} for {self.patience} evaluations: the run ends. The best was that of step "
                f"{self._best_step}; RUN@best is the best checkpoint that is kept",
            )
        return self.exhausted

    def _count_earlier(self, directory: Path, start_step: int) -> bool:
        path = directory / "metrics.jsonl"
        if not start_step or not path.exists():
            return False
        is_over = False
        for line in last_pass(read_metrics(path), "evaluation"):
            # Later evaluations are of steps that are trained again.
            if line["step"] <= start_step and self.metric in line:
                is_over = self._count(line["step"], line)
        return is_over

    def _count(self, step: int, metrics: Mapping[str, float]) -> bool:
        if step <= self.after:
            return False
        value = self._sign * float(metrics[self.metric])
        # Every comparison with NaN is False. It counts as the worst value.
        if math.isnan(value):
            value = math.inf
        # Strictly better, so that a tie is no improvement.
        if self._best is None or value < self._best:
            self._best = value
            self._best_step = step
            self._since_best = 0
        else:
            self._since_best += 1
        return self._since_best >= self.patience
