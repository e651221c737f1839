"""A run that is stopped at any instant between launch and exit leaves all its work and ends with 75.

Both demos, shortened, through our launcher on one process and on two: a whole run is timed first, then stopped at ten
instants spread over that time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_train.store import commit, manifest
from tests.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
STEPS = 40
INSTANTS = 10
ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, None)
"""In turn; None is the file STOP."""
FLAGS = {
    "mmdit": ("demo", "--global_batch_size", "16", "--micro_batch_size", "8", "--evaluation.samples", "32"),
    "pde": ("pde_demo", "--objective.autoencode_steps", "10"),
    "causal_lm": ("causal_lm_smoke",),
}


def command(recipe: str, processes: int, out: Path, folder: Path) -> list[str]:
    file = folder / f"{processes}.yaml"
    kind = "'NO'" if processes == 1 else "MULTI_GPU"
    file.write_text(f"distributed_type: {kind}\nnum_machines: 1\nnum_processes: {processes}\n")
    verb = "launch" if processes == 1 else "rehearse"
    head = [sys.executable, "-m", "accel_train.cli", verb, "--config_file", str(file)]
    often = ["--log.log_every", "1", "--evaluation.every", "10", "--checkpoints.save_every", "15"]
    length = ["--max_steps", str(STEPS), "--schedule.warmup_steps", "2", "--output_dir", str(out)]
    return [*head, str(ROOT / "recipes" / f"{recipe}.py"), *FLAGS[recipe], *often, *length]


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def trained(out: Path) -> int:
    """The last step of which a line was written."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return max((record["step"] for record in records if record["event"] == "train"), default=0)


@pytest.mark.fault(
    "R4", injected="a stop at 60 instants of three demos, 1 and 2 processes", outcome="all work is saved; exit code 75"
)
@pytest.mark.parametrize("first", [0, 1])  # every second instant, so that one test takes minutes
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("recipe", ["mmdit", "pde", "causal_lm"])
def test_a_stop_at_any_instant(recipe: str, processes: int, first: int, tmp_path: Path) -> None:
    began = time.monotonic()
    whole = start(command(recipe, processes, tmp_path / "whole", tmp_path), tmp_path / "whole.log")
    assert whole.wait(PATIENCE_SECONDS) == 0, (tmp_path / "whole.log").read_text()[-3000:]
    length = time.monotonic() - began
    for number in range(first, INSTANTS, 2):
        out, log = tmp_path / f"run{number}", tmp_path / f"run{number}.log"
        run = start(command(recipe, processes, out, tmp_path), log)
        time.sleep(length * (number + 0.5) / INSTANTS)
        asked, before = ASKING[number // 2 % len(ASKING)], trained(out)
        if asked is None and out.is_dir():
            (out / "STOP").touch()
        else:
            run.send_signal(asked or signal.SIGTERM)
        told = time.monotonic()
        code = run.wait(PATIENCE_SECONDS)
        said, saved = log.read_text(errors="replace"), manifest.committed(out / "checkpoints")
        newest = commit.verify(saved[-1][1]).step if saved else 0
        took = time.monotonic() - told
        name = asked.name if asked else "STOP"
        print(
            f"{recipe} {processes}: {name} after step {before}: code {code}, saved {newest}, {took:.1f} s", flush=True
        )
        assert code == 75 or (code == 0 and newest == STEPS), said[-3000:]
        assert newest == trained(out) >= before, said[-3000:]
