"""Bad steps of a run: the number skipped, and those not logged yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_train.training.health.evidence import BadStep, NonFiniteError


class History:
    """Counts of skipped steps, kept in the checkpoint. The same on every rank."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self.skipped = 0
        """Steps without an update since the start of the run, earlier starts included."""
        self.in_a_row = 0
        """Skipped steps since the last trained one."""
        self.without_samples = 0
        """Steps without an update because none of their samples has a weight, earlier starts included."""
        self.left_out: list[int] = []
        """Samples left out after rollbacks, in this start or before the checkpoint that it continues."""
        self.left_out_data = ""
        """Hash of the data that the sample numbers refer to."""
        self._row: list[BadStep] = []
        self._unreported: list[tuple[BadStep, bool]] = []

    def trained(self) -> None:
        """Count a step whose update was made."""
        self.in_a_row = 0
        self._row = []

    def warn(self, bad: BadStep) -> None:
        """Remember a bad step whose update was made."""
        self.trained()
        self._unreported.append((bad, False))

    def skip(self, bad: BadStep) -> None:
        """Count a bad step whose update was left out. Raises ``NonFiniteError`` for one too many in a row."""
        self.skipped += 1
        self.in_a_row += 1
        self._row.append(bad)
        self._unreported.append((bad, True))
        # Counted first, so that the message and a later look at the counts agree.
        if self.in_a_row > self._max_in_a_row:
            steps = "; ".join(f"{each.finding}, samples {each.suspects}" for each in self._row)
            # Only the counts of a checkpoint come back with a resume.
            earlier = self.in_a_row - len(self._row)
            since = f" ({earlier} of them before the resume)" if earlier else ""
            raise NonFiniteError(
                f"{self.in_a_row} steps in a row were skipped{since}, and health.max_skipped allows "
                f"{self._max_in_a_row}; the last checkpoint is untouched. {steps}. Look at those samples, lower the "
                "learning rate, or start again with a larger --health.max_skipped"
            )

    def leave_out(self) -> None:
        """Count a step in which no sample has a weight. It is not a bad step."""
        self.without_samples += 1

    def take_unreported(self) -> list[tuple[BadStep, bool]]:
        """Return each bad step not returned before, and whether it was skipped."""
        unreported = self._unreported
        self._unreported = []
        return unreported

    def state(self) -> dict[str, Any]:
        """Return the counts and samples for a checkpoint. Empty if every step was trained."""
        state: dict[str, Any] = {}
        if self.without_samples > 0:
            state["without_samples"] = self.without_samples
        if self.skipped > 0:
            state |= {"skipped": self.skipped, "skipped_in_a_row": self.in_a_row}
        if self.left_out:
            state |= {"left_out": self.left_out, "left_out_data": self.left_out_data}
        return state

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the counts of ``state``."""
        self.skipped = int(saved.get("skipped", 0))
        self.without_samples = int(saved.get("without_samples", 0))
        # A resume continues the row. If a restart reset it, the limit would never be reached.
        self.in_a_row = int(saved.get("skipped_in_a_row", 0))
        self.left_out = list(map(int, saved.get("left_out", [])))
        self.left_out_data = str(saved.get("left_out_data", ""))
