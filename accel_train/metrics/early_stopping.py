"""Early stopping, based on the evaluations in ``metrics.jsonl``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from accel_train.metrics.records import last_pass, read_metrics

logger = logging.getLogger(__name__)


class EarlyStopping:
    """Counts evaluations since the best. Built and called on every process with the same metrics.

    It is not part of a checkpoint: a resumed run reads its earlier evaluations from ``metrics.jsonl``.
    """

    def __init__(self, patience: int | None, metric: str, directory: Path, start_step: int, after: int = 0) -> None:
        """End the run after ``patience`` evaluations without a lower ``metric``. None never ends it.

        Evaluations in the first ``after`` steps, before the metric's loss is trained, do not count.
        """
        self.patience = patience
        self.metric = metric
        self.after = after
        self._values: list[float] = []
        # Read on every process, so that all of them end the run at the same step.
        path = directory / "metrics.jsonl"
        if patience is not None and start_step and path.exists():
            for line in last_pass(read_metrics(path), "evaluation"):
                if after < line["step"] <= start_step and metric in line:
                    self._values.append(float(line[metric]))
        if self.exhausted:
            logger.info(f"the run has ended at step {start_step}: no better {metric} for {patience} evaluations")

    @property
    def exhausted(self) -> bool:
        """True if the run should end now."""
        if self.patience is None or not self._values:
            return False
        values = self._comparable()
        best = values.index(min(values))  # the first of equal values, so a tie is no improvement
        return len(values) - 1 - best >= self.patience

    def _comparable(self) -> list[float]:
        # Python's `min` keeps a NaN that comes first, whatever follows.
        return [math.inf if math.isnan(value) else value for value in self._values]

    def ended(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record the metrics after ``step`` steps, empty for an interrupted evaluation. Return True to end the run."""
        if not metrics or self.patience is None or step <= self.after:
            return False
        self._values.append(metrics[self.metric])
        if self.exhausted:
            best = min(self._comparable())
            logger.info(f"{self.metric} has not been below {best:.4g} for {self.patience} evaluations: the run ends")
        return self.exhausted
