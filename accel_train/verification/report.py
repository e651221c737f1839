"""The table of a verification, and its JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_train.verification.checks import Check, Finding

WIDTH = 110
Results = Sequence["tuple[Check, Finding]"]


def text(results: Results) -> list[str]:
    """Return the table, the failures, the checks not made, and a last line."""
    rows = [("check", "what", "largest difference", "tolerance", "verdict")]
    for check, found in results:
        rows.append((check.name, check.title, found.largest, found.tolerance, found.verdict))
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines += _explained(results, "FAILED", with_advice=True)
    lines += _explained(results, "not checked", with_advice=False)
    lines += _notes(results)
    return [*lines, "", _summary(results)]


def _explained(results: Results, verdict: str, *, with_advice: bool) -> list[str]:
    lines: list[str] = []
    for check, found in results:
        if found.verdict != verdict:
            continue
        lines += ["", f"{check.name}: {verdict}"]
        for paragraph in found.reason.splitlines():
            lines += textwrap.wrap(paragraph, WIDTH, initial_indent="  ", subsequent_indent="  ")
        if with_advice and not found.crashed:
            lines += textwrap.wrap(check.failure, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return lines


def _notes(results: Results) -> list[str]:
    notes = [f"{check.name}: {found.reason}" for check, found in results if found.verdict == "ok" and found.reason]
    return ["", *notes] if notes else []


def _summary(results: Results) -> str:
    count = dict.fromkeys(("ok", "FAILED", "not checked"), 0)
    for _, found in results:
        count[found.verdict] += 1
    return f"{count['ok']} ok, {count['FAILED']} failed, {count['not checked']} not checked"


def as_json(results: Results, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the results with ``facts`` about the runs."""
    checks: list[dict[str, str]] = []
    for check, found in results:
        checks.append(
            {
                "check": check.name,
                "what": check.title,
                "verdict": found.verdict,
                "largest_difference": found.largest,
                "tolerance": found.tolerance,
                "reason": found.reason,
            }
        )
    return facts | {"checks": checks}
