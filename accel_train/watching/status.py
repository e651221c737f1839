"""Status of a run, such as training, silent or ended, and the time its next line may take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

from accel_train.metrics.progress import format_seconds
from accel_train.store.names import METRICS_FILE
from accel_train.watching.event_texts import out_of_memory, replicas_differ, starts_again
from accel_train.watching.run_files import Condition, Record, RunFiles, number

SHORTEST_SECONDS = 120.0
"""A shorter silence does not count, since a busy machine or a slow file system may cause it."""
LINES = 10
"""Number of median times between two training lines that may pass without one."""
LONGEST = 2.0
"""Factor on the longest time seen so far. It covers saves, since no line announces them."""
UNKNOWN_SECONDS = 1800.0
"""Time allowed for anything new to the run: loading, compilation, the first evaluation. It is the default of
``collective_timeout_seconds``, the time until a waiting process gives up."""


def condition_of(files: RunFiles) -> Condition:
    """Return the status of a run and the reason, from its last line, its lock and the time between its lines."""
    process = files.process
    if files.without_records:
        return _unrecorded(files)
    begins_again = _begins_again(files)
    restarting = _starts_again(files)
    if restarting is not None and not begins_again:
        # The next start may take a while, because the process that holds the lock has to end first.
        return _silent(files) or restarting
    ended = _ended(files)
    if process is not None and process.alive is False:
        # The lock may be newer than the end line: in a copy of the run, or after a start that had no step left.
        if begins_again and ended is not None and ended.status == "finished":
            return ended
        # An end line comes from the process that is gone only if that process wrote any lines.
        if ended is None or begins_again:
            return Condition("crashed", f"{process.text} is gone and wrote no end line")
    if begins_again:
        # The lines are of an earlier start. A new one writes its first line only after loading data and model.
        return _silent(files) or Condition("starting", "a new start, without a line yet")
    if ended is not None:
        return ended
    silent = _silent(files)
    if silent is not None:
        return silent
    # The first step may compile for minutes.
    if not any(record.get("event") == "train" for record in files.last_start):
        return Condition("starting", "no training line yet")
    return Condition("training")


def _unrecorded(files: RunFiles) -> Condition:
    """Return the condition of a run whose script writes no records. Its end leaves no trace, so it is not guessed."""
    reason = f"no {METRICS_FILE}: its script has no Recorder, so only its checkpoints are known"
    # Unknown for a process on another host, and for one that has not written its name yet.
    alive: bool | None = None
    if files.process is not None:
        alive = files.process.alive
    if files.checkpoint is None and alive is not False:
        return Condition("starting", "no record and no checkpoint yet")
    if alive:
        return Condition("training", reason)
    return Condition("unrecorded", reason)


def _begins_again(files: RunFiles) -> bool:
    """Return True if a process has locked the run since its last line."""
    if not files.records or files.process is None:
        return False
    last = number(files.records[-1], "time")
    return last is not None and files.process.started_at > last


def _starts_again(files: RunFiles) -> Condition | None:
    """Return the condition of a run whose last start ended itself to begin another, or None."""
    for record in files.last_start:
        step = record.get("step")
        if record.get("event") == "rollback":
            return Condition("starting", f"step {step} was not finite; continues without its samples")
        if record.get("event") == "out_of_memory" and starts_again(record):
            size = record.get("next_micro_batch_size")
            return Condition("starting", f"step {step} ran out of memory; next micro-batch: {size}")
    return None


def _ended(files: RunFiles) -> Condition | None:
    """Return the condition in which the last start ended, or None if its records show no end."""
    for record in files.last_start:
        # The processes end each other, so the main one may not reach its end line.
        if record.get("event") == "replicas_differ":
            return Condition("crashed", replicas_differ(record))
        if record.get("event") == "out_of_memory" and not starts_again(record):
            return Condition("crashed", f"out of memory at step {record.get('step')}: {out_of_memory(record)}")
    reasons = [record.get("reason") for record in files.last_start if record.get("event") == "end"]
    if not reasons:
        return None
    reason = reasons[-1]
    # Two reasons are words of the run. Any other names the exception that ended it.
    if reason == "finished":
        return Condition("finished")
    if reason == "stopped":
        return Condition("stopped", "saved before its last step; start it again to resume")
    return Condition("crashed", f"ended by {reason}; logs/rank_0.log has the traceback")


def _silent(files: RunFiles) -> Condition | None:
    """Return the condition of a run whose next line is overdue, or None."""
    newest = files.last_start[-1:]
    times = [float(line["time"]) for line in newest if number(line, "time") is not None]
    if files.process is not None:
        # A start that still loads its data has no line.
        times.append(files.process.started_at)
    if not times:
        return None
    allowed = allowed_seconds(files)
    seconds = files.now - max(times)
    if seconds <= allowed:
        return None
    text = f"no line for {format_seconds(seconds)}; its lines so far suggest at most {format_seconds(allowed)}"
    return Condition("silent", text)


def allowed_seconds(files: RunFiles) -> float:
    """Return the longest wait for the next line before the run counts as silent."""
    unknown = _option(files, "collective_timeout_seconds", UNKNOWN_SECONDS)
    lines = [record for record in files.last_start if number(record, "time") is not None]
    gaps = _gaps(lines, "train")
    if not gaps or _begins_again(files):
        return unknown
    # Also the longest gap, because saves come rarely and no line announces them.
    allowed = max(SHORTEST_SECONDS, LINES * median(gaps), LONGEST * max(gaps))
    # An evaluation writes its line at its end, so its beginning has to be guessed.
    if _may_evaluate(files, lines):
        allowed = max(allowed, _evaluation_seconds(files) or unknown)
    if files.options.get("hub.repo_id") and _is_last(files, lines):
        # The last pushes come before the end line.
        minutes = _option(files, "hub.finish_minutes", 10.0)
        allowed = max(allowed, 60 * minutes)
    return allowed


def _evaluation_seconds(files: RunFiles) -> float | None:
    """Return the longest time allowed for an evaluation, by those of all starts. None before the first."""
    timed = [record for record in files.records if number(record, "time") is not None]
    gaps = _gaps(timed, "evaluation")
    if not gaps:
        return None
    return LONGEST * max(gaps)


def _gaps(lines: Sequence[Record], event: str) -> list[float]:
    """Return the seconds between each line of ``event`` and the line before it, except for the first of a start."""
    gaps: list[float] = []
    for before, line in itertools.pairwise(lines):
        # A first training line also waits for loading and compilation, which happen once.
        if line.get("event") == event and before.get("event") not in ("environment", "config", "resume"):
            gaps.append(max(0.0, line["time"] - before["time"]))
    return gaps


def _may_evaluate(files: RunFiles, lines: Sequence[Record]) -> bool:
    """Return True if an evaluation may have begun after the last training line."""
    for record in reversed(lines):
        if record.get("event") == "evaluation":
            return False
        if record.get("event") == "train":
            break
    else:
        return False
    if _is_last(files, lines):
        return True
    every = int(_option(files, "evaluation.every", 0))
    log_every = int(_option(files, "log.log_every", 1))
    if every <= 0:
        return False
    # Steps between two log points have no line.
    reached = record["step"]
    return reached // every != (reached + log_every - 1) // every or reached % every == 0


def _is_last(files: RunFiles, lines: Sequence[Record]) -> bool:
    steps = [record["step"] for record in lines if record.get("event") == "train"]
    max_steps = files.max_steps()
    # If the length is not known, every step may be the last one.
    return max_steps is None or bool(steps and steps[-1] >= max_steps)


def _option(files: RunFiles, name: str, default: float) -> float:
    value = files.options.get(name)
    if isinstance(value, (int, float)):
        return float(value)
    return default
