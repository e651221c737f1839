"""``accel-train forget``: train a run again without some samples, from the newest checkpoint before their first use."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.compare.runs import InterruptedRunError, RunFailedError, report_failure, stop_signals_raise
from accel_train.config import UsageError
from accel_train.rerun import changes, recorded
from accel_train.rerun.branch import branch
from accel_train.rerun.recorded import RecordedRun
from accel_train.rerun.samples import again
from accel_train.rerun.samples.again import Beginning
from accel_train.wording import shortened

OPTION = "without_samples"


@dataclass(frozen=True)
class Request:
    """Options of the command line."""

    run: str
    samples: Sequence[int]
    output_dir: str | None = None
    """None: beside the run, with the step and the samples in its name."""
    recipe: str | None = None


def forget(request: Request) -> int:
    """Train the run without the samples, in a directory of its own, and compare the two. Return exit code 0, or 1.

    Raises ``UsageError``. Main thread only, because it handles the stop signals.
    """
    run = recorded.open_run(request.run)
    recipe = recorded.recipe_of(run, request.recipe)
    with tempfile.TemporaryDirectory(prefix="accel-train-forget-") as folder, stop_signals_raise():
        try:
            wanted = {"first_use": {"samples": list(request.samples), "last": run.last_step}}
            # From the beginning, so that no checkpoint is read for what only the order decides.
            found = again.observe(Beginning(run, recipe, None, _batches(run)), run.last_step, wanted, Path(folder))
        except (RunFailedError, InterruptedRunError) as error:
            return report_failure(error, "nothing is trained")
    _refuse_unknown(request, found["dataset_size"])
    first = found["first_use"]
    if first is None:
        print(f"none of these samples was used up to step {run.last_step}: the run already excludes them", flush=True)
        return 0
    _refuse_without_checkpoint(run, request, first)
    print(f"first use of these samples: step {first}", flush=True)
    return branch(request.run, _arguments(request, run, first))


def _batches(run: RecordedRun) -> Mapping[str, Any]:
    """Return the batch sizes that the run has measured: nothing is trained here, so they cannot be measured again."""
    options = recorded.options_at(run, None)
    return changes.measured_batches(options, run.newest_manifest(), run.lines("noise_scale"))


def _refuse_unknown(request: Request, size: int) -> None:
    unknown = [str(sample) for sample in request.samples if not 0 <= sample < size]
    if unknown:
        raise UsageError(f"samples {shortened(unknown, 8)}: the training split has {size}, 0 to {size - 1}")


def _refuse_without_checkpoint(run: RecordedRun, request: Request, first: int) -> None:
    if any(step < first for step, _ in run.checkpoints):
        return
    steps = shortened([str(step) for step, _ in run.checkpoints], 12)
    ids = " ".join(map(str, request.samples))
    raise UsageError(
        f"samples {ids}: first used in step {first}, and {run.directory} has the checkpoints {steps}, none before it; "
        f"train from the beginning: its config.yaml with --{OPTION} {ids} and an unused --output_dir"
    )


def _arguments(request: Request, run: RecordedRun, first: int) -> list[str]:
    """Return the words for ``branch``, which also name the samples that the run already leaves out."""
    before: Sequence[int] = run.saved["experiment"].get(OPTION, ())
    words = ["--at", str(first - 1)]
    if request.output_dir is not None:
        words += ["--output_dir", request.output_dir]
    if request.recipe is not None:
        words += ["--recipe", request.recipe]
    return [*words, f"--{OPTION}", *map(str, sorted({*before, *request.samples}))]
