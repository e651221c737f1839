"""Events of a run, for the marks on its curves and the table of its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from accel_train.metrics.records import last_pass
from accel_train.watching.event_texts import out_of_memory, replicas_differ, starts_again, straggler
from accel_train.watching.run_files import Record, number

Kind = Literal[
    "start",
    "restart",
    "save",
    "evaluation",
    "warning",
    "bad step",
    "out of memory",
    "rollback",
    "slow process",
    "weights differ",
    "plateau",
    "larger batch",
    "not finite",
    "stop",
    "crash",
    "end",
]


@dataclass(frozen=True)
class Event:
    """Something noteworthy at a step."""

    kind: Kind
    step: int
    text: str
    time: float | None
    """Seconds since 1970."""


def starts_of(records: Sequence[Record]) -> list[Sequence[Record]]:
    """Split the records into those of each start, oldest first."""
    begins = [index for index, record in enumerate(records) if record.get("event") == "environment"]
    # A file that was cut by hand begins in the middle of a start.
    if records and begins[:1] != [0]:
        # Its lines count as a start of their own, so that none is lost.
        begins.insert(0, 0)
    ends = [*begins, len(records)][1:]
    return [records[begin:end] for begin, end in zip(begins, ends, strict=False)]


def events_of(records: Sequence[Record]) -> list[Event]:
    """Return the events in the order of the file, followed by the non-finite values."""
    events: list[Event] = []
    starts = starts_of(records)
    for index, start in enumerate(starts):
        # The last start may still be training.
        events += _events_of_start(start, is_last=index == len(starts) - 1)
    return events + _non_finite(records)


def _events_of_start(start: Sequence[Record], *, is_last: bool) -> list[Event]:
    events = [_begin(start)]
    kinds = {record.get("event") for record in start}
    ends_itself = any(starts_again(record) for record in start)
    for record in start:
        # One process ran out of memory, so the end of the main one may only be a consequence.
        if record.get("event") == "end" and ends_itself:
            continue
        event = _event(record)
        if event is not None:
            events.append(event)
    if is_last or "end" in kinds or ends_itself:
        return events
    reached = max(_step(record) or 0 for record in start)
    text = "killed, or its machine went down; a resume has dropped its lines after the newest checkpoint"
    return [*events, Event("crash", reached, text, number(start[-1], "time"))]


def _begin(start: Sequence[Record]) -> Event:
    environment = start[0]
    text = describe_machine(environment)
    time = number(environment, "time")
    # A resume line comes after those of the environment and the config.
    for record in start:
        step = _step(record)
        if record.get("event") == "resume" and step is not None:
            return Event("restart", step, text, time)
    return Event("start", 0, text, time)


def describe_machine(environment: Mapping[str, object]) -> str:
    """Describe strategy, precision and device of a start."""
    parts: list[str] = []
    if "strategy" in environment:
        parts.append(f"{environment['strategy']} × {environment.get('world_size', 1)}")
    parts += [str(environment[name]) for name in ("precision", "device_name") if environment.get(name)]
    return ", ".join(parts)


def _event(record: Record) -> Event | None:
    step = _step(record)
    kind = record.get("event")
    time = number(record, "time")
    # A recipe may write one before its first step.
    if kind == "warning":
        return Event("warning", step or 0, str(record.get("message")), time)
    if step is None:
        return None
    if kind == "checkpoint":
        return Event("save", step, f"checkpoint of step {step}", time)
    if kind == "evaluation":
        return Event("evaluation", step, f"evaluation after step {step}", time)
    if kind == "bad_step":
        return Event("bad step", step, _bad_step(record), time)
    if kind == "out_of_memory":
        return Event("out of memory", step, out_of_memory(record), time)
    if kind == "rollback":
        return Event("rollback", step, f"not finite; continues without samples {record.get('left_out')}", time)
    if kind == "straggler":
        return Event("slow process", step, straggler(record), time)
    if kind == "replicas_differ":
        return Event("weights differ", step, replicas_differ(record), time)
    if kind == "plateau":
        text = f"no better in {record.get('windows')} windows; learning rate {record.get('factor')} of the schedule's"
        return Event("plateau", step, text, time)
    if kind == "noise_scale":
        # Only the windows after which the batch has grown are events of the run.
        before, after = record.get("global_batch_size"), record.get("next_global_batch_size")
        text = f"{after} samples per step, {before} before"
        return None if before == after else Event("larger batch", step, text, time)
    if kind == "end":
        return _end(str(record.get("reason")), step, time)
    return None


def _bad_step(record: Record) -> str:
    reasons = {
        "spike": "a spike of the gradient norm",
        "loss": "loss not finite",
        "gradient": "gradient not finite",
        "weight": "no sample with a weight",
    }
    reason = str(record.get("reason"))
    outcome = "skipped" if record.get("skipped") else "trained all the same"
    return f"{reasons.get(reason, reason)}, {outcome}"


def _end(reason: str, step: int, time: float | None) -> Event:
    if reason == "finished":
        return Event("end", step, "finished", time)
    if reason == "stopped":
        return Event("stop", step, "stopped and saved before the last step", time)
    return Event("crash", step, f"ended by {reason}", time)


def _non_finite(records: Sequence[Record]) -> list[Event]:
    events: list[Event] = []
    for line in last_pass(records, "train"):
        for name in ("loss", "grad_norm"):
            value = number(line, name)
            if value is not None and not math.isfinite(value):
                events.append(Event("not finite", line["step"], f"{name} is {value}", number(line, "time")))
    return events


def _step(record: Record) -> int | None:
    step = record.get("step")
    if isinstance(step, int):
        return step
    return None
