"""Conditions on a comparison, such as ``speedup>=3``: read from text, decided by an interval."""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import copysign, inf, isfinite, isnan
from typing import Literal

from accel_train.config import UsageError
from accel_train.metrics.bootstrap import Estimate, estimate

PATTERN = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\s*(?P<sign>>=|<=|>|<)\s*(?P<target>[^\s%]+?)\s*(?P<percent>%?)\s*")
SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
FORMS = (
    "speedup (step_seconds of A over that of B), NAME (B's own value), NAME_delta (B - A; with a percent sign: of A's "
    "value) and NAME_ratio (B / A)"
)
COMPARED = (
    "step_seconds",
    "samples_per_second",
    "loop_step_seconds",
    "loop_step_cpu_seconds",
    "run_seconds",
    "run_cpu_seconds",
    "data_wait_fraction",
    "mfu",
    "memory_peak_gib",
    "process_rss_gib",
    "loss",
    "loss_last_tenth",
    "loss_equal_time",
)
"""Metrics of any recipe's runs; what a machine does not measure is missing. The terms of the loss are ``loss_TERM``."""
GATES_VARIABLE = "ACCEL_TRAIN_GATES"
"""Holds the gates of a comparison, one a line, for its runs: they know at their start what they will report."""
Verdict = Literal["passed", "not decided", "FAILED"]


@dataclass(frozen=True)
class Gate:
    """One condition."""

    text: str
    name: str
    sign: str
    target: float
    """A value given in percent is already a fraction here."""
    percent: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` meets the target; NaN never does."""
        return SIGNS[self.sign](value, self.target)


@dataclass(frozen=True)
class Decision:
    """A gate, what it was held against, and what came out."""

    gate: Gate
    value: Estimate
    verdict: Verdict
    reason: str


def read_gate(text: str) -> Gate:
    """Parse ``NAME SIGN NUMBER``; raises ``UsageError``. Whether the name is known is asked of ``values_of``."""
    found = PATTERN.fullmatch(text)
    target = _number(found["target"]) if found else None
    if found is None or target is None:
        raise UsageError(
            f"--gate {text!r} is not NAME SIGN NUMBER with a sign of {' '.join(SIGNS)} and a finite number; write it "
            "as in --gate 'speedup>=3' 'loss_delta<=0.03' 'step_seconds_ratio<0.9' 'loss_delta<=1%'"
        )
    percent = bool(found["percent"])
    if percent and not found["name"].endswith("_delta"):
        raise UsageError(f"--gate {text!r}: percent is of A's value, so it goes with NAME_delta; leave the sign out")
    return Gate(text.strip(), found["name"], found["sign"], target / 100 if percent else target, percent)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) and "_" not in text else None


def values_of(gate: Gate, a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> list[float]:
    """What the gate is about, once for each pair of values. ``a`` and ``b`` hold as many of a metric, in pairs.

    A metric of that very name wins over a form of another. Raises ``UsageError`` for a name that is not known.
    """
    known = [name for name in b if name in a]
    if gate.name in b and not gate.percent:
        return list(b[gate.name])
    if gate.name == "speedup" and "step_seconds" in known:
        return [over(x, y) for x, y in zip(a["step_seconds"], b["step_seconds"], strict=True)]
    metric, _, form = gate.name.rpartition("_")
    if metric in known and form in ("delta", "ratio"):
        pairs = list(zip(a[metric], b[metric], strict=True))
        if form == "ratio":
            return [over(y, x) for x, y in pairs]
        return [over(y - x, abs(x), of_zeros=0.0) if gate.percent else y - x for x, y in pairs]
    raise _unknown(gate, known)


def refuse_unknown_gates(metrics: Sequence[str]) -> None:
    """In a run of a comparison, refuse a gate on what neither this run's evaluation (``metrics``) reports nor any run.

    Terms of the loss are known when the first step is logged: ``compare`` asks for them after the run.
    """
    known = [*COMPARED, *metrics, *(f"evaluation_{name}" for name in metrics)]
    for gate in map(read_gate, os.environ.get(GATES_VARIABLE, "").splitlines()):
        metric, _, form = gate.name.rpartition("_")
        names = {gate.name, metric if form in ("delta", "ratio") else gate.name}
        if gate.name != "speedup" and names.isdisjoint(known) and not gate.name.startswith("loss_"):
            raise _unknown(gate, [*COMPARED, *metrics])


def _unknown(gate: Gate, known: Sequence[str]) -> UsageError:
    return UsageError(
        f"--gate {gate.text!r}: {gate.name} is not known{_nearest(gate.name, known)}; a gate is on {FORMS}, where NAME "
        f"is one of {', '.join(known)}"
    )


def over(numerator: float, denominator: float, *, of_zeros: float = 1.0) -> float:
    """A ratio that exists for 0 as well: ``of_zeros`` where both are 0, else infinite."""
    if denominator:
        return numerator / denominator
    return copysign(inf, numerator) if numerator else of_zeros


def _nearest(name: str, known: Sequence[str]) -> str:
    forms = ["speedup", *(n + form for n in known for form in ("", "_delta", "_ratio"))]
    found = difflib.get_close_matches(name, forms, n=1, cutoff=0.6)
    return f": did you mean {found[0]!r}?" if found else ""


def decide(gate: Gate, values: Sequence[float]) -> Decision:
    """FAILED only where no value of the interval meets the target; passed where each does. Without an interval (a
    single value) it is the value that decides. A value that is not a number fails."""
    value = estimate(values)
    if any(map(isnan, values)):
        return Decision(gate, value, "FAILED", "a value is not a number")
    if value.low is None or value.high is None:
        why = "one value, so no interval: it decides" if len(values) == 1 else "a value is infinite"
        return Decision(gate, value, "passed" if gate.holds(value.median) else "FAILED", why)
    ends = [gate.holds(value.low), gate.holds(value.high)]
    if all(ends):
        return Decision(gate, value, "passed", "the whole interval meets the target")
    if any(ends):
        return Decision(gate, value, "not decided", "the interval includes the target, which is no failure")
    return Decision(gate, value, "FAILED", "the interval excludes the target")
