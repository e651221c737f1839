"""A save takes its share of the state from each rank's memory, and nothing worth naming beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launching import ROOT, Layout, command, fork

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "layout",
    [Layout("fsdp2", 2), *(pytest.param(Layout(f"zero{n}", 2), marks=pytest.mark.slow) for n in (2, 3))],
    ids=str,
)
def test_a_save_allocates_its_share_and_no_more(layout: Layout, tmp_path: Path) -> None:
    recipe = ROOT / "tests" / "distributed" / "memory_worker.py"
    done = fork(layout, command(layout, [str(tmp_path / "run")], tmp_path, recipe))
    assert done.returncode == 0, done.stdout[-4000:]
    ranks = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
    for rank in ranks:
        print(layout, {k: f"{v / 1e6:.1f} MB" for k, v in rank.items()})
        assert rank["share"] <= 1.05 * rank["total"] / len(ranks)
        assert rank["first"] <= 1.05 * rank["share"]
        assert rank["second"] <= 0.05 * rank["share"], "buffers are allocated once"
