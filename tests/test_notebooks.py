"""A recipe in a notebook: run after run in one process, several processes from one cell, and what is left behind.

Each script is a notebook without its page: a process of its own that calls the recipe's ``main``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_train.metrics.records import read_metrics
from tests import zygote
from tests.distributed.launching import ROOT, environment
from tests.waiting import free_port

CELLS = """
import fcntl, importlib.util, os, signal, sys
from pathlib import Path

from accelerate import notebook_launcher
from accelerate.state import PartialState

spec = importlib.util.spec_from_file_location("recipe", sys.argv[1])
recipe = sys.modules["recipe"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)
folder, port = Path(sys.argv[2]), sys.argv[3]
flags = "--log.log_every 1 --schedule.warmup_steps 1 --schedule.decay_steps 6".split()


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


before = handlers()


def arguments(name, steps, *more):
    return [*flags, "--output_dir", str(folder / name), "--max_steps", str(steps), *more]


def is_free(name):
    with (folder / name / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not PartialState._shared_state
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} & set(os.environ)


def in_call(number, act):
    '''Act in the given call of the model's metrics.'''
    calls, metrics_of = [], recipe.metrics_of

    def changed(model, batch):
        calls.append(batch)
        if len(calls) == number:
            recipe.metrics_of = metrics_of
            act()
        return metrics_of(model, batch)

    recipe.metrics_of = changed


def fail(error):
    raise error
"""

AFTER_AN_ERROR = """
points, recipe.points = recipe.points, lambda *_: fail(KeyboardInterrupt())
try:
    recipe.main(arguments("broken", 6))
except KeyboardInterrupt:
    recipe.points = points
assert recipe.points is points
assert handlers() == before
assert not PartialState._shared_state
for error in (RuntimeError("a cell of my own"), KeyboardInterrupt()):
    in_call(3, lambda: fail(error))
    try:
        recipe.main(arguments("broken", 6, "--checkpoints.save_every", "2", "--overwrite"))
    except type(error):
        is_free("broken")
        assert handlers() == before
    else:
        raise AssertionError("it was not raised")
assert recipe.main(arguments("broken", 6)) == 0
is_free("broken")
assert recipe.main(arguments("whole", 6)) == 0
"""

INTERRUPTED = """
in_call(3, lambda: os.kill(os.getpid(), signal.SIGINT))
assert recipe.main(arguments("stopped", 6)) == 75
is_free("stopped")
assert handlers() == before
assert recipe.main(arguments("stopped", 6)) == 0
assert recipe.main(arguments("whole", 6)) == 0
"""

SEVERAL_PROCESSES = """
assert recipe.main(arguments("one", 6)) == 0
notebook_launcher(recipe.main, args=(arguments("two", 4),), num_processes=2, use_port=port)
is_free("two")
notebook_launcher(recipe.main, args=(arguments("two", 6),), num_processes=2, use_port=port)
is_free("two")
assert recipe.main(arguments("two", 6)) == 0
"""

INTERRUPTED_PROCESSES = """
os.setpgrp()  # a kernel's own group, to which Jupyter sends the signal
in_call(3, lambda: os.environ.get("RANK") == "0" and os.killpg(0, signal.SIGINT))
try:
    notebook_launcher(recipe.main, args=(arguments("stopped", 6),), num_processes=2, use_port=port)
except BaseException as error:
    assert type(error).__name__ in ("SignalException", "KeyboardInterrupt"), repr(error)
else:
    raise AssertionError("it was not interrupted")
is_free("stopped")
assert recipe.main(arguments("stopped", 6)) == 0
assert recipe.main(arguments("whole", 6)) == 0
"""

REFUSED = """
for wrong, precision, option in [(["--attention", "fastest"], "no", "attention"), ([], "bf16", "precision")]:
    words = arguments("none", 6, *wrong)
    try:
        notebook_launcher(recipe.main, args=(words,), num_processes=2, use_port=port, mixed_precision=precision)
    except Exception as error:
        assert "UsageError" in str(error) and option in str(error), error
    else:
        raise AssertionError("it was not refused")
    assert not (folder / "none").exists()
assert recipe.main(arguments("one", 6)) == 0
"""


def run(cells: str, folder: Path) -> str:
    recipe = ROOT / "recipes" / "scaffold" / "recipe.py"
    command = [sys.executable, "-c", CELLS + cells, str(recipe), str(folder), str(free_port())]
    done = zygote.run(command, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def losses(folder: Path, name: str) -> list[float]:
    lines = [line for line in read_metrics(folder / name / "metrics.jsonl") if line["event"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 7))
    return [line["loss"] for line in lines]


@pytest.mark.slow  # test_second_run.py runs, refuses and resumes in one process, and several do below
@pytest.mark.parametrize("cells", [pytest.param(AFTER_AN_ERROR, id="error"), pytest.param(INTERRUPTED, id="interrupt")])
def test_a_run_that_ended_early_goes_on_in_the_same_process(cells: str, tmp_path: Path) -> None:
    """Its directory is free at once, its signal handlers are gone, and what follows is the unbroken run bit for bit."""
    run(cells, tmp_path)
    (broken,) = {path.name for path in tmp_path.iterdir()} - {"whole"}
    assert losses(tmp_path, broken) == losses(tmp_path, "whole")


@pytest.mark.distributed
def test_several_processes_train_from_one_cell_as_one_does(tmp_path: Path) -> None:
    """After a run in the notebook's own process, twice, and then one process continues where two have stopped."""
    said = run(SEVERAL_PROCESSES, tmp_path)
    assert said.count("ddp: 2 process(es) on cpu") == 2
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), rel=1e-6)


@pytest.mark.slow  # quick: several processes, and a refusal of several
@pytest.mark.distributed
def test_interrupted_processes_leave_a_directory_that_goes_on(tmp_path: Path) -> None:
    run(INTERRUPTED_PROCESSES, tmp_path)
    assert losses(tmp_path, "stopped") == pytest.approx(losses(tmp_path, "whole"), rel=1e-6)


@pytest.mark.distributed
def test_a_refused_run_of_several_processes_leaves_nothing_behind(tmp_path: Path) -> None:
    run(REFUSED, tmp_path)
