"""The table of a branch: differences from its control over the same steps, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accel_train.metrics.bootstrap import LEVEL
from accel_train.rerun.paired import FEWEST, PairedDifference, paired_difference, plus_minus
from accel_train.rerun.starts import Line

if TYPE_CHECKING:
    from accel_train.rerun.recorded import RecordedRun

# Clocks differ between any two runs, and the step is the key.
NOT_METRICS = ("step", "time", "elapsed_seconds", "processor_seconds")


@dataclass(frozen=True)
class Row:
    """One metric of a branch and its control."""

    metric: str
    steps: tuple[int, int]
    """First and last step of the values."""
    found: PairedDifference
    last_half: bool = False
    """True for the row of the last half of the steps, beside one of all of them."""

    @property
    def label(self) -> str:
        """Name in the table. The steps alone do not tell which of two rows is the last half."""
        return f"{self.metric}, last half" if self.last_half else self.metric


def differences(control: RecordedRun, branch: RecordedRun, start: int, last: int) -> list[Row]:
    """Compare losses and evaluations of two runs at their common steps after ``start`` up to ``last``.

    The loss is also compared over the last half of these steps, when the change has taken effect.
    """
    ours = _after(branch.lines("train"), start, last)
    theirs = _after(control.lines("train"), start, last)
    rows = _rows(theirs, ours, ["loss"])
    # A change needs some steps to show, and the mean over all of them dilutes it.
    middle = (start + last) / 2
    late = _rows(theirs, _after(ours, middle, last), ["loss"])
    # The same row twice, if only the last half was logged.
    if late != rows:
        rows += [replace(row, last_half=True) for row in late]
    rows += _rows(theirs, ours, [name for name in _fields(ours) if name.startswith("loss_")])
    ours = _after(branch.lines("evaluation"), start, last)
    theirs = _after(control.lines("evaluation"), start, last)
    return rows + _rows(theirs, ours, [name for name in _fields(ours) if name not in NOT_METRICS])


def _after(lines: Mapping[int, Line], start: float, last: int) -> dict[int, Line]:
    return {step: line for step, line in lines.items() if start < step <= last}


def _fields(lines: Mapping[int, Line]) -> list[str]:
    # From all lines, because a term of the loss is logged only in steps that train it.
    fields: dict[str, None] = {}
    for line in lines.values():
        fields |= dict.fromkeys(line)
    return list(fields)


def _rows(control: Mapping[int, Line], branch: Mapping[int, Line], names: Sequence[str]) -> list[Row]:
    """Return a row for each of ``names`` that is a number in both, over their common steps."""
    rows: list[Row] = []
    for name in names:
        theirs = [step for step, line in control.items() if _has(line, name)]
        steps = [step for step in theirs if step in branch and _has(branch[step], name)]
        if steps:
            a = [float(control[step][name]) for step in steps]
            b = [float(branch[step][name]) for step in steps]
            rows.append(Row(name, (steps[0], steps[-1]), paired_difference(a, b)))
    return rows


def _has(line: Line, name: str) -> bool:
    value = line.get(name)
    # In Python a bool is an int.
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float))


def table(rows: Sequence[Row], start: int, last: int) -> list[str]:
    """Return the differences as lines, with the interval of unpaired runs beside the paired one."""
    if not rows:
        return [f"no number was logged by both at the same step from {start + 1} to {last}: nothing is compared"]
    # Baselines and counts of samples are metrics too, and would fill the table.
    differing = [row for row in rows if not row.found.equal or row.metric == "loss"]
    equal = [row.metric for row in rows if row not in differing]
    width = max(len(row.label) for row in rows)
    head = f"{'metric':<{width}}  {'steps':>13}  {'n':>5}  {'control':>11}  {'branch':>11}  {'difference':>11}"
    lines = [f"means over steps {start + 1} to {last}; intervals of level {LEVEL}"]
    lines.append(f"{head}  {'paired':>10}  {'unpaired':>10}  reading")
    for row in differing:
        found = row.found
        steps = f"{row.steps[0]}-{row.steps[1]}"
        lines.append(
            f"{row.label:<{width}}  {steps:>13}  {found.count:>5}  {found.a:>11.5g}  {found.b:>11.5g}  "
            f"{found.difference:>11.3g}  {plus_minus(found.half_width):>10}  "
            f"{plus_minus(found.unpaired_half_width):>10}  {found.reading}"
        )
    # With few log lines, even the longest row has no interval.
    unequal = [row.found.count for row in differing if not row.found.equal]
    if unequal and max(unequal) < FEWEST:
        remedy = "log each step in both (--log.log_every 1), or give the branch more --steps"
        lines.append(f"an interval needs {FEWEST} values: {remedy}")
    if equal:
        lines.append(f"equal bit for bit: {', '.join(equal)}")
    return lines
