"""Words for events that several pages show."""

from __future__ import annotations

from accel_train.watching.run_files import Record, number
from accel_train.wording import shortened


def straggler(record: Record) -> str:
    """Describe a process that has become slow, or no longer is."""
    who = f"process {record.get('process')} ({record.get('host')})"
    measure = record.get("measure")
    factor = number(record, "factor")
    if record.get("recovered") or factor is None:
        return f"{who} is no longer slower than the others ({measure})"
    return f"{who} is slower than the others ({measure}): {factor:.1f} times as long"


def replicas_differ(record: Record) -> str:
    """Describe processes that no longer held the same weights."""
    parameters = record.get("parameters")
    names = shortened(parameters, 2) if isinstance(parameters, list) else str(parameters)
    return f"the weights of processes {record.get('processes')} differed ({names}); nothing was saved"
