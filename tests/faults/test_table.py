"""docs/reliability.md says what is tested, and the batch scripts that it names work."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accel_train.store import failpoints
from tests.conftest import COLLECTED
from tests.faults import table
from tests.faults.harness import EVERY, ROOT, TRAINER, Trainers, acknowledged, checkpoints, go_file, losses, same_run
from tests.waiting import PATIENCE_SECONDS, until

PAGE = table.PAGE.read_text()


def test_the_table_is_that_of_the_tests(pytestconfig: pytest.Config) -> None:
    """Of those that this process has collected, where that was the whole suite: importing them again takes long."""
    if pytestconfig.args_source is pytest.Config.ArgsSource.TESTPATHS:
        lines = table.in_order(table.lines_of(sorted(pytestconfig.stash[COLLECTED], key=lambda item: item.path)))
    else:
        done = subprocess.run(
            [sys.executable, "-c", "import json\nfrom tests.faults import table\nprint(json.dumps(table.collect()))"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        lines = [(row, injected, outcome, test) for row, injected, outcome, test in json.loads(done.stdout)]
    assert table.renewed(PAGE, lines) == PAGE, "not current: python -m tests.faults.table"


def test_every_row_is_in_the_table() -> None:
    there = set(re.findall(r"^\| ([DFIR]\d+) \|", PAGE, flags=re.MULTILINE))
    assert there == set(table.ROWS)


SCRIPTS = sorted((ROOT / "examples" / "cluster").glob("*.sbatch"))
OF_ONE_NODE = "slurm"
"""The quick one: others differ in the number of nodes."""


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=[] if path.stem == OF_ONE_NODE else pytest.mark.slow) for path in SCRIPTS],
)
@pytest.mark.parametrize(
    "told", [pytest.param(True, id="told_to_stop"), pytest.param(False, id="to_the_end", marks=pytest.mark.slow)]
)
def test_the_batch_script_stops_saves_and_requeues(
    trainers: Trainers, out: Path, whole: Path, told: bool, script: Path
) -> None:
    """With stand-ins for SLURM's commands and the recipe; the trap, the waits and the code are theirs."""
    bin_folder = out.with_name("bin")
    trainer = f"{shlex.quote(sys.executable)} {shlex.quote(str(TRAINER))}"
    pause = "--pause_at 7" if told else ""
    bin_folder.mkdir()
    for name, text in {
        "srun": 'exec "$@"',
        "scontrol": 'case $1 in show) echo first;; *) echo "$@" >> "$CALLS";; esac',
        "accel-train": f'exec {trainer} --output_dir "$RUN" {" ".join(EVERY)} {pause}',
    }.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_folder / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "42", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "first", "CALLS": f"{out}.calls"}
    variables |= {"RUN": str(out), "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    variables |= {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables[failpoints.GO_VARIABLE] = str(go_file(out))
    job = subprocess.Popen(
        ["bash", str(script)],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def saved() -> bool:
        assert job.poll() is None, job.communicate()[0]
        return acknowledged(out) == [5]

    if told:
        until(saved)
        job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=PATIENCE_SECONDS)[0]
    if told:
        assert job.returncode == 75, output
        assert Path(f"{out}.calls").read_text() == "requeue 42\n"
        assert checkpoints(out)[-1] == max(losses(out)) < 20
        assert not (out / "STOP").exists()
        assert trainers.run(out, *EVERY).wait() == [0]
    else:
        assert job.returncode == 0, output
        assert not Path(f"{out}.calls").exists()
    same_run(out, whole)
