"""Calibrations with made-up figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accel_train.cost_model.record import Calibration, Figure, Figures, LinkFigure, Links, Machine

MACHINE = Machine(
    date="2026-11-26 12:00",
    device="AMD EPYC",
    device_type="cpu",
    precision="fp32",
    torch="2.13.0",
    num_machines=1,
    processes=2,
    backend="gloo",
    threads=1,
    clock="thread",
    load=0.1,
    cores=2,
)
UNITS = {"products": "FLOP/s", "attention": "FLOP/s", "operators": "B/s", "copy": "B/s", "host": "kernels/s"}
UNITS |= {"adamw": "B/s", "transfer": "B/s"}
VALUES = {"products": 8e10, "attention": 4e10, "operators": 1e10, "copy": 2e10, "host": 1e5}
VALUES |= {"adamw": 6e9, "transfer": 3e9}
LINK = LinkFigure(1e-4, 1e9, 0.05, 0.02, 100, "gloo, 2 processes")
MISSING = LinkFigure(None, None, None, None, 0, "not measured: one process")


def made_up(*, spread: float = 0.01, **machine: Any) -> Calibration:
    """A calibration with changed fields of its machine. With one process it has no links."""
    figures = {name: Figure(value, UNITS[name], spread, 50, f"made-up {name}") for name, value in VALUES.items()}
    where = replace(MACHINE, **machine)
    slower = replace(LINK, bytes_per_second=5e8, latency_seconds=2e-4)
    links = Links(LINK, slower, LINK) if where.processes > 1 else Links(MISSING, MISSING, MISSING)
    return Calibration(where, Figures(**figures), links)
