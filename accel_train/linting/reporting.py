"""Findings as text, as JSON, and as lines of the log of a start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from accel_train.linting.findings import Rule
from accel_train.linting.table import IGNORE_VARIABLE, Found

logger = logging.getLogger(__name__)
LOGGED = 6
"""Most lines that a start logs."""


def describe(found: Sequence[Found]) -> list[str]:
    """Return the lines that ``accel-train check`` prints."""
    if not found:
        return ["no findings"]
    errors = sum(1 for rule, _ in found if rule.severity == "error")
    lines = [f"findings: {errors} error(s), {len(found) - errors} warning(s)"]
    for rule, finding in found:
        lines += [
            f"  {rule.severity} {rule.name}: {finding.option}: {finding.value}",
            f"    why: {finding.reason}",
            f"    do: {finding.remedy}",
        ]
    return lines


def as_json(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the findings as plain values."""
    items: list[dict[str, Any]] = []
    for rule, finding in found:
        change = None
        if finding.change is not None:
            option, value = finding.change
            change = {"option": option, "value": value}
        items.append(
            {
                "name": rule.name,
                "severity": rule.severity,
                "option": finding.option,
                "value": finding.value,
                "reason": finding.reason,
                "remedy": finding.remedy,
                "source": rule.source,
                "change": change,
            }
        )
    return items


def explain(rule: Rule) -> str:
    """Return the output of ``accel-train check --explain NAME``."""
    lines = [f"{rule.name} ({rule.severity})", f"  {rule.explanation}", f"  source: {rule.source}"]
    if rule.stage != "start":
        known = "the data are open" if rule.stage == "data" else "the model is counted"
        lines.append(f"  speaks at a start, once {known}")
    lines.append(f"  silence it: accel-train check --ignore {rule.name}, or {IGNORE_VARIABLE}={rule.name} for a start")
    return "\n".join(lines)


def log(found: Sequence[Found]) -> None:
    """Log findings, one line each. Main process only."""
    for rule, finding in found[:LOGGED]:
        level = logging.ERROR if rule.severity == "error" else logging.WARNING
        text = f"{finding.option}: {finding.value}: {finding.reason}; {finding.remedy} [{rule.name}]"
        logger.log(level, "%s", text)
    if len(found) > LOGGED:
        logger.warning("%d more findings: `accel-train check` with the same arguments lists them", len(found) - LOGGED)
