"""Findings as text, as JSON, and as log lines of a start."""

from __future__ import annotations

import logging
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from accel_train.linting.findings import Rule, Stage
from accel_train.linting.host import facts_of_start
from accel_train.linting.table import IGNORE_VARIABLE, Found, ignored_names, lint

logger = logging.getLogger(__name__)
WIDTH = 100
LOGGED = 6
"""Maximum number of findings that a start logs."""


def describe(found: Sequence[Found]) -> list[str]:
    """Return the lines printed by ``accel-train check``."""
    if not found:
        return ["no findings"]
    errors = sum(1 for rule, _ in found if rule.severity == "error")
    lines = [f"findings: {errors} error(s), {len(found) - errors} warning(s)"]
    for rule, finding in found:
        lines += [
            f"  {rule.severity} {rule.name}: {finding.option}: {finding.value}",
            f"    why: {finding.reason} ({rule.source})",
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
    lines = [f"{rule.name} ({rule.severity})"]
    lines += textwrap.wrap(rule.explanation, WIDTH, initial_indent="  ", subsequent_indent="  ")
    lines.append(f"  source: {rule.source}")
    if rule.stage != "start":
        known = "the data are open" if rule.stage == "data" else "the model is counted"
        lines.append(f"  reported only at a start, once {known}")
    lines.append(f"  silence it: accel-train check --ignore {rule.name}, or {IGNORE_VARIABLE}={rule.name} for a start")
    return "\n".join(lines)


def log_findings(config: Any, accelerator: Any, stage: Stage, **sizes: Any) -> None:
    """Log the findings of one stage of a start, on the main process. Every process calls it, without waiting.

    ``sizes`` are those of ``host.facts_of``.

    Takes about 10 ms. Raises ``UsageError`` for an unknown name in ``ACCEL_TRAIN_IGNORE``.
    """
    # On every process, so that an unknown name ends all of them together.
    ignored = ignored_names(os.environ)
    if not accelerator.is_main_process or config.evaluate_only:
        return
    facts = facts_of_start(config, accelerator, **sizes)
    _log(lint(facts, ignored, [stage]))


def _log(found: Sequence[Found]) -> None:
    # Errors come first, so the limit cuts off warnings. All are logged as warnings, because the start continues.
    for rule, finding in found[:LOGGED]:
        text = f"{finding.option}: {finding.value}: {finding.reason}; {finding.remedy} [{rule.name}]"
        logger.warning("%s", text)
    left_out = len(found) - LOGGED
    if left_out > 0:
        logger.warning("%d more finding(s): `accel-train check` with the same arguments lists them", left_out)
