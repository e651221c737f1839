"""Text and picture of a simulation, from the counts of docs/simulation.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure

from accel_train.cost_model.report import time_lines
from accel_train.simulation import report
from accel_train.simulation.report import Simulated, table
from tests.simulation.scaling_page import STRONG, known


def test_the_heading_names_every_strategy() -> None:
    """A single process of a file for DDP has none around its model."""
    first, second, third = known(STRONG)[:3]
    single = replace(first, counted={**first.counted, "strategy": "single"})
    assert table([single, second, third]).splitlines()[0].startswith("one process of each, single and fsdp2, bf16; ")
    assert table([second, third]).splitlines()[0].startswith("one process of each, fsdp2, bf16; ")


def test_bytes_are_sent_at_the_rate_of_the_slower_link() -> None:
    timed = known(STRONG)[-1].timed
    assert timed is not None
    lines = time_lines(timed.work, timed.time, timed.latency, timed.device, between=timed.between)
    (line,) = [line for line in lines if line.strip().startswith("communication")]
    assert line.endswith("GB (modelled) at 80% of 450 GB/s of NVLink 4, or less by the link between machines")


@pytest.mark.parametrize(("peak", "unit", "shown"), [(5.9e9, "GB", 5.9), (20e6, "MB", 20.0), (500.0, "kB", 0.5)])
def test_the_picture_has_the_units_of_the_text(peak: float, unit: str, shown: float) -> None:
    empty: dict[str, Any] = {"place": "", **dict.fromkeys(report.CATEGORIES, 0)}
    curve = [empty, {**empty, "activations": peak}, empty]
    simulated = Simulated({"strategy": "ddp", "processes": 2, "peak": {"place": "here"}}, curve, ())
    axes: Any = Figure().subplots()
    report._draw_memory(simulated, axes, colormaps["tab20"])  # pyright: ignore[reportPrivateUsage]
    assert axes.get_ylabel() == unit
    assert axes.dataLim.ymax == pytest.approx(shown)
