"""Where the time of a step of the demos goes, and how fast it could be if only its products remained.

    python -m benchmarks.demo_steps --output benchmarks/results/demo_steps_cpu.json

Each preset trains twice: once for the processor time of its steps, and once with the same steps profiled. Products are
what the profile calls compute: matrix products, convolutions and attention. The profiler lengthens each of them by
about a microsecond, so the bound is slightly too low.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.ablation import COMBINED, EQUAL_WORK
from benchmarks.method import ROOT, Row, on_cpu, parser_of, row, write_results

RECIPES: Mapping[str, Mapping[str, Any]] = {"mmdit": {}, "pde": COMBINED["pde"][EQUAL_WORK][1]}
"""Options by recipe that make the work of the optimised preset equal to that of the baseline."""
SHORT: Mapping[str, Mapping[str, Any]] = {"mmdit": {}, "pde": {"evaluation.trajectories": 1}}
"""Options by recipe that shorten the evaluation, which is not measured."""
FIRST, LAST = 10, 30
"""Steps that are measured: those after ``FIRST``, up to and including ``LAST``."""
PART = re.compile(r"^\| ([a-z][\w ]*) \| [\d.]+% \| ([\d.]+) \|", re.MULTILINE)


def trained(recipe: str, preset: str, options: Mapping[str, Any], output: Path) -> list[dict[str, Any]]:
    """Train in a subprocess that logs every step and return the lines of its metrics.jsonl."""
    given = {
        "log.log_every": 1,
        "checkpoints.save_every": 1000,
        "evaluation.samples": 2,
        "output_dir": output,
        **options,
    }
    flags = [word for name, value in given.items() for word in (f"--{name}", "null" if value is None else str(value))]
    command = [sys.executable, f"recipes/{recipe}.py", preset, *flags]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def measure(recipe: str, preset: str, options: Mapping[str, Any], first: int, last: int) -> dict[str, Any]:
    """Return the mean processor milliseconds of a step, and the milliseconds of each part of the profile."""
    options = {**options, "max_steps": last}
    with tempfile.TemporaryDirectory() as place:
        lines = trained(recipe, preset, options, Path(place) / "plain")
        # Processor seconds since the start of the run.
        used = {line["step"]: line["processor_seconds"] for line in lines if line["event"] == "train"}
        seconds = (used[last] - used[first]) / (last - first)
        output = Path(place) / "profiled"
        trained(recipe, preset, {**options, "profile.steps": f"{first}:{last}"}, output)
        profile = (output / "report" / "profile.md").read_text()
    parts = {name: float(milliseconds) for name, milliseconds in PART.findall(profile)}
    return {"milliseconds": 1e3 * seconds, "parts": parts}


def rows_of(recipe: str, found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return the rows of one recipe; ``found`` has its baseline first, then its optimised preset."""
    rows: list[Row] = []
    for name, measured in found.items():
        share = measured["parts"]["compute"] / measured["milliseconds"]
        rows.append(row("demo_steps", f"{name}: a step", measured["milliseconds"], "ms"))
        rows.append(row("demo_steps", f"{name}: share of matrix products, convolutions and attention", share))
    plain, fast = found.values()
    at_most = plain["milliseconds"] / fast["parts"]["compute"]
    rows.append(row("demo_steps", f"{recipe}: speed at equal work", plain["milliseconds"] / fast["milliseconds"]))
    rows.append(row("demo_steps", f"{recipe}: the same if these products alone were left: the bound", at_most))
    return rows


def main() -> int:
    """Measure the presets of each recipe and write the rows. Returns 1 if a target is missed, else 0."""
    options = parser_of(__doc__, rounds=1).parse_args()
    on_cpu()
    first, last = (1, 3) if options.tiny else (FIRST, LAST)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for recipe, equal in RECIPES.items():
        presets = {f"{recipe}_baseline": SHORT[recipe], f"{recipe}_optimized": {**SHORT[recipe], **equal}}
        found = {name: measure(recipe, name, changes, first, last) for name, changes in presets.items()}
        details[recipe] = found
        rows += rows_of(recipe, found)
    return 0 if write_results(options.output, "Where a step of the demos goes", rows, details) else 1


if __name__ == "__main__":
    sys.exit(main())
