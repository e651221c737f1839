"""Agreement of two trainings of the same steps: log lines, weights, and reasons why bits may differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accel_train.options.tree import flatten
from accel_train.precision import largest, relative
from accel_train.rerun.starts import Line, Start

Verdict = Literal["bit-identical", "equal within reduction order", "different", "not judged"]
MOST_ROWS = 30
"""Rows shown. The receipt has all."""
Sides = tuple[str, str]
SIDES: Sides = ("recorded", "replayed")
"""Names of the two trainings."""

SURROUNDINGS = (
    *("strategy", "world_size", "device", "device_name", "torch_threads", "precision", "cuda", "python"),
    *("attention", "attention_kernels"),
)
"""Fields of an environment line with an effect on the order of floating-point sums."""
CONSEQUENCES: Mapping[str, Sequence[str]] = {
    "attention": ("attention_kernels",),
    "precision": ("attention", "attention_kernels"),
}
"""Option -> fields of an environment line that it decides, besides that of its own name."""
TOLERANCE = 1e-5
"""Largest difference that reduction order explains, relative to the recorded loss, gradient norm or weight norm.
Measured over 15 steps in fp32, one process against two: 3e-7, 3.4e-7 and 6.4e-8."""


@dataclass(frozen=True)
class Row:
    """One logged step, recorded and replayed."""

    step: int
    values: Mapping[str, tuple[float, float]]
    """Field of the log line -> recorded and replayed value."""

    @property
    def differing(self) -> list[str]:
        """Fields whose values differ in any bit."""
        names: list[str] = []
        for name, (a, b) in self.values.items():
            # Unlike ==, this tells -0 from 0 and takes two NaN as equal.
            if a.hex() != b.hex():
                names.append(name)
        return names

    @property
    def largest(self) -> float:
        """Largest difference, relative to the recorded value. Infinite next to NaN or infinity."""
        return largest(relative(a, b) for a, b in self.values.values())


@dataclass(frozen=True)
class Weights:
    """A checkpoint of the run and the same step of the replay."""

    step: int
    name: str
    lines: Sequence[str]
    """One line for each collection of tensors, for people."""
    identical: bool
    relative: float
    """Norm of the difference of the model's weights relative to their norm. Infinite if they cannot be compared."""


def rows_of(recorded: Mapping[int, Line], replayed: Mapping[int, Line]) -> list[Row]:
    """Pair the lines of the recorded steps: every loss and the gradient norm.

    A missing value counts as NaN.
    """
    rows: list[Row] = []
    for step in sorted(recorded):
        a = _numbers(recorded[step])
        b = _numbers(replayed.get(step, {}))
        values: dict[str, tuple[float, float]] = {}
        # In the order of the log, in which the loss comes first.
        for name in (*a, *b):
            values[name] = (a.get(name, math.nan), b.get(name, math.nan))
        rows.append(Row(step, values))
    return rows


def _numbers(line: Line) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in line.items():
        # Terms of the loss are named after it. Times and throughput are never the same twice.
        is_compared = name.startswith("loss") or name == "grad_norm"
        if is_compared and isinstance(value, (int, float)):
            numbers[name] = float(value)
    return numbers


def reasons_for_other_bits(recorded: Sequence[Start], replayed: Start, asked: Collection[str] = ()) -> list[str]:
    """List the reasons why bits of two trainings may differ: another layout, machine, version or order of sums.

    Options in ``asked``, and what follows from them, are left out: they were meant to change the training.
    """
    expected = {*asked, *(name for option in asked for name in CONSEQUENCES.get(option, ()))}
    # A dict, because a run of several starts would give the same reason for each.
    reasons: dict[str, None] = {}
    for start in recorded:
        before = _surroundings(start)
        now = _surroundings(replayed)
        for name in now:
            if before.get(name) != now[name] and name not in expected:
                reasons[f"{name} {before.get(name)} -> {now[name]}"] = None
    # The log does not tell whether deterministic kernels were on.
    if replayed.environment.get("device") == "cuda":
        reasons["CUDA kernels may add in no fixed order"] = None
    return list(reasons)


