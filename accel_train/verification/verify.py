"""``accel-train verify``: short runs of a recipe on this machine, compared as the gradient contract promises."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_train.commands.bundled import find_recipe
from accel_train.compare.runs import (
    InterruptedRunError,
    RunFailedError,
    folder_for_runs,
    read_config,
    report_failure,
    stop_signals_raise,
)
from accel_train.config import UsageError, expand_path
from accel_train.cores import usable_cores
from accel_train.launch_files.machine_config import MachineConfig, read_machine_config
from accel_train.verification import plan, report
from accel_train.verification.checks import CHECKS, Check, Evidence, missing
from accel_train.verification.facts import Outcome, Spec
from accel_train.verification.plan import REFERENCE
from accel_train.verification.runs import Runner
from accel_train.wording import did_you_mean, nearest

PARALLEL = 2
"""Runs at a time."""
FEWEST_STEPS = 4
READ_HERE = ("global_batch_size", "micro_batch_size", "optimizer.max_grad_norm", "schedule.kind", "sync", "precision")
LAYOUTS = ("accumulated", "ragged", "two_processes", "fsdp2", "zero2", "launch_file", "reversed")
"""Runs compared within rounding, by the tolerances of fp32."""
COMPILES = "DeepSpeed first compiles its CPU communication, unless this machine already has it: a minute or more"
_CLIPPED = frozenset(LAYOUTS) - {"reversed"}
"""Runs that would show a different clip, if the clip acts."""


@dataclass(frozen=True)
class Request:
    """Options of the command line."""

    recipe: str
    arguments: tuple[str, ...] = ()
    """Preset or file, and flags, as the recipe takes them."""
    only: tuple[str, ...] = ()
    """Names of checks. Empty: all."""
    steps: int = 6
    one_micro_batch: bool = False
    """Leave the share of a process whole in every run."""
    config_file: str | None = None
    """Launch file of the user's own, rehearsed on two processes."""
    output: str | None = None
    """Directory to keep the runs. None: a temporary one."""
    as_json: bool = False


def verify(request: Request) -> int:
    """Make the runs and print the table. Return 1 if a check fails, else 0. Main thread only: it handles signals."""
    checks = _chosen(request)
    with stop_signals_raise():
        try:
            return _verify(request, checks)
        except (RunFailedError, InterruptedRunError) as error:
            return report_failure(error, "the runs are stopped, no result")


def _chosen(request: Request) -> list[Check]:
    """Return the checks to make. Raises ``UsageError`` for an unknown name and for options in ``plan.SET_HERE``."""
    if request.steps < FEWEST_STEPS or request.steps % 2:
        raise UsageError(
            f"--steps {request.steps}: an even number, at least {FEWEST_STEPS}, is required, with as many steps before "
            "the save in the middle as after it; give --steps 6"
        )
    plan.refuse_options_set_here(request.arguments)
    names = [check.name for check in CHECKS]
    for name in request.only:
        if name not in names:
            hint = did_you_mean(nearest(name, names))
            raise UsageError(f"--only {name}: no such check; the checks are {', '.join(names)}{hint}")
    wanted = request.only or [name for name in names if name != "launch_file" or request.config_file]
    if "launch_file" in wanted and request.config_file is None:
        raise UsageError("--only launch_file: it needs the launch file; give --config_file FILE")
    return [check for check in CHECKS if check.name in wanted]


