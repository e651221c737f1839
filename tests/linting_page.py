"""The tables of rules in docs/linting.md: ``python -m tests.linting_page`` writes them."""

from __future__ import annotations

import sys
from pathlib import Path

from accel_train.linting.findings import Rule
from accel_train.linting.table import SUBJECTS
from tests.linting.cases import CASES

PAGE = Path(__file__).parents[1] / "docs" / "linting.md"
HEADING = "## The rules"


def row(rule: Rule) -> str:
    """A line of the table. The case of the tests says if a rule has a change for --fix."""
    finding = rule.find(CASES[rule.name][0])
    assert finding is not None
    marks = [rule.severity]
    if finding.change is not None and rule.stage == "start":
        marks.append("fix")
    if rule.stage != "start":
        marks.append(f"start: {rule.stage}")
    explanation = rule.explanation.replace("|", "\\|")
    return f"| `{rule.name}` | {', '.join(marks)} | {explanation} | {rule.source} |"


def section() -> str:
    """Heading and one table for each subject."""
    count = sum(map(len, SUBJECTS.values()))
    lines = [
        HEADING,
        "",
        f"Written by `python -m tests.linting_page` from the {count} rules. `fix`: `--fix` knows the value."
        " `start: data`, `start: model`: reported only at a start, once the data are open or the model is counted.",
    ]
    for subject, rules in SUBJECTS.items():
        lines += ["", f"### {subject}", "", "| Rule | | What it is about | Source |", "|---|---|---|---|"]
        lines += [row(rule) for rule in rules]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with current tables."""
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    return before + section()


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
