"""End a run that has stopped getting better, from what it has recorded of itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from accel_train.metrics.records import read_metrics

logger = logging.getLogger(__name__)


class EarlyStopping:
    """Counts evaluations since the best. Made and asked on every process, with figures that are the same on all.

    It keeps no state of its own: a resumed run reads its earlier evaluations from ``metrics.jsonl``.
    """

    def __init__(self, patience: int | None, metric: str, directory: Path, start_step: int, after: int = 0) -> None:
        """``patience`` evaluations without a lower ``metric`` end the run; None: nothing does. Those of the first
        ``after`` steps, in which what the metric measures is not trained, do not count."""
        self.patience, self.metric, self.after = patience, metric, after
        path = directory / "metrics.jsonl"
        records = read_metrics(path) if patience is not None and start_step and path.exists() else []
        found = [r for r in records if r["event"] == "evaluation" and after < r["step"] <= start_step and metric in r]
        self._values = list({r["step"]: float(r[metric]) for r in found}.values())
        if self.exhausted:
            logger.info(f"the run has ended at step {start_step}: no better {metric} for {patience} evaluations")

    @property
    def exhausted(self) -> bool:
        """Whether the run is to end here."""
        if self.patience is None or not self._values:
            return False
        since_best = len(self._values) - 1 - self._values.index(min(self._values))
        return since_best >= self.patience

    def ended(self, step: int, figures: Mapping[str, float]) -> bool:
        """Take the figures of an evaluation after ``step`` steps, empty where it was broken off: whether to end."""
        if not figures or self.patience is None or step <= self.after:
            return False
        self._values.append(figures[self.metric])
        if self.exhausted:
            best = min(self._values)
            logger.info(f"{self.metric} has not been below {best:.4g} for {self.patience} evaluations: the run ends")
        return self.exhausted
