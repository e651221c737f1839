"""Options of the profile, and their checks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from accel_train.config import UsageError, refuse_without_effect

EXAMPLE = "such as --profile.steps 10:20, which is steps 11 to 20"


@dataclass(frozen=True)
class StepRange:
    """Optimizer steps ``start + 1`` to ``stop``, as training lines count them."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start + 1} to {self.stop}"


@dataclass(frozen=True)
class ProfileConfig:
    """Profile of the time of a few steps of the main process."""

    steps: str | None = None
    """Optimizer steps to profile, START:STOP: 10:20 is the ten steps 11 to 20. Writes a Chrome trace, the top operators
    and a summary into report/. These steps are slower, and training lines with them say so. A trace takes up to a
    megabyte a step on the disk and far more in memory while it is read, so ten steps are enough. None: nothing is
    profiled, at no cost."""
    memory: bool = False
    """Also record every allocation on the GPU in these steps, with its Python stack, and write
    report/memory_snapshot.pickle for pytorch.org/memory_viz. Running out of memory in them writes one into logs/.
    Costs microseconds per allocation, and host memory for up to 100,000 of them. Requires profile.steps and CUDA."""

    def __post_init__(self) -> None:
        self.range()
        if self.steps is None:
            because = "without profile.steps, in which allocations are recorded"
            refuse_without_effect(self, "profile", ["memory"], because, f"give a range, {EXAMPLE}")

    def range(self) -> StepRange | None:
        """Return the steps to profile, or None. Raises ``UsageError`` if ``steps`` is not a valid range."""
        if self.steps is None:
            return None
        match = re.fullmatch(r"(\d+):(\d+)", self.steps)
        if match is None:
            raise UsageError(
                f"profile.steps: {self.steps}: START:STOP is required, two numbers of steps from 0 on; {EXAMPLE}"
            )
        steps = StepRange(int(match[1]), int(match[2]))
        if steps.start >= steps.stop:
            raise UsageError(
                f"profile.steps: {self.steps}: STOP must be larger than START, and {steps.stop} is not larger than "
                f"{steps.start}; {EXAMPLE}"
            )
        return steps

    def holds(self, done: int) -> bool:
        """Return True if step ``done``, counted from 1, is profiled."""
        steps = self.range()
        return steps is not None and steps.start < done <= steps.stop

    def notices(self, start_step: int) -> list[str]:
        """Return a log line if some of the steps to profile were done before this start."""
        steps = self.range()
        if steps is None or start_step <= steps.start:
            return []
        left = f"only steps {start_step + 1} to {steps.stop} are" if start_step < steps.stop else "nothing is"
        return [f"profile.steps: {self.steps}: this start resumes at step {start_step}: {left} profiled"]

    def refuse_device(self, kind: str) -> None:
        """Raise ``UsageError`` for recording memory on a device other than CUDA."""
        if self.memory and kind != "cuda":
            raise UsageError(
                f"profile.memory: true: torch records the allocations of CUDA only, and this run is on {kind}; "
                "leave it out, or simulate the memory of the step (accel-train simulate)"
            )

    def refuse_without_training(self) -> None:
        """Raise ``WithoutEffectError`` for steps to profile, in a start that does no steps."""
        # Recording memory requires the steps, so it gives way with them.
        because = "with evaluate_only: true, which does no steps"
        refuse_without_effect(self, "profile", ["steps", "memory"], because)

    def refuse_beyond(self, max_steps: int) -> None:
        """Raise ``UsageError`` for a range that the run does not reach."""
        steps = self.range()
        if steps is not None and steps.stop > max_steps:
            raise UsageError(
                f"profile.steps: {self.steps}: the run has max_steps {max_steps}, so STOP can be at most {max_steps}; "
                "choose earlier steps, or raise --max_steps"
            )
