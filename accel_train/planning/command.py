"""``accel-train plan``: simulate candidates on a machine without the GPUs, and choose the best within their memory."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from accel_train.commands.bundled import find_recipe
from accel_train.config import UsageError
from accel_train.cost_model.devices import DEFAULT, rated
from accel_train.cost_model.rates import Rates
from accel_train.planning import report, writing
from accel_train.planning.candidates import Candidate, has_deepspeed, on_a_cpu, space_of
from accel_train.planning.flags import Options
from accel_train.planning.memory import BALANCED_SHARE, GIB, Budget, default_margin
from accel_train.planning.plan import make_plan, without_needless_checkpointing
from accel_train.planning.probe import Probe, probe_of
from accel_train.planning.search import Measure, search
from accel_train.planning.simulator import Simulator
from accel_train.speed.memory.fitting import host_bytes


def plan(recipe: str, arguments: Sequence[str], options: Options) -> str:
    """Return the output of the command. Raises ``UsageError`` if nothing fits or a start would refuse the config.

    An error about the files of ``--write`` is raised before the search if possible, else after the plan is printed.
    """
    if options.write is not None:
        # Refused before a search that may take minutes.
        writing.paths_in(options.write)
    simulator = Simulator(recipe, arguments, options.gpus, options.step)
    loaded = simulator.read_config()
    config = loaded.config
    space = space_of(config, loaded.origins, options.gpus)
    device = rated(options.device or DEFAULT, config.precision, options.gpus)
    on_cpu = device.rates.serial
    if on_cpu:
        space = on_a_cpu(space)
        simulator.device_type = "cpu"
        if options.write is not None and options.gpus > 1:
            raise UsageError(
                f"write: {options.write}: {device.name} was measured on a CPU, and the launch file of {options.gpus} "
                "processes would ask for GPUs; leave --write out, or plan for --gpus 1"
            )
    named = device if options.device else None
    budget = replace(budget_of(options), on_cpu=on_cpu)
    measure = _reporting(simulator, budget, device.rates)
    chains = search(space, options.goal, budget, measure)
    planned = make_plan(recipe, options.goal, space, budget, chains, config)
    planned = without_needless_checkpointing(planned, measure)
    text = report.describe(planned, named, explain=options.explain)
    if options.as_json:
        text = json.dumps(report.as_json(planned, named), indent=2)
    if options.write is None:
        return text
    command = shlex.join(["accel-train", "plan", recipe, *arguments, *_flags(options)])
    try:
        launch, preset = writing.write(options.write, command, planned.chosen.candidate, options.gpus, loaded)
    except UsageError:
        # The plan itself is found, and its search may have taken minutes.
        print(text, flush=True)
        raise
    # Nothing after the JSON, so that programs can parse the output.
    if options.as_json:
        return text
    start = shlex.join(["accelerate", "launch", "--config_file", str(launch), str(find_recipe(recipe)), str(preset)])
    if writing.is_relative(loaded):
        # The preset keeps its paths as they were given, and from another directory they would name other files.
        start = f"cd {shlex.quote(os.getcwd())} && {start}"
    return f"{text}\n\nwritten: {launch}, {preset}\n  {start}"


def budget_of(options: Options) -> Budget:
    """Return the memory budget of a plan."""
    margin = options.margin_gib
    if margin is None:
        margin = default_margin(options.vram_gib)
    share = BALANCED_SHARE if options.goal == "balanced" else 1.0
    host = host_bytes() / GIB if options.host_gib is None else options.host_gib
    return Budget(options.vram_gib, margin, options.gpus, share, host, host_is_here=options.host_gib is None)


def _reporting(simulator: Simulator, budget: Budget, rates: Rates) -> Measure:
    """Return a measure with a line on stderr for each candidate, because some take many seconds."""

    def measure(candidate: Candidate) -> Probe:
        counted = simulator.count(candidate)
        probe = probe_of(candidate, counted["of_the_step"], counted, rates)
        verdict = "fits" if probe.fits(budget) else "too much"
        needed = f"{probe.needed_gib(budget):.2f} GiB"
        host = probe.needed_host_gib(budget)
        if host:
            needed += f" and {host:.1f} GiB of host memory"
        print(f"simulated {candidate}: {needed}, {verdict}", file=sys.stderr, flush=True)
        return probe

    return measure


def _flags(options: Options) -> list[str]:
    # Without --json, --explain and --write: the command goes into the head of the files, to plan the same again.
    words = ["--gpus", str(options.gpus), "--vram_gib", f"{options.vram_gib:g}", "--goal", options.goal]
    if options.device is not None:
        words += ["--device", options.device]
    if options.margin_gib is not None:
        words += ["--margin_gib", f"{options.margin_gib:g}"]
    if options.host_gib is not None or has_deepspeed():
        # Written even if it was not given, or another machine would take its own memory.
        words += ["--host_gib", f"{budget_of(options).host_gib:g}"]
    if options.step is not None:
        words += ["--step", str(options.step)]
    return words
