"""Conditions on a comparison, such as ``speedup>=3``: parsed from text, decided by an interval."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import copysign, inf, isfinite, isnan
from typing import Literal

from accel_train.config import UsageError
from accel_train.metrics.bootstrap import Estimate, estimate
from accel_train.wording import did_you_mean, nearest

PATTERN = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\s*(?P<sign>>=|<=|>|<)\s*(?P<target>[^\s%]+?)\s*(?P<percent>%?)\s*")
SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
FORMS = (
    "speedup (step_seconds of A / step_seconds of B), NAME (the value of B), NAME_delta (B - A; with a percent sign, "
    "relative to A) and NAME_ratio (B / A)"
)
# Metrics in the runs of every recipe, unless the machine cannot measure them. Loss terms are called loss_TERM, and the
# recipe's own metrics train_NAME.
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
# Environment variable with the gates of a comparison, one per line. A run checks them against its own metrics.
GATES_VARIABLE = "ACCEL_TRAIN_GATES"
Verdict = Literal["passed", "not decided", "FAILED"]


@dataclass(frozen=True)
class Gate:
    """One condition."""

    text: str
    name: str
    sign: str
    target: float
    """A fraction if the value was given in percent."""
    percent: bool = False

    def holds(self, value: float) -> bool:
        """Return True if ``value`` meets the target. NaN never does."""
        return SIGNS[self.sign](value, self.target)


@dataclass(frozen=True)
class Decision:
    """A gate with the measured value and the verdict."""

    gate: Gate
    value: Estimate
    verdict: Verdict
    reason: str


def read_gate(text: str) -> Gate:
    """Parse ``NAME SIGN NUMBER`` or raise ``UsageError``. ``gate_values`` checks the name."""
    match = PATTERN.fullmatch(text)
    if match is None:
        raise _malformed(text)
    target = _number(match["target"])
    if target is None:
        raise _malformed(text)
    percent = bool(match["percent"])
    if percent and not match["name"].endswith("_delta"):
        raise UsageError(f"--gate {text!r}: percent is relative to A, so it needs NAME_delta; remove the percent sign")
    if percent:
        target /= 100
    return Gate(text.strip(), match["name"], match["sign"], target, percent)


def _malformed(text: str) -> UsageError:
    return UsageError(
        f"--gate {text!r} is not NAME SIGN NUMBER with a sign of {' '.join(SIGNS)} and a finite number; write it "
        "as in --gate 'speedup>=3' 'loss_delta<=0.03' 'step_seconds_ratio<0.9' 'loss_delta<=1%'"
    )


def _number(text: str) -> float | None:
    """Parse a finite number, or return None."""
    if "_" in text:  # float() takes 1_0 for 10
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    if not isfinite(number):
        return None
    return number


def gate_values(gate: Gate, a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the gated value of each pair. ``a`` and ``b`` map a metric to its values, equally many in both.

    A metric named exactly like the gate takes precedence over a form of another metric. Raises ``UsageError`` for an
    unknown name.
    """
    known = [name for name in b if name in a]
    if gate.name in b and not gate.percent:
        return list(b[gate.name])
    if gate.name == "speedup" and "step_seconds" in known:
        pairs = zip(a["step_seconds"], b["step_seconds"], strict=True)
        return [ratio(x, y) for x, y in pairs]
    metric, _, form = gate.name.rpartition("_")  # from the right: names of metrics have underscores
    if metric not in known or form not in ("delta", "ratio"):
        raise _unknown(gate, known)
    pairs = list(zip(a[metric], b[metric], strict=True))
    if form == "ratio":
        return [ratio(y, x) for x, y in pairs]
    if gate.percent:
        return [ratio(y - x, abs(x), zero_over_zero=0.0) for x, y in pairs]
    return [y - x for x, y in pairs]


def refuse_unknown_gates(metrics: Sequence[str]) -> None:
    """Refuse, inside a run of a comparison, a gate on a metric that no run reports.

    ``metrics`` are the names of the evaluation metrics. Loss terms and ``train_NAME`` are not known until the first
    step is logged, so ``compare`` checks them after the run.
    """
    known = [*COMPARED, *metrics, *(f"evaluation_{name}" for name in metrics)]
    for gate in map(read_gate, os.environ.get(GATES_VARIABLE, "").splitlines()):
        if gate.name == "speedup" or gate.name.startswith(("loss_", "train_")):
            continue
        # Both readings, because a metric may itself be called NAME_ratio.
        names = {gate.name}
        metric, _, form = gate.name.rpartition("_")
        if form in ("delta", "ratio"):
            names.add(metric)
        if names.isdisjoint(known):
            raise _unknown(gate, [*COMPARED, *metrics])


def _unknown(gate: Gate, known: Sequence[str]) -> UsageError:
    forms = ["speedup"]
    for metric in known:
        forms += [metric, f"{metric}_delta", f"{metric}_ratio"]
    return UsageError(
        f"--gate {gate.text!r}: {gate.name} is not known{did_you_mean(nearest(gate.name, forms))}; a gate is on "
        f"{FORMS}, where NAME is one of {', '.join(known)}"
    )


def ratio(numerator: float, denominator: float, *, zero_over_zero: float = 1.0) -> float:
    """Divide. ``x / 0`` is infinite, and ``0 / 0`` is ``zero_over_zero``."""
    if denominator:
        return numerator / denominator
    if numerator:
        return copysign(inf, numerator)
    return zero_over_zero


def decide(gate: Gate, values: Sequence[float]) -> Decision:
    """Decide a gate by the interval of ``values``.

    It passes if the whole interval meets the target, fails if none of it does, and is not decided in between. A single
    value has no interval, nor have values with an infinite one: their median decides. NaN fails.
    """
    value = estimate(values)
    if any(map(isnan, values)):
        return Decision(gate, value, "FAILED", "a value is not a number")
    if value.low is None or value.high is None:
        reason = "a value is infinite"
        if len(values) == 1:
            reason = "one value, so no interval: the value decides"
        verdict = "passed" if gate.holds(value.median) else "FAILED"
        return Decision(gate, value, verdict, reason)
    ends = [gate.holds(value.low), gate.holds(value.high)]
    if all(ends):
        return Decision(gate, value, "passed", "the whole interval meets the target")
    if any(ends):
        return Decision(gate, value, "not decided", "the interval includes the target, which is not a failure")
    return Decision(gate, value, "FAILED", "the interval excludes the target")
