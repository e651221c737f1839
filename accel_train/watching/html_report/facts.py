"""Facts about a run for the head of its report: command, machine, duration, and how to resume it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_train.metrics.progress import format_seconds
from accel_train.store.names import CONFIG_FILE
from accel_train.training.memory.description import described
from accel_train.watching.html_report.events import describe_machine, starts_of
from accel_train.watching.run_files import Record, RunFiles, number
from accel_train.watching.run_state import RunState, gpu_in_words

COMMANDS = ("Command", "To resume")
"""Facts to copy into a terminal."""
INTERACTIVE = ("", "-c", "ipython", "ipython3", "ipykernel_launcher", "colab_kernel_launcher")
"""Programs, without their endings, that run what is typed. Their words are not those of a run."""


def facts_of(files: RunFiles, state: RunState) -> list[tuple[str, str]]:
    """Return (name, text) pairs. Facts missing from the records are left out."""
    starts = starts_of(files.records)
    environment: Mapping[str, Any] = {}
    # The last start: an earlier one may have been on another machine.
    if starts:
        environment = starts[-1][0]
    facts = [
        ("State", _state(state)),
        ("Directory", str(files.directory)),
        *_command_facts(files.directory, environment),
        ("Machine", describe_machine(environment)),
        ("GPU at the last line", gpu_in_words(state.gpu)),
        ("System", _system(environment)),
        ("Versions", _versions(environment)),
        ("Attention", str(environment.get("attention") or "")),
        ("Commit of the script", str(environment.get("git_commit") or "")),
        ("Run", str(environment.get("run_id") or "")),
        ("Recorded time", _hours(starts)),
        ("Memory, first step", described(state.memory_by_category)),
        ("Blocked by saving", _stall(files.training)),
    ]
    return [(name, text) for name, text in facts if text]


def _state(state: RunState) -> str:
    text = f"{state.status}, step {state.step:,}"
    if state.max_steps is not None:
        text += f" of {state.max_steps:,}"
    if state.reason:
        text += f" ({state.reason})"
    return text


def _command_facts(directory: Path, environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    command = str(environment.get("command") or "")
    words = _split(command)
    if not words:
        return []
    world_size = int(environment.get("world_size") or 1)
    program = Path(words[0])
    recipe = environment.get("recipe")
    if not isinstance(recipe, str):
        # A `main` defined in a notebook cell exists only in that session.
        if program.stem in INTERACTIVE:
            return [("Called by", command)]
    elif program.stem in INTERACTIVE or _is_other_script(program, Path(recipe)):
        # A notebook or a script has called the recipe's `main` with arguments that only the config has.
        resume = resume_command(directory, shlex.quote(recipe), world_size)
        return [("Recipe", recipe), ("Called by", command), ("To resume", resume)]
    preset = "the recipe's own"
    # The first word after the recipe is a preset or a YAML file, unless it is an option.
    if len(words) > 1 and not words[1].startswith("-"):
        preset = words[1]
    return [
        ("Recipe", words[0]),
        ("Preset or file", preset),
        ("Command", command),
        ("To resume", resume_command(directory, command, world_size)),
    ]


def _is_other_script(program: Path, recipe: Path) -> bool:
    """Return True for a Python file other than the recipe. A console script or a package passes its own words on."""
    return program.suffix == ".py" and program.name not in (recipe.name, "__main__.py")


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        # An unmatched quote: the line was edited by hand.
        return command.split()


def resume_command(directory: Path, command: str, world_size: int) -> str:
    """Return the command to resume the run, from the directory where it was started.

    The resolved options are in the run's own config.yaml. The launch file of several processes is not recorded, so the
    reader has to name it.
    """
    words = _split(command)
    recipe = shlex.quote(words[0])
    config = directory / CONFIG_FILE
    # If it is not written yet or was deleted, the recorded arguments have to do.
    arguments = [str(config)] if config.is_file() else words[1:]
    # Config and arguments have the directory as it was given, which is wrong for a run that was moved. The last wins.
    options = shlex.join([*arguments, "--output_dir", str(directory.absolute())])
    program = "python"
    if world_size > 1:
        program = "accel-train launch --config_file LAUNCH_FILE.yaml"
    return f"{program} {recipe} {options}"


def _system(environment: Mapping[str, Any]) -> str:
    formats = {"platform": "{}", "python": "Python {}", "cuda": "CUDA {}", "cpu_count": "{} CPU cores"}
    parts: list[str] = []
    for name, form in formats.items():
        if environment.get(name):
            parts.append(form.format(environment[name]))
    return ", ".join(parts)


def _versions(environment: Mapping[str, Any]) -> str:
    versions = environment.get("versions")
    if not isinstance(versions, dict):
        return ""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _hours(starts: Sequence[Sequence[Record]]) -> str:
    """Describe the total time of all starts up to their last lines, without lines that a resume has dropped."""
    if not starts:
        return ""
    seconds = 0.0
    device_seconds = 0.0
    for start in starts:
        # A monotonic clock, unlike the times of the lines.
        elapsed = max(number(record, "elapsed_seconds") or 0.0 for record in start)
        seconds += elapsed
        device_seconds += elapsed * (number(start[0], "world_size") or 1.0)
    text = f"{format_seconds(seconds)} in {len(starts)} start(s), {device_seconds / 3600:.2f} device hours"
    began = number(starts[0][0], "time")
    if began is not None:
        text += time.strftime(", since %Y-%m-%d %H:%M UTC", time.gmtime(began))
    return text


def _stall(lines: Sequence[Record]) -> str:
    """Describe how long saves blocked training, over the training lines of the file. Empty if they never did."""
    stalls = [number(line, "save_stall_seconds") or 0.0 for line in lines]
    total = sum(stalls)
    if not total:
        return ""
    return f"{total:.1f} s in all, at most {max(stalls):.1f} s between two training lines"
