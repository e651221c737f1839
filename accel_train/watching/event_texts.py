"""Words for events that several pages show."""

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


def replicas_differ(record: Mapping[str, Any]) -> str:
    """Describe processes that no longer held the same weights."""
    names = shortened(record.get("parameters") or ["unknown"], 2)
    return f"the weights of processes {record.get('processes')} differed ({names}); nothing was saved"
