"""docs/simulation.md has the times of the counts, and a simulation of 1,024 processes takes less than a minute."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planning.plans_page import installed, read
from tests.simulation.scaling_page import COUNTS, CURVES, PAGE, STRONG, WEAK, Curve, kept, known, page, simulate

OUTDATED = "run: python -m tests.simulation.scaling_page"
LIMIT_SECONDS = 60
"""Of processor time, for 1,024 processes."""


def test_the_page_has_the_tables_of_the_counts() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), OUTDATED


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_products_are_those_of_the_samples(curve: Curve) -> None:
    """The counts are of the same model: as many FLOPs for each sample, but for what a step has once."""
    steps = [simulated.counted for simulated in known(curve)]
    each = [step["flops"] / (step["global_batch_size"] / step["processes"]) for step in steps]
    assert each == pytest.approx([each[0]] * len(each), rel=0.02)


# Slow: half a minute of processor time.
@pytest.mark.slow
def test_a_simulation_of_the_page_counts_the_same_again() -> None:
    versions, found = read(COUNTS)
    if versions != installed():
        pytest.skip(f"{COUNTS.name} is of other versions; {OUTDATED} --simulate")
    # As JSON, which has no tuples.
    assert json.loads(json.dumps(kept(simulate(STRONG, 64)))) == found[STRONG.key(64)]


# Slow: half a minute of processor time.
@pytest.mark.slow
def test_1024_processes_take_less_than_a_minute_of_processor_time(tmp_path: Path) -> None:
    """Of this process's children, which other programs on the machine do not lengthen as they do its wall time."""
    words = WEAK.words().split()[1:]
    words[words.index("--num_processes") + 1] = "1024"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "accel_train.cli", *words],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        cwd=PAGE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{seconds:.1f} s of processor time")
    # The grandchild that simulates is counted as well, or this would be the start of Python alone.
    assert 5 < seconds < LIMIT_SECONDS
