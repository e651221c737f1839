"""Text about the memory of a process, from the fields of its event. Without torch, so that pages of runs are quick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_train.wording import readable_size

TOTALS = {
    "rest_of_peak_bytes": "activations and temporaries",
    "peak_bytes": "peak",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "process_rss_bytes": "process",
}


def described(fields: Mapping[str, Any]) -> str:
    """Return ``weights 2.1 GB, gradients 2.1 GB; peak 9.3 GB``, empty for a line without such fields."""
    parts = [_sizes(fields.get("held_bytes"))]
    on_host = _sizes(fields.get("host_bytes"))
    if on_host:
        parts.append(f"in host memory {on_host}")
    totals = {words: fields[name] for name, words in TOTALS.items() if name in fields}
    parts.append(_sizes(totals))
    return "; ".join(part for part in parts if part)


def _sizes(sizes: object) -> str:
    if not isinstance(sizes, dict):
        return ""
    shown: list[str] = []
    for name, size in sizes.items():
        # A line that somebody has edited may hold anything.
        if isinstance(size, (int, float)):
            shown.append(f"{name.replace('_', ' ')} {readable_size(size)}")
    return ", ".join(shown)