def _verify(request: Request, checks: Sequence[Check]) -> int:
    recipe = find_recipe(request.recipe)
    # An invalid launch file is refused before anything runs.
    machine = None if request.config_file is None else read_machine_config(expand_path(request.config_file))
    options = read_config(recipe, request.arguments)
    absent = [name for name in READ_HERE if name not in options]
    if absent:
        raise UsageError(
            f"recipe {request.recipe!r}: it has no option {absent[0]}; a verification needs the options of every "
            "recipe, so let its Config extend accel_train.experiment.ExperimentConfig"
        )
    choose = plan.choose_sizes
    if request.one_micro_batch:
        choose = plan.choose_whole_sizes
    sizes = choose(options, request.arguments, request.steps)
    flags = plan.common_flags(options, request.arguments, sizes)
    words = plan.words_of(flags)
    with folder_for_runs(request.output, "output", "verify") as folder:
        cores, _ = usable_cores()
        # `--smoke` sets only options without a flag, so these sizes win over its own.
        runner = Runner(recipe, [*request.arguments, "--smoke", *words], Path(folder), max(1, cores // PARALLEL))
        made = _Runs(runner, sizes, request, options, machine, checks)
        interrupted = False
        try:
            made.make()
        except InterruptedRunError as interruption:
            if REFERENCE not in made.outcomes:  # nothing to compare with
                raise
            report_failure(interruption, "the runs are stopped, and only finished ones are compared")
            interrupted = True
        finally:
            runner.stop()
        evidence = made.evidence()
        results = [(check, missing(evidence, check.runs) or check.find(evidence)) for check in checks]
    command = shlex.join([request.recipe, *request.arguments])
    facts = _facts(evidence, command)
    if request.as_json:
        print(json.dumps(report.as_json(results, facts), indent=1))
    else:
        print("\n".join([*_header(facts), *report.text(results)]), flush=True)
    return 1 if interrupted or any(found.verdict == "FAILED" for _, found in results) else 0


def _facts(evidence: Evidence, command: str) -> dict[str, Any]:
    sizes = evidence.sizes
    return {
        "command": command,
        "steps": sizes.steps,
        "global_batch_size": sizes.batch,
        "even_micro_batch_size": sizes.even,
        "ragged_micro_batch_size": sizes.ragged,
        "one_micro_batch": sizes.is_whole,
        "max_grad_norm": evidence.max_grad_norm,
        "max_grad_norm_of_the_config": float(evidence.options["optimizer.max_grad_norm"]),
    }


def _header(facts: Mapping[str, Any]) -> list[str]:
    cut = f"micro-batches of {facts['even_micro_batch_size']} (even) and {facts['ragged_micro_batch_size']} (ragged)"
    if facts["one_micro_batch"]:
        cut = "one micro-batch on each process"
    lines = [f"{facts['command']}: {facts['steps']} steps of {facts['global_batch_size']} samples on the CPU; {cut}"]
    clip = facts["max_grad_norm"]
    if clip != facts["max_grad_norm_of_the_config"]:
        lines.append(
            f"optimizer.max_grad_norm: {clip:g} instead of {facts['max_grad_norm_of_the_config']:g}, so that the clip "
            "acts in these steps"
        )
    return [*lines, ""]


class _Runs:
    """Makes the runs for the checks, some of them at the same time."""

    def __init__(
        self,
        runner: Runner,
        sizes: plan.Sizes,
        request: Request,
        options: Mapping[str, Any],
        machine: MachineConfig | None,
        checks: Sequence[Check],
    ) -> None:
        self._runner = runner
        self._sizes = sizes
        self._options = options
        self._machine = machine
        self._specs = plan.all_specs(sizes, machine)
        self._in_fp32 = "precision" not in plan.given_flags(request.arguments) or options["precision"] == "fp32"
        self._needed = tuple(dict.fromkeys(name for check in checks for name in check.runs))
        self._absent = {name: reason for name in self._needed if (reason := self._obstacle(name))}
        self._clip = float(options["optimizer.max_grad_norm"])
        self.outcomes: dict[str, Outcome] = {}
        """Outcomes of the runs that ended by themselves, by name."""

    def make(self) -> None:
        """Run everything needed by the checks. Raises if the very first run fails."""
        if self._clip > 0 and _CLIPPED.intersection(self._needed):
            self._clip = self._acting_clip(self._clip)
        names = [name for name in (REFERENCE, *self._needed) if name in self._specs and name not in self._absent]
        for name in names:
            if self._uses_deepspeed(name):
                print(f"{name}: {COMPILES}", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(PARALLEL) as pool:
            try:
                started = {name: self._start(pool, self._specs[name]) for name in names}
                if "resumed" in self._needed:
                    # The longest runs are at work meanwhile.
                    reference = started[REFERENCE].result()
                    started["resumed"] = self._start(pool, plan.resumed(self._sizes, reference))
                for run in started.values():
                    run.result()
            except BaseException:
                # The runs first, because the threads of the pool wait for them.
                self._runner.stop()
                pool.shutdown(cancel_futures=True)
                raise

    def evidence(self) -> Evidence:
        """Return what the runs so far have shown."""
        absent = dict(self._absent)
        for name in self._needed:
            if name not in self.outcomes:
                absent.setdefault(name, "interrupted")
        return Evidence(self.outcomes, absent, self._sizes, self._options, self._clip)

    def _obstacle(self, name: str) -> str | None:
        """Return why a run cannot be made here, or None."""
        if not self._in_fp32 and name in LAYOUTS:
            return f"precision {self._options['precision']}: the tolerances are those of fp32; leave --precision out"
        if name in ("accumulated", "ragged") and self._sizes.is_whole:
            return "--one_micro_batch leaves the batch of a process whole"
        if name in ("accumulated", "ragged") and name not in self._specs:
            return f"a batch of {self._sizes.batch} has no such micro-batches; give --global_batch_size 15"
        if name == "reversed" and self._sizes.batch == 1:
            return "one sample has no order; give --global_batch_size 15"
        if name == "zero2" and importlib.util.find_spec("deepspeed") is None:
            return "deepspeed is not installed: pip install 'accel-train[deepspeed]'"
        if name == "launch_file" and self._machine is not None and self._machine.num_machines > 1:
            return f"{self._machine.path} has num_machines: {self._machine.num_machines}; give a file for one machine"
        return None

    def _uses_deepspeed(self, name: str) -> bool:
        if name == "launch_file" and self._machine is not None:
            return self._machine.distributed_type == "DEEPSPEED"
        return name == "zero2"

    def _acting_clip(self, own: float) -> float:
        """Return a ``max_grad_norm`` that acts: the smaller of the recipe's and half the norm of the first gradient."""
        probe = self._runner.run(plan.probe())
        if probe.code == 2:
            raise UsageError(probe.message)
        if probe.failed or not probe.losses:
            raise RunFailedError(f"the first run ended with exit code {probe.code}:\n{probe.message}")
        norm = probe.losses[1]["grad_norm"]
        return min(own, float(f"{norm / 2:.2g}")) if norm > 0 else own

    def _start(self, pool: ThreadPoolExecutor, spec: Spec) -> Future[Outcome]:
        def run() -> Outcome:
            started = time.monotonic()
            clipped = {"optimizer.max_grad_norm": f"{self._clip:g}"}
            outcome = self._runner.run(replace(spec, flags={**clipped, **spec.flags}))
            if self._runner.is_stopped and outcome.failed:
                ending = "stopped"
            else:
                self.outcomes[spec.name] = outcome
                ending = f"exit code {outcome.code}" if outcome.failed else "done"
            print(f"{spec.name}: {ending} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            return outcome

        return pool.submit(run)
