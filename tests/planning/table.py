"""Table of plans in docs/planning.md for the preset ``base``: ``python -m tests.planning.table`` writes it.

    python -m tests.planning.table                # what the file has, with what is missing in it
    python -m tests.planning.table --gpus 1 8     # with these numbers of GPUs: half an hour for each
    python -m tests.planning.table --again        # everything anew

A simulation serves every limit and every device: what it counted lies in base.json beside this file, and the table is
searched among that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accel_train.config import UsageError
from accel_train.planning.candidates import LAUNCH_FILES, MODES, Candidate, Space, divisors
from accel_train.planning.command import budget_of
from accel_train.planning.devices import rated
from accel_train.planning.flags import Options
from accel_train.planning.probe import Probe, probe_of
from accel_train.planning.search import best, search, spare_recomputation
from accel_train.planning.simulator import Simulator

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planning.md"
COUNTS = Path(__file__).with_name("base.json")
HEADING = "## Plans for `base`"
RECIPE, PRESET = "mmdit", "base"
GLOBAL_BATCH, PRECISION = 256, "bf16"
DEVICES = dict.fromkeys((6, 8, 12, 16, 24), "rtx-4090")
DEVICES |= {32: "rtx-5090", 48: "l40s", 80: "h100-sxm", 141: "h200"}
"""By GiB of memory. Cards of less than 24 are not in the table of devices, and are timed as that one."""
FIELDS = (
    *("strategy", "processes", "micro_batches", "precision", "step", "values", "trained", "blocks", "held", "host"),
    *("inputs", "inputs_in_blocks", "peak", "peak_in_blocks", "work"),
)
"""Of ``simulation.step.Counted``: all that a plan reads."""


class Counts:
    """What simulations have counted, by number of GPUs and candidate."""

    def __init__(self, simulated: Mapping[str, Any], *, simulates: bool) -> None:
        self.found: dict[str, Any] = dict(simulated)
        self._simulates = simulates
        self._simulators: dict[int, Simulator] = {}

    def of(self, gpus: int, candidate: Candidate) -> Mapping[str, Any]:
        """Return it from the file, or simulate it. Raises ``KeyError`` if that is not wanted."""
        key = f"{gpus} GPU(s), {candidate}"
        if key not in self.found:
            if not self._simulates:
                raise KeyError(f"{key}: run python -m tests.planning.table")
            self.found[key] = simulated(self._simulator(gpus), candidate)
            print(f"simulated {key}", file=sys.stderr, flush=True)
        return self.found[key]

    def _simulator(self, gpus: int) -> Simulator:
        if gpus not in self._simulators:
            self._simulators[gpus] = Simulator(RECIPE, [PRESET], gpus)
            self._simulators[gpus].read_config()
        return self._simulators[gpus]


def simulated(simulator: Simulator, candidate: Candidate) -> dict[str, Any]:
    """The part of a simulation that a plan reads. Events have no meaning outside of it."""
    counted = simulator.count(candidate)
    kept = {name: counted[name] for name in FIELDS}
    kept["peak"] = {name: kept["peak"][name] for name in ("by_category", "place")}
    kept["peak"]["by_category"] = {name: size for name, size in kept["peak"]["by_category"].items() if size}
    return kept


def counted_gpus(counted: Mapping[str, Any]) -> list[int]:
    """Return the numbers of GPUs of which there are simulations."""
    return sorted({int(key.split()[0]) for key in counted})


def rows(counts: Counts, gpus: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the table."""
    for number in gpus:
        for gib in DEVICES:
            probe, needed = chosen(counts, number, gib)
            if probe is None:
                yield f"| {number} | {gib} | nothing fits | | | | |"
                continue
            one = probe.candidate
            mode = one.mode
            if one.blocks is not None:
                mode += f", blocks {one.blocks}"
            yield (
                f"| {number} | {gib} | `{LAUNCH_FILES[one.strategy]}` | {one.micro_batch_size} | {mode} "
                f"| {needed:.1f} | {probe.time.total:.2f} ({DEVICES[gib]}) |"
            )


def chosen(counts: Counts, gpus: int, gib: int) -> tuple[Probe | None, float]:
    """The plan of ``accel-train plan`` without DeepSpeed, with the GiB that it needs."""
    budget = budget_of(Options(gpus, float(gib)))
    rates = rated(DEVICES[gib], PRECISION, gpus).rates
    share = GLOBAL_BATCH // gpus
    strategies = ("fsdp2", "ddp") if gpus > 1 else ("single",)
    given = Space(gpus, GLOBAL_BATCH, strategies, MODES, divisors(share), frozenset())

    def measure(candidate: Candidate) -> Probe:
        counted = counts.of(gpus, candidate)
        return probe_of(candidate, given.micro_batches(candidate), counted, rates)

    chains = search(given, "speed", budget, measure)
    found = best(chains, "speed", budget)
    if found is None:
        return None, 0.0
    _, found = spare_recomputation(given, "speed", budget, chains, found, measure)
    return found, found.needed_gib(budget)


def section(counts: Counts, versions: Mapping[str, str]) -> str:
    """Heading, table and notes."""
    lines = [
        HEADING,
        "",
        f"What `accel-train plan recipes/mmdit.py {PRESET} --goal speed` finds where DeepSpeed is not installed: "
        f"{GLOBAL_BATCH} samples a step, {PRECISION}.",
        "Memory is modelled as above, and seconds by the data sheet of the device beside them. Written by",
        f"`python -m tests.planning.table` with torch {versions.get('torch', '')}.",
        "With DeepSpeed, its launch files with an [offload](#offload) fit smaller GPUs.",
        "",
        "| GPUs | GiB each | launch file | micro-batch | checkpointing | GiB needed | seconds |",
        "|---|---|---|---|---|---|---|",
        *rows(counts, counted_gpus(counts.found)),
    ]
    return "\n".join(lines) + "\n"


def page(text: str, counts: Counts, versions: Mapping[str, str]) -> str:
    """The page with the section in its place."""
    before, _, after = text.partition(HEADING)
    _, more, rest = after.partition("\n## ")
    return f"{before.rstrip()}\n\n{section(counts, versions)}{more}{rest}"


def read() -> tuple[dict[str, str], dict[str, Any]]:
    """Versions and counts of the file, empty without one."""
    if not COUNTS.exists():
        return {}, {}
    tree = json.loads(COUNTS.read_text())
    return tree["versions"], tree["counted"]


def write(counts: Counts, versions: Mapping[str, str]) -> None:
    """A line for each simulation."""
    lines = [f"{json.dumps(key)}: {json.dumps(counts.found[key])}" for key in sorted(counts.found)]
    head = f'"versions": {json.dumps(versions)},\n"counted": {{\n'
    COUNTS.write_text("{" + head + ",\n".join(lines) + "\n}}\n")


def installed() -> dict[str, str]:
    """Versions of the packages whose code is simulated."""
    return {name: version(name).partition("+")[0] for name in ("torch",)}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="simulate everything anew")
    versions, known = read()
    parser.add_argument("--gpus", type=int, nargs="+", default=counted_gpus(known))
    arguments = parser.parse_args(argv)
    if arguments.again or versions != installed():
        known = {}
    counts = Counts(known, simulates=True)
    for line in rows(counts, arguments.gpus):
        print(line, flush=True)
        write(counts, installed())
    PAGE.write_text(page(PAGE.read_text(), counts, installed()))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"error: {error}")
