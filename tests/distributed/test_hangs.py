"""A step that does not end, on real processes: the one that the other waits for is named, with its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed.launching import ROOT, Layout, command, fork

pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests" / "distributed" / "hang_worker.py"


def test_the_process_that_is_waited_for_is_named_with_its_line(tmp_path: Path) -> None:
    layout = Layout("ddp", 2)
    run = tmp_path / "run"
    words = ["--output_dir", str(run), "--health.hang_seconds", "3", "--max_steps", "4"]
    done = fork(layout, command(layout, words, tmp_path, WORKER), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout[-4000:]
    said = re.search(
        r"no step has ended for 3 s\n.*process 1 is at \S+hang_worker\.py:\d+ in wait_until_named \(step 3\)\n"
        r".*process 0 waits in all_reduce, at \S+step_metrics\.py:\d+ in \w+ \(step 3\)\n.*rank_N\.log.*\n"
        r".*process 0: waits in gloo:all_reduce number \d+ of default_pg \(Double \[1\]\)\n"
        r".*process 1: none unfinished; the last was gloo:.*\n.*: \S+/logs/flight_recorder_N\.json",
        done.stdout,
    )
    assert said, done.stdout[-4000:]
    stacks = (run / "logs" / "rank_1.log").read_text()
    assert "thread MainThread" in stacks
    assert "in stuck_in_the_third" in stacks
    assert "in wait_until_named" in stacks
    assert "all_reduce" in (run / "logs" / "rank_0.log").read_text()
    for process in range(2):
        trace = json.loads((run / "logs" / f"flight_recorder_{process}.json").read_text())
        assert trace["entries"][0]["profiling_name"].startswith("gloo:")


def test_groups_of_a_mesh_wait_as_long_as_the_option_says(tmp_path: Path) -> None:
    """torch gives them its own default, ten minutes with NCCL."""
    layout = Layout("hsdp", 4)
    words = command(layout, ["77"], tmp_path, WORKER.with_stem("timeout_worker"))
    done = fork(layout, words, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout[-4000:]
    waits = dict(re.findall(r"^(default_pg|mesh_\w+): (.+) s$", done.stdout, re.MULTILINE))
    assert {"default_pg", "mesh_dp_replicate", "mesh_dp_shard"} <= waits.keys()
    assert set(waits.values()) == {"77"}
