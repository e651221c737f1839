"""Checkpoints of a run on the Hub, as a directory from which it can be replayed. The Hub has no log of a run."""

from __future__ import annotations

from pathlib import Path

from accel_train.config import UsageError
from accel_train.rerun.recorded import RecordedRun
from accel_train.store import manifest
from accel_train.store.run_file import recall
from accel_train.wording import shortened

HUB = "hub:"


def open_hub_run(place: str, first: int, last: int, directory: Path) -> RecordedRun:
    """Download the newest checkpoint at or before ``first`` and those up to ``last``. Raises like ``hub.download``."""
    from accel_train.hub.download import download, pushed_steps

    spec = place.removeprefix(HUB)
    if "@" in spec:
        raise UsageError(f"{place}: --steps chooses the checkpoints; leave out what follows the @")
    steps = pushed_steps(spec)
    before = [step for step in steps if step <= first]
    within = [step for step in steps if first < step <= last]
    if not before or not within:
        there = shortened([str(step) for step in steps], 12)
        raise UsageError(
            f"--steps {first}:{last}: {place} has the checkpoints {there}; one at or before step {first} is required, "
            f"and one after it up to step {last}, because the Hub has no log to compare with"
        )
    # Only what is needed: a checkpoint may have gigabytes.
    for step in (before[-1], *within):
        print(f"downloading step {step} of {place}", flush=True)
        download(f"{spec}@{step}", directory / "checkpoints")
    saved, reason = recall(directory)
    if saved is None:
        raise UsageError(f"{place}: its manifests do not say what the experiment is ({reason}); push it anew")
    return RecordedRun(place, directory, saved, [], manifest.committed(directory / "checkpoints"))
