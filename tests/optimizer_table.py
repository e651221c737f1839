"""The table of optimizers at the end of docs/optimizations.md: ``python -m tests.optimizer_table`` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from accel_train.training.optimizer_choice import PRECISIONS, STRATEGIES, TABLE, Row

PAGE = Path(__file__).parents[1] / "docs" / "optimizations.md"
HEADING = "## Optimizers, strategies and precisions"


def rows() -> Iterator[tuple[str, str, str, bool, str]]:
    """Yield every (optimizer, strategy, precision, allowed, remark).

    The remark is the reason of a refusal, or else tells if tests run the combination.
    """
    for name, by_strategy in TABLE.items():
        for strategy, row in by_strategy.items():
            for precision in PRECISIONS:
                allowed = precision in row.precisions
                if not allowed:
                    remark = row.reason
                elif precision in row.run:
                    remark = "run by tests on CPU"
                else:
                    remark = "not run"
                yield name, strategy, precision, allowed, remark


def cell(row: Row) -> str:
    """Precisions of one optimizer under one strategy; in brackets those that no test has run."""
    if not row.precisions:
        return "refused"
    run = [p for p in row.precisions if p in row.run]
    return ", ".join([*run, *(f"({p})" for p in row.precisions if p not in row.run)])


def refused() -> Iterator[str]:
    """A line for each reason, with all that it refuses."""
    for name, by_strategy in TABLE.items():
        without = [s for s in STRATEGIES if not by_strategy[s].precisions]
        for reason, strategies in groupby(without, lambda s: by_strategy[s].reason):  # noqa: B023  used at once
            yield f"- `{name}` under {', '.join(strategies)}: {reason}"


def section() -> str:
    """Heading, table and notes."""
    found = list(rows())
    allowed = [remark for *_, ok, remark in found if ok]
    ran = sum(remark == "run by tests on CPU" for remark in allowed)
    never = [f"`{n}`" for n, rows_of in TABLE.items() if not any(row.run for row in rows_of.values())]
    lines = [
        HEADING,
        "",
        "Written by `python -m tests.optimizer_table` from the table that a run is checked against"
        " (`training/optimizer_choice.py`).",
        f"Of {len(found)} combinations {len(allowed)} are allowed; the others stop the run with the reason below.",
        "",
        f"| `optimizer.name` | {' | '.join(STRATEGIES)} |",
        f"|---|{'---|' * len(STRATEGIES)}",
        *(f"| `{name}` | {' | '.join(cell(by[s]) for s in STRATEGIES)} |" for name, by in TABLE.items()),
        "",
        f"- Without brackets: trained by the project's tests on CPU processes ({ran} combinations).",
        f"- In brackets: allowed, and run by no test ({allowed.count('not run')} combinations):"
        f" {PRECISIONS[-1]}, which needs a GPU, and {', '.join(never)}, of which only the arithmetic is tested, on CPU"
        " tensors.",
        *refused(),
    ]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the section as it should be: in its place, or at the end."""
    before, _, after = text.partition(HEADING)
    _, more, rest = after.partition("\n## ")
    return f"{before.rstrip()}\n\n{section()}{more}{rest}"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != page(PAGE.read_text()))
    PAGE.write_text(page(PAGE.read_text()))