def other_layouts(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> list[str]:
    """List the differences of the layouts in two manifests."""
    return [
        f"{name} {recorded.get(name, 'not recorded')} -> {replayed[name]}"
        for name in replayed
        if recorded.get(name) != replayed[name]
    ]


def _surroundings(start: Start) -> dict[str, Any]:
    # Here, because it imports accelerate, which a comparison of log lines does not need.
    from accel_train.checkpoints.restore import ORDER

    environment = start.environment
    options = flatten(start.options)
    surroundings: dict[str, Any] = {name: environment.get(name) for name in SURROUNDINGS}
    versions: Mapping[str, str] = environment.get("versions", {})
    surroundings |= {f"{package} version": version for package, version in versions.items()}
    return surroundings | {name: options.get(name) for name in ORDER}


def verdict(rows: Sequence[Row], weights: Sequence[Weights], reasons: Sequence[str], tolerance: float) -> Verdict:
    """Judge a replay. Without a reason for differing bits, every bit must be the same.

    ``not judged`` without lines and checkpoints: all of them are of steps with changed options.
    """
    if not rows and not weights:
        return "not judged"
    same_lines = not any(row.differing for row in rows)
    same_weights = all(one.identical for one in weights)
    if same_lines and same_weights:
        return "bit-identical"
    # A tolerance on the same layout would hide what a replay is for.
    if not reasons:
        return "different"
    distances = [row.largest for row in rows]
    distances += [one.relative for one in weights]
    if largest(distances) <= tolerance:
        return "equal within reduction order"
    return "different"


def first_difference(rows: Sequence[Row]) -> Row | None:
    """Return the first row that differs in any bit."""
    return next((row for row in rows if row.differing), None)


def table(rows: Sequence[Row], weights: Sequence[Weights], sides: Sides = SIDES) -> list[str]:
    """Return the compared steps and checkpoints as lines."""
    a, b = (f"{side} loss" for side in sides)
    lines = [f"{'step':>8}  {a:>20}  {b:>20}  {'difference':>10}  {'of grad_norm':>12}"]
    first = first_difference(rows)
    before = 0
    for number in rows_to_show(rows):
        if number > before:
            lines.append(f"{'...':>8}  {number - before} step(s) not shown")
        lines.append(_format_row(rows[number], first))
        before = number + 1
    for compared in weights:
        lines += [f"{compared.name}:", *(f"  {line}" for line in compared.lines)]
    return lines


def rows_to_show(rows: Sequence[Row]) -> list[int]:
    """Choose rows: the first, the last, and those around the first difference."""
    if len(rows) <= MOST_ROWS:
        return list(range(len(rows)))
    # The beginning, the difference and the end.
    part = MOST_ROWS // 3
    differing = next((number for number, row in enumerate(rows) if row.differing), 0)
    chosen = {*range(part), *range(len(rows) - part, len(rows))}
    # Two rows before it, which still agree.
    begin = max(0, differing - 2)
    end = min(len(rows), differing + part - 2)
    chosen |= set(range(begin, end))
    return sorted(chosen)


def _format_row(row: Row, first: Row | None) -> str:
    nothing = (float("nan"), float("nan"))
    a, b = row.values.get("loss", nothing)
    norm_a, norm_b = row.values.get("grad_norm", nothing)
    # 17 digits tell every two floats apart.
    text = f"{row.step:>8}  {a:>20.17g}  {b:>20.17g}  {_difference(a, b):>10}  {_difference(norm_a, norm_b):>12}"
    # A term has no column. One that differs although both columns agree is named, or the row would say nothing.
    if row.differing and not {"loss", "grad_norm"} & {*row.differing}:
        term = row.differing[0]
        text += f"  {term} {_difference(*row.values[term])}"
    return f"{text}  <- first difference" if row is first else text


def _difference(a: float, b: float) -> str:
    return "0" if a.hex() == b.hex() else f"{b - a:.3g}"


def allowed_lines(reasons: Sequence[str], tolerance: float) -> list[str]:
    """Return lines about why bits may differ, and how far apart values may be."""
    return [
        f"different bits are allowed: {'; '.join(reasons)}",
        f"tolerance: {tolerance:g}, relative to each loss and gradient norm and to the norm of the weights",
    ]
