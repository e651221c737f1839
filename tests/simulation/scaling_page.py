"""Tables of scaling in docs/simulation.md, and its picture: ``python -m tests.simulation.scaling_page`` writes both.

    python -m tests.simulation.scaling_page              # the tables, from the counts that there are
    python -m tests.simulation.scaling_page --simulate   # counts what is missing, and draws the picture: minutes

What the simulations counted lies in counts/, so that another device, link or model of time needs none of them again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accel_train.commands.launch import Launch
from accel_train.cost_model.steps import timing_of
from accel_train.data.options import ONE_BATCH_SIZE
from accel_train.simulation import command, worker
from accel_train.simulation.flags import Options
from accel_train.simulation.report import Simulated, draw, scaling_of, table
from tests.planning.plans_page import installed, read, write

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "simulation.md"
PICTURE = ROOT / "docs" / "images" / "simulation.png"
COUNTS = Path(__file__).parent / "counts" / "mmdit_base_fsdp2.json"
RECIPE, PRESET, FILE = "recipes/mmdit.py", "base", "accelerate_configs/fsdp2.yaml"
DEVICE, LINK, GPUS_PER_MACHINE = "h100-sxm", "infiniband-ndr", 8
BATCH = 256
"""The preset's."""
FIELDS = (
    *("step", "strategy", "processes", "global_batch_size", "micro_batches", "rows", "precision", "values", "trained"),
    *("held", "peak", "collectives", "flops", "work"),
)
"""Of ``simulation.step.Counted``: all that the tables read."""


@dataclass(frozen=True)
class Curve:
    """One table: numbers of processes, with or without ``--micro_batches``."""

    name: str
    processes: tuple[int, ...]
    micro_batches: int | None

    def words(self) -> str:
        """The command that prints it."""
        numbers = ",".join(map(str, self.processes))
        weak = f" --micro_batches {self.micro_batches}" if self.micro_batches else ""
        return (
            f"accel-train simulate {RECIPE} {PRESET} --config_file {FILE} --num_processes {numbers}{weak} "
            f"--device {DEVICE} --link {LINK}"
        )

    def key(self, processes: int) -> str:
        return f"{self.name}, {processes} processes"


STRONG = Curve("global batch of the preset", (8, 16, 32, 64, 128, 256), None)
WEAK = Curve("one micro-batch each", (8, 64, 512, 1024), 1)
CURVES = (STRONG, WEAK)


def simulate(curve: Curve, processes: int) -> Simulated:
    """Simulate one number of processes. Takes half a minute of processor time."""
    request = Launch(str(ROOT / FILE), str(ROOT / RECIPE), (PRESET,), num_processes=processes, main_process_port=29500)
    options = Options(None, (processes,), None, curve.micro_batches, False, None)
    return command._simulate_one(request, options)  # pyright: ignore[reportPrivateUsage]


def kept(simulated: Simulated) -> dict[str, Any]:
    """The part of a simulation that the page reads."""
    found = {name: simulated.counted[name] for name in FIELDS}
    found["peak"] = {name: found["peak"][name] for name in ("by_category", "place", "total")}
    return found


def known(curve: Curve) -> list[Simulated]:
    """Return the steps of the counts with their times. Raises ``KeyError`` for a missing one."""
    _, counted = read(COUNTS)
    timing = timing_of(DEVICE, LINK, GPUS_PER_MACHINE)
    steps = [counted[curve.key(processes)] for processes in curve.processes]
    return [Simulated(step, (), notes(curve, step), timing.of(step)) for step in steps]


def notes(curve: Curve, step: Mapping[str, Any]) -> tuple[str, ...]:
    """What the command says of a global batch that is not the preset's."""
    processes, rows = step["processes"], step["rows"]
    config = SimpleNamespace(
        global_batch_size=BATCH, batch_schedule=ONE_BATCH_SIZE, micro_batch_size=rows, micro_batch_is_auto=False
    )
    return tuple(worker._global_batch(config, processes, curve.micro_batches)[1])  # pyright: ignore[reportPrivateUsage]


def block(curve: Curve) -> str:
    """Command and output."""
    found = known(curve)
    scaling = scaling_of(found, is_weak=curve.micro_batches is not None)
    return f"```text\n$ {curve.words()}\n{table(found, scaling)}\n```"


def marks(curve: Curve) -> tuple[str, str]:
    """The lines around a table of the page."""
    return f"<!-- {curve.name}: python -m tests.simulation.scaling_page -->\n", f"\n<!-- end: {curve.name} -->"


def page(text: str) -> str:
    """The page with the tables of the counts in place of those in it."""
    for curve in CURVES:
        first, last = marks(curve)
        before, _, rest = text.partition(first)
        _, found, after = rest.partition(last)
        assert found, f"docs/simulation.md has no place for the table: {curve.name}"
        text = before + first + block(curve) + last + after
    return text


def count_missing() -> None:
    """Simulate what the file of counts lacks."""
    versions, found = read(COUNTS)
    if versions != installed():
        found.clear()
    for curve in CURVES:
        for processes in curve.processes:
            key = curve.key(processes)
            if key not in found:
                print(f"simulate {key}", file=sys.stderr, flush=True)
                found[key] = kept(simulate(curve, processes))
                COUNTS.parent.mkdir(exist_ok=True)
                write(COUNTS, found)


def draw_picture(path: Path = PICTURE) -> None:
    """Draw what the second command draws with ``--picture``."""
    steps = known(WEAK)
    # The curve of memory is not among the counts.
    drawn = simulate(WEAK, WEAK.processes[-1])
    draw(replace(drawn, timed=steps[-1].timed), scaling_of(steps, is_weak=True), path)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="simulate what is missing, and draw the picture")
    arguments = parser.parse_args(argv)
    if arguments.simulate:
        count_missing()
        draw_picture()
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
