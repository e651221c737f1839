"""torchrun under `accel-train launch`: silent about an end that was explained, and only about that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accel_train.launch_files.parents import EXIT_CODE_VARIABLE
from tests.waiting import PATIENCE_SECONDS, free_port

ROOT = Path(__file__).parents[2]
WORKER = f"""
import os, signal, sys, time
rank = int(os.environ["RANK"])
number = sys.argv[1 + rank]
def report(code):
    with open(os.environ["{EXIT_CODE_VARIABLE}"], "a") as file:
        print(rank, code, file=file)
def stopped(*_):
    report(75)
    os._exit(75)
report(1)  # as a recipe does when it starts
signal.signal(signal.SIGTERM, stopped)
if number == "wait":
    time.sleep(600)
elif number == "terminate":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
elif int(number) < 0:
    os.kill(os.getpid(), -int(number))
elif number not in ("1", "3"):
    report(number)
    print("explained", file=sys.stderr, flush=True)
sys.exit(int(number))
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "is_reported"),
    [
        (("2", "wait"), False),
        pytest.param(("75", "75"), False, marks=pytest.mark.slow),  # a usage error ends in the same way
        (("terminate", "wait"), False),
        (("1", "wait"), True),
        (("wait", "-9"), True),
        pytest.param(("3", "wait"), True, marks=pytest.mark.slow),  # as a crash
    ],
    ids=["usage error", "stop of all", "signal to torchrun", "crash", "killed", "exit code of the recipe"],
)
def test_torchrun_reports_what_no_process_has_explained(
    ranks: tuple[str, str], is_reported: bool, tmp_path: Path
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    command = [sys.executable, "-m", "accel_train.cli.torchrun", "--nproc_per_node", "2"]
    finished = subprocess.run(
        [*command, "--master_port", str(free_port()), str(worker), *ranks],
        env=os.environ | {"PYTHONPATH": str(ROOT), EXIT_CODE_VARIABLE: str(tmp_path / "codes")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert finished.returncode == 1, finished.stderr
    assert ("Root Cause (first observed failure)" in finished.stderr) == is_reported, finished.stderr
    assert ("Traceback" in finished.stderr) == is_reported, finished.stderr
    if ranks == ("2", "wait"):
        assert finished.stderr.splitlines()[-1] == "explained"
    if ranks[1] == "-9":
        assert signal.SIGKILL.name in finished.stderr
