"""``accel-train blame``: which samples of one optimizer step stand out, and what the step is without them."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel_train.compare.runs import InterruptedRunError, RunFailedError, report_failure, stop_signals_raise
from accel_train.config import UsageError
from accel_train.metrics.records import plain
from accel_train.rerun import recorded
from accel_train.rerun.receipt import describe_checkpoint
from accel_train.rerun.recorded import RecordedRun
from accel_train.rerun.samples import again, suspects
from accel_train.rerun.samples.again import Beginning
from accel_train.rerun.starts import Line
from accel_train.store import atomic_files, commit, strict_json
from accel_train.store.names import REPORT

SCHEMA = 1


@dataclass(frozen=True)
class Request:
    """Options of the command line."""

    run: str
    step: int
    """Step as in log lines, counted from 1."""
    top: int = 10
    """Samples shown."""
    limit: float = suspects.LIMIT
    recipe: str | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.step < 1:
            raise UsageError(f"--step {self.step}: steps are counted from 1, as in the log")
        if self.top < 1:
            raise UsageError(f"--top {self.top}: at least 1 sample can be shown")
        if not self.limit > 0:
            raise UsageError(f"--limit {self.limit}: a distance above 0 is required, such as {suspects.LIMIT:g}")


@dataclass(frozen=True)
class Sample:
    """One sample of the step, alone."""

    sample: int
    """Index in the training split."""
    position: int
    """Its place in the global batch."""
    values: Mapping[str, float]
    """Its own loss, terms and gradient norm, named as in log lines."""
    distance: float
    """Distance of its gradient norm from the median (``suspects.distances``)."""

    @property
    def grad_norm(self) -> float:
        return self.values["grad_norm"]


@dataclass(frozen=True)
class Blame:
    """One step, taken apart into its samples."""

    step: int
    limit: float
    recorded: Mapping[str, float] | None
    """Values logged by the run. None for a step without a line in the log."""
    whole: Mapping[str, float]
    """Values of the step in a run trained again up to it."""
    samples: Sequence[Sample]
    """Furthest out first."""
    suspects: Sequence[int]
    without_suspects: Mapping[str, float] | None
    """The step with weight 0 for every suspect. None without suspects, and if every sample is one."""
    finite_weights: bool
    """False if a weight before the step is NaN or infinite. No sample is a suspect then."""

    @property
    def as_recorded(self) -> bool:
        """True if the step, trained again, has the logged values."""
        if self.recorded is None:
            return False
        return all(_same(self.whole[name], value) for name, value in self.recorded.items())


def blame(request: Request) -> int:
    """Measure the samples of a step, print the suspects and write a receipt. Return exit code 0, or 1 for a failure.

    Raises ``UsageError``. Main thread only, because it handles the stop signals.
    """
    with tempfile.TemporaryDirectory(prefix="accel-train-blame-") as folder, stop_signals_raise():
        try:
            run = recorded.open_run(request.run)
            _refuse_beyond(run, request.step)
            recipe = recorded.recipe_of(run, request.recipe)
            beginning = again.find_beginning(run, recipe, request.step - 1, f"--step {request.step}")
            if not request.as_json:
                print("\n".join(_head(request, beginning)), flush=True)
            order = {"step": request.step, "limit": request.limit}
            measured = again.observe(beginning, request.step, {"measuring": order}, Path(folder))
        except (RunFailedError, InterruptedRunError) as error:
            return report_failure(error, "nothing is measured")
    found = _read(request, run, measured)
    content = _receipt(found, beginning)
    path = run.directory / REPORT / f"blame-step-{request.step}.json"
    lines = report(found, request.top)
    # Before the receipt: a run that cannot be written to has been measured all the same.
    print(atomic_files.to_json(content).rstrip() if request.as_json else "\n".join(lines), flush=True)
    try:
        path.parent.mkdir(exist_ok=True)
        atomic_files.replace_json(path, content)
    except OSError as error:
        print(f"no receipt: {path} cannot be written ({error.strerror or error})", file=sys.stderr, flush=True)
        return 0
    if not request.as_json:
        print(f"receipt: {path}", flush=True)
    return 0


def _refuse_beyond(run: RecordedRun, step: int) -> None:
    # A step that is not finite ends the run before its line is written, and is the one to look at.
    steps = [record["step"] for record in run.records if isinstance(record.get("step"), int)]
    last = max([run.last_step, *steps]) + 1
    if step > last:
        raise UsageError(
            f"--step {step}: {run.directory} ends at step {last - 1}; a step up to {last} is required, which is the "
            "one that would have come next"
        )


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _head(request: Request, beginning: Beginning) -> list[str]:
    recipe = recorded.name_of(beginning.recipe)
    lines = [f"run {beginning.run.run_id}: {beginning.run.directory}"]
    # At a save just before the step there is nothing to train.
    if beginning.step + 1 < request.step:
        first, last = beginning.step + 1, request.step - 1
        lines.append(f"trained again: steps {first} to {last}, from {beginning}, with recipe {recipe}")
    return [*lines, f"measured: every sample of step {request.step} alone, with the weights and the noise of that step"]


def _read(request: Request, run: RecordedRun, measured: Mapping[str, Any]) -> Blame:
    samples: list[Sample] = []
    for one in measured["samples"]:
        distance = float(one["distance"])
        samples.append(Sample(one["sample"], one["position"], _numbers(one["values"]), distance))
    whole = _numbers(measured["whole"])
    line: Line | None = run.lines("train").get(request.step)
    logged: dict[str, float] | None = None
    if line is not None:
        # Times and throughput of the line are not values of the step.
        logged = {name: float(line[name]) for name in whole if name in line}
    without = measured["without_suspects"]
    return Blame(
        step=request.step,
        limit=request.limit,
        recorded=logged,
        whole=whole,
        # Stable: samples without a gradient stay in the order of the batch.
        samples=sorted(samples, key=lambda sample: -sample.distance),
        suspects=measured["suspects"],
        without_suspects=None if without is None else _numbers(without),
        finite_weights=measured["finite_weights"],
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    # JSON has no NaN and no infinity. They are words there, which float() takes.
    return {name: float(value) for name, value in values.items()}


def report(found: Blame, top: int) -> list[str]:
    """Return the table of the samples furthest out, and the step with and without the suspects, as lines."""
    norms = [sample.grad_norm for sample in found.samples]
    middle = suspects.median(norms)
    lines = [f"{'sample':>10}  {'loss':>11}  {'grad_norm':>11}  {'of the median':>13}  {'distance':>8}"]
    for sample in found.samples[:top]:
        part = f"{sample.grad_norm / middle:.3g} x"
        mark = "  <- suspect" if sample.sample in found.suspects else ""
        distance = f"{sample.distance:.3g}"
        if sample.distance == -math.inf:
            # Without a gradient, or without enough samples for a spread.
            distance = "-"
        lines.append(
            f"{sample.sample:>10}  {sample.values['loss']:>11.5g}  {sample.grad_norm:>11.5g}  {part:>13}  "
            f"{distance:>8}{mark}"
        )
    if len(found.samples) > top:
        lines.append(f"{'...':>10}  {len(found.samples) - top} sample(s) not shown; --top N shows more")
    usual = len(suspects.comparable(norms))
    nothing = "no suspects: no sample of this step stands out by its gradient"
    if usual < suspects.FEWEST:
        few = (
            f"distances need at least {suspects.FEWEST} samples with a finite gradient above 0, but step {found.step} "
            f"has {usual}"
        )
        lines.append(f"no distance: {few}")
        nothing = f"no suspects can be identified: {few}"
    else:
        lines.append(
            f"distance: of the log gradient norm from the median {middle:.4g} of {usual} samples, in "
            f"units of {suspects.NORMAL} MAD; a suspect is beyond {found.limit:g}"
        )
    if found.as_recorded:
        lines.append("loss and gradient norm of the whole step have the bits that the run logged")
    if not found.finite_weights:
        nothing = f"no suspects: the weights before step {found.step} are not finite, so an earlier step is at fault"
    lines += _comparison(found)
    if not found.suspects:
        return [*lines, nothing]
    if len(found.suspects) == len(found.samples) > 1:
        lines.append(
            f"every sample of step {found.step} is a suspect, with finite weights: if these samples are sound, the "
            "weights have grown too large, and a lower learning rate may help"
        )
    # At the end, to be copied into the next command.
    return [*lines, f"suspects: {' '.join(map(str, found.suspects))}"]


def _comparison(found: Blame) -> list[str]:
    """Return the values of the whole step, as logged and as trained again, and those without the suspects."""
    sides: dict[str, Mapping[str, float]] = {}
    if found.recorded is not None and not found.as_recorded:
        sides["as logged"] = found.recorded
    sides["with all samples"] = found.whole
    if found.without_suspects is not None:
        sides[f"without {len(found.suspects)} suspect(s)"] = found.without_suspects
    names = [name for name in found.whole if name.startswith("loss") or name == "grad_norm"]
    width = max(map(len, sides))
    lines = [f"{f'step {found.step}':<{width}}  {'  '.join(f'{name:>12}' for name in names)}"]
    for side, values in sides.items():
        texts = [f"{values.get(name, math.nan):>12.5g}" for name in names]
        lines.append(f"{side:<{width}}  {'  '.join(texts)}")
    return lines


def _receipt(found: Blame, beginning: Beginning) -> strict_json.Json:
    checkpoint = beginning.checkpoint
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run_id": beginning.run.run_id,
        # The name alone: a path would tell about the machine.
        "recipe": {"name": beginning.recipe.name, "sha256": commit.hash_file(beginning.recipe)},
        "checkpoint": None if checkpoint is None else describe_checkpoint(checkpoint),
        "as_recorded": found.as_recorded,
        "rule": f"log gradient norm, median and {suspects.NORMAL} MAD",
    }
    return strict_json.sealed(plain(content | asdict(found)))
