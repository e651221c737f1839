"""The table of a drill, its JSON and its receipt."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.drill.interval import HOUR, Recommendation
from accel_train.rerun import receipt
from accel_train.rerun.starts import Start
from accel_train.store import atomic_files, commit, strict_json

if TYPE_CHECKING:
    from accel_train.drill.judging import Result

WIDTH = 110
SCHEMA = 1
ELSEWHERE = (
    "Times measured here are those of this machine, a small batch and few steps; on a real machine they differ. Give "
    "its times with --step_seconds and --save_seconds (docs/drill.md)."
)
HEADER = ("fault", "verdict", "exit", "resumed from", "steps lost", "seconds lost", "losses", "weights")


def text(results: Sequence[Result], step_seconds: float) -> list[str]:
    """Return the table, the reasons, and a last line."""
    rows = [HEADER, *(_cells(result, step_seconds) for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    for verdict in ("FAILED", "not applicable"):
        for result in results:
            if result.verdict == verdict:
                lines += _explained(result)
    count = dict.fromkeys(("passed", "FAILED", "not applicable"), 0)
    for result in results:
        count[result.verdict] += 1
    summary = f"{count['passed']} passed, {count['FAILED']} failed, {count['not applicable']} not applicable"
    return [*lines, "", summary]


def _cells(result: Result, step_seconds: float) -> tuple[str, ...]:
    seconds = result.seconds_lost(step_seconds)
    compared = result.compared
    same = ("", "")
    if compared is not None:
        same = (_sameness(compared.same_losses), _sameness(compared.weights.identical))
    return (
        result.fault.name,
        result.verdict,
        result.ending,
        "" if result.resumed_from is None else f"step {result.resumed_from}",
        "" if result.steps_lost is None else str(result.steps_lost),
        "" if seconds is None else f"{seconds:.1f}",
        *same,
    )


def _sameness(identical: bool) -> str:
    return "identical" if identical else "other"


def _explained(result: Result) -> list[str]:
    lines = ["", f"{result.fault.name}: {result.verdict}"]
    for reason in result.reasons:
        for paragraph in reason.splitlines():
            lines += textwrap.wrap(paragraph, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return lines


def advice(found: Recommendation, measured: Mapping[str, bool]) -> list[str]:
    """Return the recommended interval and the numbers behind it. ``measured`` is False for those that were given."""
    costs = found.costs
    lines = [
        f"recommended: checkpoints.save_every {found.save_every}, with which {found.share:.2%} of the time is lost",
        "  sqrt(2 x save x mean time between failures) / step",
        _origin("a save stops training for", costs.save_seconds, measured["save_seconds"]),
        _origin("a step takes", costs.step_seconds, measured["step_seconds"]),
        f"  mean time between failures {costs.mtbf_seconds / HOUR:g} h (--mtbf_hours)",
        f"  a failure also costs the restart, {costs.restart_seconds:.1f} s (measured here), and the steps since the "
        f"snapshot of a save under way, {costs.commit_seconds:.3g} s",
    ]
    present = found.present_share
    lost = "whose share of time lost depends on the length of an epoch"
    if present is not None:
        lost = f"with which {present:.2%} of the time is lost"
    lines.append(f"present: {found.present.text}, {lost}")
    if any(measured.values()):
        lines += textwrap.wrap(ELSEWHERE, WIDTH)
    return lines


def _origin(words: str, seconds: float, measured: bool) -> str:
    return f"  {words} {seconds:.3g} s ({'measured here' if measured else 'given'})"


def as_json(
    results: Sequence[Result], facts: Mapping[str, Any], found: Recommendation, measured: Mapping[str, bool]
) -> dict[str, Any]:
    """Return all results."""
    step_seconds = found.costs.step_seconds
    faults = [result.as_json(step_seconds) for result in results]
    saving = found.as_json() | {"measured_here": dict(measured)}
    return {**facts, "faults": faults, "saving": saving}


def write_receipt(
    path: Path, recipe: Path, content: Mapping[str, Any], results: Sequence[Result], start: Start
) -> None:
    """Write the results with both sides of every comparison, sealed by a hash."""
    evidence: dict[str, Any] = {}
    for result in results:
        if result.compared is not None:
            evidence[result.fault.name] = {
                "steps": [receipt.describe_row(row) for row in result.compared.rows],
                "checkpoint": receipt.describe_weights(result.compared.weights),
                "reasons_for_other_bits": list(result.compared.reasons),
            }
    sealed: dict[str, Any] = {
        "schema": SCHEMA,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        # The name alone: a path would tell about the machine.
        "recipe": {"name": recipe.name, "sha256": commit.hash_file(recipe)},
        **content,
        "evidence": evidence,
        "undisturbed": receipt.describe_environment(start),
    }
    atomic_files.replace_json(path, strict_json.sealed(sealed))
