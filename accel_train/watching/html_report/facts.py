"""Facts about a run for the head of its report: what ran, on what, for how long, and how to resume it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.metrics.progress import format_seconds
from accel_train.store.names import CONFIG_FILE
from accel_train.watching.html_report.events import describe_machine, starts_of
from accel_train.watching.run_files import Record, RunFiles, number
from accel_train.watching.run_state import RunState


def facts_of(files: RunFiles, state: RunState) -> list[tuple[str, str]]:
    """Return (name, text) pairs. What the run did not record is left out."""
    starts = starts_of(files.records)
    environment: dict[str, Any] = dict(starts[-1][0]) if starts else {}
    facts = [
        ("State", _state(state)),
        ("Directory", str(files.directory)),
        *_command_facts(files.directory, environment),
        ("Machine", describe_machine(environment)),
        ("System", _system(environment)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())),
        ("Attention", str(environment.get("attention") or "")),
        ("Commit of the script", str(environment.get("git_commit") or "")),
        ("Run", str(environment.get("run_id") or "")),
        ("Recorded time", _hours(starts)),
    ]
    return [(name, text) for name, text in facts if text]


def _state(state: RunState) -> str:
    total = "" if state.max_steps is None else f" of {state.max_steps:,}"
    text = f"{state.status}, step {state.step:,}{total}"
    if state.reason:
        text += f" ({state.reason})"
    return text


def _command_facts(directory: Path, environment: dict[str, Any]) -> list[tuple[str, str]]:
    command = str(environment.get("command") or "")
    words = _split(command)
    if not words:
        return []
    preset = "the recipe's own"
    if len(words) > 1 and not words[1].startswith("-"):
        preset = words[1]
    facts = [("Recipe", words[0]), ("Preset", preset), ("Command", command)]
    return [*facts, ("To resume", resume_command(directory, command, int(environment.get("world_size") or 1)))]


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # cut or edited by hand
        return command.split()


def resume_command(directory: Path, command: str, world_size: int) -> str:
    """Return the command that goes on with the run, from the directory in which it was started.

    The resolved options are in the run's own config.yaml. Which launch file several processes were started with is not
    recorded, so the reader has to name it.
    """
    words = _split(command)
    recipe = shlex.quote(words[0])
    if (directory / CONFIG_FILE).is_file():
        options = shlex.quote(str(directory / CONFIG_FILE))
    else:
        options = shlex.join(words[1:])
    if world_size == 1:
        return f"python {recipe} {options}".rstrip()
    return f"accel-train launch --config_file LAUNCH_FILE.yaml {recipe} {options}".rstrip()


def _system(environment: dict[str, Any]) -> str:
    parts = [str(environment[name]) for name in ("platform",) if environment.get(name)]
    if environment.get("python"):
        parts.append(f"Python {environment['python']}")
    if environment.get("cuda"):
        parts.append(f"CUDA {environment['cuda']}")
    if environment.get("cpu_count"):
        parts.append(f"{environment['cpu_count']} CPU cores")
    return ", ".join(parts)


def _hours(starts: Sequence[Sequence[Record]]) -> str:
    """Return the time of all starts up to their last lines. Lines that a resume has dropped are not in it."""
    seconds = 0.0
    device_seconds = 0.0
    for start in starts:
        elapsed = max((number(record, "elapsed_seconds") or 0.0 for record in start), default=0.0)
        seconds += elapsed
        device_seconds += elapsed * (number(start[0], "world_size") or 1.0)
    if not starts:
        return ""
    began = number(starts[0][0], "time")
    text = f"{format_seconds(seconds)} in {len(starts)} start(s), {device_seconds / 3600:.2f} device hours"
    if began is not None:
        text += time.strftime(", since %Y-%m-%d %H:%M UTC", time.gmtime(began))
    return text
