"""A stop or a death before the first step, as the other process sees it: two real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.launching import ROOT, environment
from tests.waiting import PATIENCE_SECONDS, free_port, until

RECIPE = """
import os, sys, time
from pathlib import Path
from accel_train import startup
from accel_train.runtime import early_stop
from accel_train.runtime.accelerator import build_accelerator
from accel_train.runtime.exiting import begin_run, one_run, run_main
from accel_train.runtime.main_alone import gather_on_hosts, connect_hosts

def main(argv):
    begin_run()
    here = Path(argv[0])
    accelerator = build_accelerator(precision="fp32", global_batch_size=2, micro_batch_size=1, max_grad_norm=1.0)
    connect_hosts(accelerator, 1800)
    startup._set_up_directory(here, frozenset(), accelerator)
    if accelerator.is_main_process:
        early_stop.look_for_stop_file(here)
    (here / f"ready{accelerator.process_index}").touch()
    if accelerator.process_index == int(argv[1]):
        time.sleep(3600)
    gather_on_hosts(0)

main = one_run(main)
if __name__ == "__main__":
    run_main(main)
"""


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[str]]]:
    """Two hosts of one process, of which one works alone while the other waits in a collective."""
    script = tmp_path / "recipe.py"
    script.write_text(RECIPE)
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    same |= {"ACCELERATE_USE_CPU": "true", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in ("0", "1"):
            process = subprocess.Popen(
                [sys.executable, str(script), str(tmp_path), str(request.param)],
                env=environment(**same, RANK=rank, GROUP_RANK=rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.append(process)

        def ready() -> bool:
            assert all(process.poll() is None for process in started), [p.communicate()[0] for p in started]
            return (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists()

        until(ready)
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.communicate()


def ends(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    return [process.returncode for process in processes], outputs


@pytest.mark.parametrize("pair", [0, 1], ids=["main_works", "other_works"], indirect=True)
@pytest.mark.parametrize("asked", ["STOP", "main", "other"])
def test_a_stop_before_the_first_step_ends_every_process_with_75(
    pair: list[subprocess.Popen[str]], asked: str, tmp_path: Path
) -> None:
    if asked == "STOP":
        (tmp_path / "STOP").touch()
    else:
        pair[asked == "other"].terminate()
    codes, outputs = ends(pair)
    assert codes == [75, 75], outputs
    assert sum("asked to stop (another process was)" in output for output in outputs) == 1
    assert not any("Traceback" in output for output in outputs), outputs


@pytest.mark.parametrize("pair", [1], indirect=True)
def test_a_process_that_dies_before_the_first_step_is_named_by_the_other(pair: list[subprocess.Popen[str]]) -> None:
    pair[1].kill()
    codes, outputs = ends(pair)
    assert codes == [1, -signal.SIGKILL], outputs
    assert "failed because another process has ended or its host is gone" in outputs[0]
