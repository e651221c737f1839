"""The faults of a drill, and the runs in which they happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from accel_train.config import UsageError
from accel_train.drill.inside.request import Action
from accel_train.verification import plan as verification
from accel_train.wording import did_you_mean, nearest

Ending = Literal["killed", "stopped", "error", "trained"]
"""Required end of the run: by the signal, with exit code 75, with 1, or with 0 because training continues."""

SET_HERE = (
    *("output_dir", "max_steps", "max_epochs", "resume", "overwrite", "evaluate_only", "init_from"),
    *("checkpoints.save_every", "checkpoints.save_every_minutes", "checkpoints.save_every_epochs"),
    *("evaluation.every", "log.log_every", "hub.repo_id"),
)
"""Options set by the runs of a drill."""
HANG_SECONDS = 30
"""``collective_timeout_seconds`` of the run with a hanging process, unless the user gives it."""


@dataclass(frozen=True)
class Fault:
    """One fault, injected into one run."""

    name: str
    title: str
    action: Action
    ending: Ending
    failpoint: str = ""

    @property
    def in_evaluation(self) -> bool:
        return self.action.endswith("_in_evaluation")


FAULTS = (
    Fault("kill_in_step", "SIGKILL in a training step", "kill", "killed"),
    Fault("sigterm_in_training", "SIGTERM in training", "stop", "stopped"),
    Fault("sigterm_in_evaluation", "SIGTERM in an evaluation", "stop_in_evaluation", "stopped"),
    Fault("kill_in_save", "SIGKILL in a save", "failpoint", "killed", "before_seal=kill"),
    Fault("full_disk_in_save", "disk full in a save", "failpoint", "error", "before_seal=ENOSPC"),
    Fault("hub_down", "the Hub is gone after the start", "hub_down", "trained"),
    Fault("hanging_rank", "a process hangs in a step", "hang", "error"),
    Fault("failing_evaluation", "an evaluation that raises", "raise_in_evaluation", "error"),
)


@dataclass(frozen=True)
class Sizes:
    """Steps of the runs."""

    steps: int

    @property
    def save_every(self) -> int:
        """Interval that gives two saves before the last step, with steps between and after them."""
        return (self.steps - 2) // 2

    @property
    def struck(self) -> int:
        """Steps done when a fault hits a step: one more than the first save has."""
        return self.save_every + 1


def refuse_options_set_here(arguments: Sequence[str]) -> None:
    """Raise ``UsageError`` for flags overridden by the runs."""
    verification.refuse_given(arguments, SET_HERE, "drill")


def choose(names: Sequence[str]) -> list[Fault]:
    """Return the faults by their names, all without names. Raises ``UsageError`` for an unknown one."""
    known = [fault.name for fault in FAULTS]
    for name in names:
        if name not in known:
            hint = did_you_mean(nearest(name, known))
            raise UsageError(f"--faults {name}: no such fault; the faults are {', '.join(known)}{hint}")
    return [fault for fault in FAULTS if not names or fault.name in names]


def obstacle(fault: Fault, options: Mapping[str, Any], processes: int) -> str | None:
    """Return why a fault cannot happen in this recipe on this layout, or None."""
    if fault.name == "hanging_rank" and processes < 2:
        return "it needs two processes that wait for each other; give --num_processes 2"
    if fault.name == "hub_down" and "hub.repo_id" not in options:
        return "the recipe has no option hub.repo_id: it pushes nothing"
    return None


def adapt(fault: Fault, options: Mapping[str, Any]) -> Fault:
    """Return the fault with the ending that the config asks for."""
    if fault.name == "full_disk_in_save" and options["checkpoints.on_error"] == "continue":
        return replace(fault, ending="trained")
    return fault


def run_flags(options: Mapping[str, Any], arguments: Sequence[str], sizes: Sizes, *, on_devices: bool) -> list[str]:
    """Return the words that every run gets after the user's own: a few steps of a small batch, two saves."""
    batch = verification.choose_sizes(options, arguments, sizes.steps)
    flags = verification.common_flags(options, arguments, batch)
    # At the same steps on every machine, whatever the config says.
    every = str(sizes.save_every)
    flags |= {
        "checkpoints.save_every": every,
        # By the clock, a save could come at any step.
        "checkpoints.save_every_minutes": "0",
        "checkpoints.save_every_epochs": "0",
    }
    if "evaluation.every" in options:
        # In the middle of the run, because after the last step a fault has nothing left to disturb.
        flags["evaluation.every"] = every
    if on_devices:
        # fp32 is for the CPU. Devices use the precision of the config.
        flags.pop("precision", None)
    return ["--smoke", *verification.words_of(flags)]


def fault_flags(fault: Fault, arguments: Sequence[str], repository: str) -> list[str]:
    """Return the additional words for the runs of one fault."""
    if fault.name == "hub_down":
        # One round of the queue at the end, which cannot succeed.
        return verification.words_of({"hub.repo_id": repository, "hub.push": "every", "hub.finish_minutes": "0.02"})
    given = verification.given_flags(arguments)
    if fault.name == "hanging_rank" and "collective_timeout_seconds" not in given:
        return verification.words_of({"collective_timeout_seconds": str(HANG_SECONDS)})
    return []
