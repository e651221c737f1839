"""``accel-train drill``: one fault after another in short runs of a recipe, each resumed by the same command."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.commands.bundled import find_recipe
from accel_train.compare.runs import (
    InterruptedRunError,
    RunFailedError,
    folder_for_runs,
    read_config,
    report_failure,
    stop_signals_raise,
)
from accel_train.config import UsageError
from accel_train.drill import faults, layout, report
from accel_train.drill.faults import Fault, Sizes
from accel_train.drill.flags import Options
from accel_train.drill.interval import HOUR, Costs, Present, Recommendation
from accel_train.drill.trials import Trials, Undisturbed
from accel_train.rerun.receipt import receipt_file

if TYPE_CHECKING:
    from accel_train.drill.judging import Result

READ_HERE = ("checkpoints.save_every", "optimizer.max_grad_norm", "schedule.kind", "global_batch_size", "precision")


def drill(recipe: str, arguments: Sequence[str], options: Options) -> int:
    """Make the runs, print the table and write the receipt. Return 1 if a fault shows a failure, else 0.

    A signal ends the drill with exit code 1 and the results so far. Main thread only. Raises ``UsageError``.
    """
    faults.refuse_options_set_here(arguments)
    chosen = faults.choose(options.faults)
    with stop_signals_raise():
        try:
            return _drill(find_recipe(recipe), recipe, arguments, options, chosen)
        except (RunFailedError, InterruptedRunError) as error:
            return report_failure(error, "the runs are stopped, no result")


def _drill(recipe: Path, named: str, arguments: Sequence[str], options: Options, chosen: Sequence[Fault]) -> int:
    config = read_config(recipe, arguments)
    absent = [name for name in READ_HERE if name not in config]
    if absent:
        raise UsageError(
            f"recipe {named!r}: it has no option {absent[0]}; a drill needs the options of every recipe, so let its "
            "Config extend accel_train.experiment.ExperimentConfig"
        )
    path = receipt_file(options.receipt, f"drill-{recipe.stem}.json")
    with folder_for_runs(options.keep, "keep", "drill") as folder:
        place = layout.choose_layout(named, options, Path(folder))
        for fault in chosen:
            reason = faults.obstacle(fault, config, place.processes)
            # Asked for by name, so it is not left out in silence.
            if reason is not None and options.faults:
                raise UsageError(f"--faults {fault.name}: {reason}, or leave it out")
        # Nothing has been trained up to here: wrong usage is refused first.
        trials = Trials(recipe, arguments, config, Sizes(options.steps), place, Path(folder))
        undisturbed = trials.undisturbed()
        print(f"undisturbed: done in {undisturbed.ended.seconds:.0f} s", file=sys.stderr, flush=True)
        results = _tried(trials, undisturbed, chosen)
        not_tried = [fault.name for fault in chosen[len(results) :]]
        found, measured = _recommend(config, options, undisturbed, results)
        facts = {
            "command": shlex.join([named, *arguments]),
            "layout": place.description,
            "steps": options.steps,
            "save_every": trials.sizes.save_every,
            "not_tried": not_tried,
        }
        content = report.as_json(results, facts, found, measured)
        report.write_receipt(path, recipe, content, results, undisturbed.run.last_start())
    if options.as_json:
        print(json.dumps(content, indent=1), flush=True)
    else:
        head = f"{facts['command']}: {options.steps} steps, a save every {facts['save_every']}, {place.description}"
        table = report.text(results, found.costs.step_seconds)
        advice = report.advice(found, measured)
        lines = [head, "", *table, "", *advice, f"receipt: {path}"]
        print("\n".join(lines), flush=True)
    return 1 if not_tried or any(result.verdict == "FAILED" for result in results) else 0


def _tried(trials: Trials, undisturbed: Undisturbed, chosen: Sequence[Fault]) -> list[Result]:
    """Return the results of the faults in order, up to a signal. A signal before the first result is raised."""
    results: list[Result] = []
    try:
        for fault in chosen:
            result = trials.strike(fault, undisturbed)
            print(f"{fault.name}: {result.verdict}", file=sys.stderr, flush=True)
            results.append(result)
    except InterruptedRunError as signal_name:
        if not results:
            raise
        left = ", ".join(fault.name for fault in chosen[len(results) :])
        text = f"interrupted by {signal_name}: the runs are stopped; not tried: {left}"
        print(text, file=sys.stderr, flush=True)
    return results


def _recommend(
    config: Mapping[str, Any], options: Options, undisturbed: Undisturbed, results: Sequence[Result]
) -> tuple[Recommendation, dict[str, bool]]:
    """Return the recommended interval, and whether each duration behind it was measured."""
    restarts = [result.restart_seconds for result in results if result.restart_seconds is not None]
    # Without a resume, the first start is the nearest that was measured.
    restart = median(restarts) if restarts else undisturbed.ended.first_step or 0.0
    given = options.save_seconds
    costs = Costs(
        step_seconds=options.step_seconds or undisturbed.step_seconds,
        save_seconds=given or undisturbed.save_seconds,
        # For another machine, a commit is only known to take no less time than the save.
        commit_seconds=given or undisturbed.commit_seconds,
        restart_seconds=restart,
        mtbf_seconds=options.mtbf_hours * HOUR,
    )
    measured = {"step_seconds": options.step_seconds is None, "save_seconds": given is None}
    return Recommendation(costs, present_interval(config, costs.step_seconds)), measured


def present_interval(config: Mapping[str, Any], step_seconds: float) -> Present:
    """Return the save interval of the config."""
    prefix = "checkpoints."
    names = ("save_every", "save_every_minutes", "save_every_epochs")
    saving = CheckpointConfig(**{name: config[prefix + name] for name in names})
    if saving.save_every:
        return Present(f"checkpoints.save_every {saving.save_every}", saving.save_every * step_seconds)
    # As the saver itself decides, with its default of 10 minutes where nothing is set.
    if saving.minutes:
        return Present(f"a save every {saving.minutes:g} minutes", 60 * saving.minutes)
    return Present(f"checkpoints.save_every_epochs {saving.save_every_epochs:g}", None)
