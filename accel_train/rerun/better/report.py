"""The table and the verdict of a paired test, for people."""

from __future__ import annotations

from collections.abc import Sequence

from accel_train.metrics.bootstrap import LEVEL
from accel_train.rerun.better.paired_test import FEWEST, POWER, Difference, Winner
from accel_train.rerun.paired import plus_minus


def table(differences: Sequence[Difference]) -> list[str]:
    """Return the differences as lines, those that decide first, with the unpaired interval beside the paired one."""
    deciding = [one for one in differences if one.better is not None]
    others = [one for one in differences if one.better is None and not one.equal]
    equal = [one.metric for one in differences if one.better is None and one.equal]
    together = f", of the {len(deciding)} that decide all at once" if len(deciding) > 1 else ""
    lines = [f"means over held-out samples; intervals of level {LEVEL}{together}"]
    width = max(len(one.metric) for one in differences)
    lines.append(
        f"{'metric':<{width}}  {'n':>6}  {'A':>11}  {'B':>11}  {'B - A':>11}  {'paired':>10}  {'unpaired':>10}  "
        f"{'p':>8}  reading"
    )
    lines += [_row(one, width) for one in (*deciding, *others)]
    if equal:
        lines.append(f"equal bit for bit: {', '.join(equal)}")
    return lines


def _row(one: Difference, width: int) -> str:
    return (
        f"{one.metric:<{width}}  {one.samples:>6}  {one.a:>11.5g}  {one.b:>11.5g}  {one.difference:>11.3g}  "
        f"{plus_minus(one.half_width):>10}  {plus_minus(one.unpaired_half_width):>10}  {_p(one.p):>8}  {reading(one)}"
    )


def reading(one: Difference) -> str:
    """Put the difference into words."""
    if one.equal:
        return "equal bit for bit"
    if one.half_width is None:
        return f"no interval: {one.samples} sample(s), {FEWEST} are required"
    if not one.is_shown:
        return "no difference shown"
    word = "lower" if one.difference < 0 else "higher"
    return word if one.winner is None else f"{word}: {one.winner} is better"


def verdict(differences: Sequence[Difference], winner: Winner) -> list[str]:
    """Return the verdict, with its deciding metrics."""
    deciding = [one for one in differences if one.better is not None]
    if winner == "equal":
        samples = deciding[0].samples
        return [f"verdict: equal: every value of {samples} samples has the same bits in both"]
    if winner == "divided":
        won = "; ".join(_won(one) for one in deciding if one.winner is not None)
        return [f"verdict: not resolved: {won}", "choose the metric that counts with --metric"]
    if winner == "not resolved":
        return [f"verdict: no difference shown: {'; '.join(_resolution(one) for one in deciding)}"]
    won = "; ".join(_won(one) for one in deciding if one.winner == winner)
    return [f"verdict: {winner} is better: {won}"]


def _won(one: Difference) -> str:
    assert one.half_width is not None, "a winner has an interval"
    size = abs(one.difference)
    # Of the size of the difference, as the sentence names the better one.
    low, high = size - one.half_width, size + one.half_width
    who = f"{one.metric} of {one.winner} is {'smaller' if one.better == 'min' else 'larger'}"
    return f"{who} by {size:.3g} [{low:.3g}, {high:.3g}], {_of_p(one.p)}"


def _of_p(p: float | None) -> str:
    text = _p(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def _resolution(one: Difference) -> str:
    if one.resolves is None:
        return f"{one.samples} sample(s) of {one.metric} have no interval, {FEWEST} are required"
    if one.equal:
        return f"{one.metric} is equal bit for bit"
    return (
        f"{one.samples} samples resolve differences of {one.metric} of {one.resolves:.2g} (shown with probability "
        f"{POWER:g})"
    )


def _p(p: float | None) -> str:
    if p is None:
        return "-"
    return "<1e-15" if p < 1e-15 else f"{p:.2g}"
