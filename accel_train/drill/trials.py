"""The runs of a drill: one undisturbed, then for each fault a run that meets it and its resume."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from accel_train.compare.runs import USAGE_ERROR, Child, RunFailedError
from accel_train.config import UsageError
from accel_train.drill import faults, judging
from accel_train.drill.faults import Fault, Sizes
from accel_train.drill.hub import REPOSITORY, VanishingHub, vanishing_hub
from accel_train.drill.inside.request import Request
from accel_train.drill.judging import Compared, Result
from accel_train.drill.runs import Ended, Runner
from accel_train.rerun.recorded import RecordedRun, open_run
from accel_train.store import manifest
from accel_train.verification.plan import given_flags
from accel_train.wording import shortened

if TYPE_CHECKING:
    from accel_train.drill.layout import Layout

PROGRAM = Path(__file__).parent / "inside" / "observed_run.py"
DAY = 86_400.0
LONGEST = 20
"""A start that takes this many times as long as the undisturbed run is killed."""
SHORTEST_LIMIT = 600.0
ALONE_SECONDS = 10.0
"""Longest time that a signal may take to a process without a launcher."""
LAUNCHED_SECONDS = 60.0
WARM = 2
"""Steps whose times are not counted: the first ones allocate and compile."""


@dataclass(frozen=True)
class Undisturbed:
    """The undisturbed run."""

    ended: Ended
    run: RecordedRun
    evaluations: Sequence[int]
    """Steps followed by an evaluation."""
    last: int
    step_seconds: float
    save_seconds: float
    commit_seconds: float


class Trials:
    """Makes the runs of one recipe on one layout."""

    def __init__(
        self,
        recipe: Path,
        arguments: Sequence[str],
        options: Mapping[str, Any],
        sizes: Sizes,
        layout: Layout,
        folder: Path,
    ) -> None:
        self.sizes = sizes
        self._recipe = recipe
        self._arguments = arguments
        self._options = options
        self._layout = layout
        self._folder = folder
        self._runner = Runner()
        self._flags = faults.run_flags(options, arguments, sizes, on_devices=layout.on_devices)

    def undisturbed(self) -> Undisturbed:
        """Make the run to compare the others with. Raises ``UsageError`` or ``RunFailedError`` if it fails."""
        home = self._home("undisturbed")
        # Its length is not known yet, so the limit only ends a run that hangs.
        ended = self._start(home, "whole", _request(home, "whole"), DAY)
        if ended.code == 2:
            raise UsageError(USAGE_ERROR.sub("", ended.last_lines))
        if ended.code != 0:
            raise RunFailedError(f"the undisturbed run ended with exit code {ended.ending}:\n{ended.last_lines}")
        done = ended.steps("done")
        run = open_run(str(home / "run"))
        if not done or not run.checkpoints:
            raise RunFailedError(
                "the undisturbed run made no step in loop.training, or saved nothing; a drill needs both"
            )
        return Undisturbed(
            ended=ended,
            run=run,
            evaluations=ended.steps("evaluation"),
            last=max(done),
            step_seconds=self._step_seconds(run),
            save_seconds=_save_seconds(ended),
            commit_seconds=median(float(manifest.read(path)["seconds"]) for _, path in run.checkpoints),
        )

    def _step_seconds(self, run: RecordedRun) -> float:
        """Return the seconds of a step. Raises ``UsageError`` for a run without a timed one."""
        # The recorder waits for the device at each logged step, and its pauses leave out saves and evaluations.
        lines = run.lines("train")
        times = [float(line["step_seconds"]) for step, line in lines.items() if step > WARM]
        if not times:
            logged = shortened([str(step) for step in sorted(lines)], WARM)
            raise UsageError(
                f"--steps {self.sizes.steps}: the steps logged by the undisturbed run: {logged}; the first {WARM} are "
                f"not timed, so a logged step after step {WARM} is required; let the recipe train until max_steps, "
                "without an earlier end such as training.end() of an early stopping"
            )
        return median(times)

    def strike(self, fault: Fault, undisturbed: Undisturbed) -> Result:
        """Inject a fault into a run, resume it, and judge."""
        reason = faults.obstacle(fault, self._options, self._layout.processes)
        if reason is None and fault.in_evaluation and not undisturbed.evaluations:
            reason = "the recipe makes no evaluation in these steps (training.evaluate)"
        if reason is not None:
            return Result(fault, "not applicable", [reason])
        fault = faults.adapt(fault, self._options)
        limit = max(SHORTEST_LIMIT, LONGEST * undisturbed.ended.seconds)
        home = self._home(fault.name)
        with vanishing_hub() as hub:
            struck = self._struck(fault, home, limit, hub, self._step(fault, undisturbed))
        if fault.name == "hub_down" and not struck.steps("begin"):
            reason = f"the run ended before its first step, with a Hub that has no files:\n{struck.last_lines}"
            return Result(fault, "not applicable", [reason], struck.ending)
        run = home / "run"
        # Before the resume, which saves more of them.
        checkpoints = judging.checkpoints_of(run)
        resumed: Ended | None = None
        if fault.ending != "trained":
            resumed = self._start(home, "resumed", _request(home, "resumed"), limit, self._extra(fault))
        compared: Compared | str | None = None
        # A run that did not end has nothing to compare.
        if (resumed or struck).code == 0:
            compared = judging.compare(undisturbed.run, open_run(str(run)), undisturbed.last)
        missing = [compared] if isinstance(compared, str) else []
        sides = None if isinstance(compared, str) else compared
        result = judging.judge(fault, self.sizes, struck, checkpoints, resumed, sides)
        problems = [*result.reasons, *missing, *self._own_problems(fault, struck, run, undisturbed)]
        return replace(result, verdict="FAILED" if problems else "passed", reasons=problems)

    def _own_problems(self, fault: Fault, struck: Ended, run: Path, undisturbed: Undisturbed) -> list[str]:
        if fault.name == "hub_down":
            return judging.waiting_for_the_hub(run, undisturbed.last)
        if fault.name == "hanging_rank":
            return judging.took_too_long(struck, self._timeout_seconds())
        return []

    def _timeout_seconds(self) -> float:
        if "collective_timeout_seconds" in given_flags(self._arguments):
            return float(self._options["collective_timeout_seconds"])
        return faults.HANG_SECONDS

    def _step(self, fault: Fault, undisturbed: Undisturbed) -> int:
        if not fault.in_evaluation:
            return self.sizes.struck
        # An evaluation with steps after it shows more. Some recipes evaluate only at the end.
        before = [step for step in undisturbed.evaluations if step < undisturbed.last]
        return before[-1] if before else undisturbed.evaluations[-1]

    def _struck(self, fault: Fault, home: Path, limit: float, hub: VanishingHub, step: int) -> Ended:
        request = replace(
            _request(home, "struck"),
            action=fault.action,
            step=step,
            failpoint=fault.failpoint,
            patience_seconds=ALONE_SECONDS if self._layout.is_plain else LAUNCHED_SECONDS,
        )
        variables: Mapping[str, str] = {}
        if fault.action == "hub_down":
            variables = hub.variables
        if fault.action == "hang":
            # The timeout of its collectives ends it, however long the undisturbed run was.
            limit = min(limit, SHORTEST_LIMIT + self._timeout_seconds())

        def when_ready(child: Child) -> None:
            if fault.action == "hub_down":
                hub.vanish()
            else:
                child.send_signal(signal.SIGTERM)
            Path(request.sent).touch()

        return self._start(home, "struck", request, limit, self._extra(fault), variables, when_ready)

    def _extra(self, fault: Fault) -> list[str]:
        return faults.fault_flags(fault, self._arguments, REPOSITORY)

    def _home(self, name: str) -> Path:
        home = self._folder / name
        home.mkdir()
        return home

    def _start(
        self,
        home: Path,
        name: str,
        request: Request,
        limit: float,
        extra: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        when_ready: Callable[[Child], None] | None = None,
    ) -> Ended:
        # The same words for both starts of a run: what differs is in the environment.
        words = [*self._layout.head, str(PROGRAM), str(self._recipe), *self._arguments, *self._flags, *extra]
        words += ["--output_dir", str(home / "run")]
        environment = {**self._layout.environment, **(variables or {}), **request.variables()}
        return self._runner.run(words, home, name, environment, limit, when_ready)


def _request(home: Path, name: str) -> Request:
    return Request(str(home / f"{name}.jsonl"), str(home / f"{name}.sent"))


def _save_seconds(ended: Ended) -> float:
    """Return the seconds for which a save stops training. The first one also starts the writer."""
    # Reversed, so that the first save of a step counts: a second one finds the step saved and returns at once.
    saves = {event.step: event.seconds for event in reversed(ended.events) if event.name == "save" and event.rank == 0}
    times = [saves[step] for step in sorted(saves)]
    return median(times[1:] or times)
