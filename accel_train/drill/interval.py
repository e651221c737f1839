"""Save interval in steps: the first-order optimum of Young (1974) and Daly (2006).

Over an interval tau of training, a save that stops training for C costs C / tau of the time. A failure, one in M on
average, costs tau / 2 of repeated work. The sum is smallest at tau = sqrt(2 C M). What each failure costs anyway, the
restart and the save that was not yet committed, does not move the optimum.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

HOUR = 3600.0


@dataclass(frozen=True)
class Costs:
    """Durations on one machine, in seconds."""

    step_seconds: float
    save_seconds: float
    """Time for which a save stops training."""
    commit_seconds: float
    """Time from the snapshot until the checkpoint can be resumed from."""
    restart_seconds: float
    """Time from the start of the command until training continues."""
    mtbf_seconds: float
    """Mean time between failures."""

    def share_lost(self, interval_seconds: float) -> float:
        """Return the expected share of time lost to saves and failures with one save in ``interval_seconds``."""
        saves = self.save_seconds / interval_seconds
        # A save under way at the failure is lost with it, so the newest checkpoint is older by that.
        repeated = interval_seconds / 2 + self.commit_seconds
        return saves + (repeated + self.restart_seconds) / self.mtbf_seconds

    def best_interval(self) -> float:
        """Return the seconds between two saves with the smallest share lost, sqrt(2 C M)."""
        return math.sqrt(2 * self.save_seconds * self.mtbf_seconds)

    def best_steps(self) -> int:
        """Return ``best_interval`` in steps, at least one and not shorter than a save needs to be committed."""
        steps = round(self.best_interval() / self.step_seconds)
        # The next save waits for the one before, which would stop training for longer than measured.
        fewest = math.ceil(self.commit_seconds / self.step_seconds)
        return max(1, steps, fewest)


@dataclass(frozen=True)
class Present:
    """Save interval of the config."""

    text: str
    """For people, such as ``save_every 500``."""
    interval_seconds: float | None
    """None if saves are by epochs, or only at the end: their interval in seconds is unknown here."""


@dataclass(frozen=True)
class Recommendation:
    """A value of ``checkpoints.save_every``, with the expected shares of time lost."""

    costs: Costs
    present: Present

    @property
    def save_every(self) -> int:
        return self.costs.best_steps()

    @property
    def share(self) -> float:
        """Share lost at the recommended value."""
        return self.costs.share_lost(self.save_every * self.costs.step_seconds)

    @property
    def present_share(self) -> float | None:
        """Share lost at the present value."""
        seconds = self.present.interval_seconds
        # Nothing is guessed if the present interval is unknown.
        return None if seconds is None else self.costs.share_lost(seconds)

    def as_json(self) -> dict[str, Any]:
        """Return the recommendation with the numbers behind it."""
        return {
            "save_every": self.save_every,
            "expected_share_lost": self.share,
            "present": self.present.text,
            "present_expected_share_lost": self.present_share,
            **asdict(self.costs),
        }
