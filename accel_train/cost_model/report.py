"""The time of a step as text: each part with the work and the rate that it follows from, and their origins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_train.cost_model.devices import Rated
    from accel_train.cost_model.times import StepTime
    from accel_train.cost_model.work import Work

EXACT = "exact"
MODELLED = "modelled"


def time_lines(
    work: Work, time: StepTime, latency: float, device: Rated, *, counted: str = EXACT, between: str = ""
) -> list[str]:
    """Describe a step. ``latency`` are the seconds of its collectives that no bandwidth shortens.

    ``counted`` is the origin of the work of the micro-batches. ``between`` describes the link between machines.
    """
    at = device.origins
    lines = [f"time of a step, {MODELLED}"]
    lines += [
        _line("products", time.products, f"{work.products:.3g} FLOPs ({EXACT}) at {at['products']}"),
        _line("attention", time.attention, f"{work.attention:.3g} FLOPs ({EXACT}) at {at['attention']}"),
        _line("other operators", time.moved, f"{work.moved / 1e9:.3g} GB ({counted}) at {at['moved']}"),
        _line("host", time.host, f"{work.kernels:,} kernels ({counted}) of {at['host']}"),
    ]
    if work.sent:
        sent = f"{work.sent / 1e9:.3g} GB ({MODELLED})"
        calls = f"{work.collectives} collectives ({counted})"
        link, steps = at["link"], at["latency"]
        if between:
            link += ", or less by the link between machines"
            steps += ", and the steps over machines"
        lines += [
            _line("communication", time.communication, f"{sent} at {link}"),
            _line("  of it latency", latency, f"{calls} of {steps}"),
            _line("  not hidden", time.exposed, "beyond the computation that runs beside it"),
        ]
    if work.copied:
        lines += [
            _line("copies", time.copied, f"{work.copied / 1e9:.3g} GB ({counted}) at {at['copied']}"),
            _line("optimizer on the host", time.on_host, f"{work.on_host / 1e9:.3g} GB ({EXACT}) at {at['on_host']}"),
        ]
    lines.append(_line("step", time.total, _sum(time)))
    return [*lines, *source_lines(device, between)]


def source_lines(device: Rated, between: str) -> list[str]:
    """Describe the origin of the rates."""
    lines = [f"  {device.source}"]
    if between:
        lines.append(f"  {between}")
    return [*lines, *(f"  note: {note}" for note in device.notes)]


def _sum(time: StepTime) -> str:
    """Name the terms that add up to the step."""
    if time.serial:
        return "all of it: on a CPU nothing runs beside anything else"
    shown = "products, attention and other operators"
    if time.host > time.products + time.attention + time.moved:
        shown = "the host"
    if time.on_host:
        return f"{shown}, the communication that is not hidden, copies and the optimizer on the host"
    return f"{shown}, and the communication that is not hidden"


def _line(name: str, seconds: float, text: str) -> str:
    return f"  {name:<26}{seconds * 1e3:>9.2f} ms  {text}"
