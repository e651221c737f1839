"""Text report of a calibration."""

from __future__ import annotations

from accel_train.cost_model.rates import rate
from accel_train.cost_model.record import AGAIN, NOISY, Calibration, Figure, LinkFigure


def describe(calibration: Calibration) -> str:
    """Return one line per measured rate, with its spread and how it was measured."""
    machine = calibration.machine
    lines = [
        f"{machine.device} ({machine.device_type}), {machine.precision}, torch {machine.torch}",
        f"{machine.processes} process(es) of {machine.threads} thread(s) on {machine.cores} core(s); "
        f"{machine.clock} clock, load average before {machine.load:.2f}",
        "",
        f"{'':<16}{'median':>22}  {'spread':>6}  {'rounds':>6}  measured on",
        *(_line(name, figure) for name, figure in calibration.figures.by_name().items()),
        *(_link_line(kind, link) for kind, link in calibration.links.by_kind().items()),
    ]
    noisy = calibration.noisy()
    if noisy:
        lines += [
            "",
            f"noisy, with quartiles more than {NOISY:.0%} apart: {', '.join(noisy)}. Something else is running here, "
            f"or the clock of the device varies; {AGAIN} while it is idle",
        ]
    return "\n".join(lines)


def _line(name: str, figure: Figure) -> str:
    shown = rate(figure.value, figure.unit)
    if name == "host":
        shown = f"{1e6 / figure.value:.2f} us a kernel"
    return f"{name:<16}{shown:>22}  {figure.spread:>6.1%}  {figure.rounds:>6}  {figure.how}"


def _link_line(kind: str, link: LinkFigure) -> str:
    if link.bytes_per_second is None or link.latency_seconds is None:
        return f"{kind:<16}{'':>22}  {'':>6}  {'':>6}  {link.how}"
    shown = f"{rate(link.bytes_per_second, 'B/s')} + {link.latency_seconds * 1e6:.0f} us"
    return f"{kind:<16}{shown:>22}  {link.spread:>6.1%}  {link.rounds:>6}  {link.how}; residual {link.residual:.1%}"
