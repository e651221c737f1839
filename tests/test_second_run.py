"""Runs of a recipe one after the other in one interpreter, as in a notebook or a sweep."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from accel_train import experiment, startup
from accel_train.config import UsageError
from tests import zygote
from tests.distributed.launching import ROOT, SMALL, environment

NOTEBOOK = """
import fcntl, importlib.util, json, logging, os, signal, sys
from pathlib import Path

import torch
from accelerate.state import PartialState

spec = importlib.util.spec_from_file_location("mmdit", sys.argv[1])
recipe = sys.modules["mmdit"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)
folder, flags = Path(sys.argv[2]), json.loads(sys.argv[3])
hooks, handlers = sys.excepthook, list(logging.getLogger().handlers)


def left_as_found(name):
    if name == "failed":
        assert not (folder / name).exists()
    else:
        with (folder / name / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert lock.read() == ""  # a name is that of a killed process
    assert logging.getLogger().handlers == handlers
    assert sys.excepthook is hooks
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not PartialState._shared_state
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def run(name, *more):
    try:
        return recipe.main(["demo", *flags, "--schedule.warmup_steps", "1", "--output_dir", str(folder / name), *more])
    finally:
        left_as_found(name)


assert run("first", "--max_steps", "2") == 0
assert run("first", "--max_steps", "3", "--schedule.decay_steps", "3", "--allow", "schedule.decay_steps") == 0
try:
    run("failed", "--max_steps", "3", "--precision", "bf16", "--init_from", str(folder / "first"), "--model.depth", "1")
except ValueError as error:
    assert "init_from" in str(error) or "weights" in str(error), error
else:
    raise AssertionError("it was refused")
assert run("second", "--max_steps", "2") == 0
"""


def test_a_second_run_in_one_process_has_the_numbers_of_the_first(tmp_path: Path) -> None:
    """The first stands for a process of its own. In between the process resumes, and is refused while it builds."""
    command = [sys.executable, "-c", NOTEBOOK, str(ROOT / "recipes" / "mmdit.py"), str(tmp_path), json.dumps(SMALL)]
    done = zygote.run(command, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stdout[-4000:]
    losses: dict[str, list[float]] = {}
    for name in ("first", "second"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if line["event"] == "train" and line["step"] <= 2]
    assert len(losses["first"]) == 2
    assert losses["first"] == losses["second"]
    logged = (tmp_path / "first" / "logs" / "rank_0.log").read_text()
    assert logged.count("finished: ") == 2, "a handler of the first run is still there"


def test_a_run_in_a_thread_is_refused(tmp_path: Path) -> None:
    """So two at once are, of which one at least is not in the main thread."""
    config = experiment.ExperimentConfig(output_dir=str(tmp_path / "run"), max_steps=1)
    refused: list[str] = []

    def run() -> None:
        with pytest.raises(UsageError, match="the main thread is required") as error:
            startup.start(config)
        refused.append(str(error.value))

    thread = threading.Thread(target=run, name="sweep")
    thread.start()
    thread.join()
    assert "in thread 'sweep'" in refused[0]
    assert not (tmp_path / "run").exists()
