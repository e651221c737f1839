"""Texts for events that several pages show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_train.wording import shortened


def straggler(record: Mapping[str, Any]) -> str:
    """Describe a process that has become slow, or no longer is."""
    who = f"process {record.get('process')} ({record.get('host')})"
    measure = record.get("measure")
    factor = record.get("factor")
    if record.get("recovered") or not isinstance(factor, (int, float)):
        return f"{who} is no longer slower than the others ({measure})"
    return f"{who} is slower than the others ({measure}): {factor:.1f} times as long"


def starts_again(record: Mapping[str, Any]) -> bool:
    """Return True for an event with which a start ends itself so that another one continues the run."""
    kind = record.get("event")
    return kind == "rollback" or (kind == "out_of_memory" and "next_micro_batch_size" in record)


def out_of_memory(record: Mapping[str, Any]) -> str:
    """Describe what ran out of memory and, if the run continues, its next micro-batch size."""
    size = f"micro-batch of {record.get('micro_batch_size')}"
    if starts_again(record):
        return f"{size}; continues with {record.get('next_micro_batch_size')}"
    what = size if record.get("during") == "step" else f"in the {record.get('during')}"
    process = record.get("process")
    return f"{what}, process {process}; logs/rank_{process}.log says what can be done"


def replicas_differ(record: Mapping[str, Any]) -> str:
    """Describe processes that no longer held the same weights."""
    names = shortened(record.get("parameters") or ["unknown"], 2)
    return f"the weights of processes {record.get('processes')} differed ({names}); nothing was saved"
