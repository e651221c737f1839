"""What asks a process to save and stop: real signals to this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

from accel_train import loop
from accel_train.runtime import early_stop, signals
from accel_train.runtime.early_stop import STOP_FILE, STOPPING
from accel_train.runtime.exiting import EXIT_ASKED, EXIT_PREEMPTED
from accel_train.runtime.hosts import lost
from accel_train.runtime.signals import StopRequests
from tests.waiting import PATIENCE_SECONDS, until


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """These tests may themselves run under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING, ids=lambda s: s.name)
def test_a_signal_asks_to_save_and_the_handlers_are_given_back(tmp_path: Path, number: signal.Signals) -> None:
    requests = StopRequests(tmp_path, main=True)
    assert not requests.requested
    os.kill(os.getpid(), number)
    assert requests.requested
    assert requests.reason == number.name
    requests.close()
    assert signal.getsignal(number) == signal.SIG_DFL


ORPHAN = """
import os, sys, time
from pathlib import Path
from accel_train.runtime import signals

signals.SAME_REQUEST_SECONDS = 0.0
directory = Path(sys.argv[1])
requests = signals.StopRequests(directory, main=False)
(directory / "pid").write_text(str(os.getpid()))
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(0.2)  # the signal follows the new parent
(directory / "orphan").write_text(str(requests.reason))
time.sleep(1800)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[2:]], start_new_session=True)"


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_death_of_the_launcher_is_a_request_and_never_the_second(tmp_path: Path, interrupted: bool) -> None:
    """Ctrl-C reaches launcher and process; a busy machine lets the launcher die long after that."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, "accelerate", ORPHAN, str(tmp_path)])
    pid = int(appeared(tmp_path / "pid"))
    try:
        if interrupted:
            os.kill(pid, signal.SIGINT)
            time.sleep(0.1)
        launcher.kill()
        launcher.wait()
        assert appeared(tmp_path / "orphan") == ("SIGINT" if interrupted else "SIGTERM")
        os.kill(pid, signal.SIGTERM)  # this one is the second
        gone = psutil.Process(pid)
        psutil.wait_procs([gone], timeout=PATIENCE_SECONDS)
        assert not gone.is_running() or gone.status() == psutil.STATUS_ZOMBIE
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_script_that_starts_it_is_no_launcher_whatever_its_path_is(tmp_path: Path) -> None:
    """It may start a run in the background and end: not the end of the run."""
    script = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "/home/me/accel_train/accelerate_all.py", ORPHAN, str(tmp_path)]
    )
    pid = int(appeared(tmp_path / "pid"))
    try:
        script.kill()
        script.wait()
        assert appeared(tmp_path / "orphan") == "None"
    finally:
        os.kill(pid, signal.SIGKILL)


def appeared(file: Path) -> str:
    """What a process has written, once it has."""
    return until(lambda: file.exists() and file.read_text(), lambda: str(file))


def test_under_nohup_the_end_of_the_terminal_is_no_request(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    requests = StopRequests(tmp_path, main=True)
    os.kill(os.getpid(), signal.SIGHUP)
    assert not requests.requested
    requests.close()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(
    ("number", "reported"), [(signal.SIGTERM, EXIT_PREEMPTED), (signal.SIGINT, EXIT_ASKED), (0, EXIT_ASKED)]
)
def test_what_only_torchrun_may_have_sent_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch, number: int, reported: int
) -> None:
    """torchrun ends the others with SIGTERM when one process fails, and that is no request."""

    def leaves(code: int) -> NoReturn:
        raise SystemExit(code)

    reports: list[int] = []
    monkeypatch.setattr(early_stop, "report_exit_code", reports.append)
    monkeypatch.setattr(early_stop.os, "_exit", leaves)
    with pytest.raises(SystemExit) as ended:
        early_stop.leave(number)
    assert (ended.value.code, reports) == (EXIT_PREEMPTED, [reported])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_a_command_that_is_stopped_ends_as_a_shell_expects(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, early_stop.stoppable("stopped: nothing was written"):
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == "stopped: nothing was written\n"


def test_a_stop_file_goes_with_the_stop_that_it_asked_for(tmp_path: Path) -> None:
    """One that stayed would stop the next start, and one that nobody has seen is meant for that start."""
    file = tmp_path / STOP_FILE
    unseen = StopRequests(tmp_path, main=True)
    file.touch()
    unseen.close()
    assert file.exists()
    requests = StopRequests(tmp_path, main=True)
    assert requests.requested
    assert requests.reason == f"the file {file}"
    requests.close()
    assert not file.exists()


def test_ranks_agree_on_the_largest_or_the_smallest_number_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors: list[torch.Tensor] = []

    def all_reduce(vector: torch.Tensor, op: Any, **_: Any) -> Any:
        """Both ranks are in this process, one after the other."""
        assert op == dist.ReduceOp.MAX
        vectors.append(vector)
        if len(vectors) == 2:
            largest = torch.maximum(*vectors)
            for each in vectors:
                each.copy_(largest)
            vectors.clear()
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(signals, "host_group", lambda _: None)
    accelerator: Any = SimpleNamespace(num_processes=2)
    ranks = [signals.Agreement(accelerator, {"stop": max, "room": min}, 1.0) for _ in range(2)]
    steps = [({"stop": 0, "room": 7}, {"stop": 0, "room": 5}), ({"stop": 1, "room": -2}, {"stop": 0, "room": 9})]
    found = [[rank.exchange(values) for rank, values in zip(ranks, step, strict=True)] for step in (*steps, steps[0])]
    assert found == [[None] * 2, [{"stop": 0, "room": 5}] * 2, [{"stop": 1, "room": -2}] * 2]


@pytest.mark.parametrize(("call", "names_it"), [("evaluate", True), ("save_if_due", True), ("_save", False)])
def test_a_wait_within_a_call_of_the_loop_names_the_call(
    call: str, names_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may never have made it, as under `if accelerator.is_main_process`."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    named: dict[str, Any] = {}
    exec(compile(f"def {call}(): raise RuntimeError('Timed out waiting 20 ms')", loop.__file__, "exec"), named)
    with pytest.raises(RuntimeError) as raised:
        named[call]()
    lost.explain(raised.value)
    (note,) = raised.value.__notes__
    assert "waited in vain for another process" in note
    assert "the network between their hosts may be cut" in note
    assert (f"This process waits in training.{call}, which every process must call" in note) == names_it


def loss(source: str) -> None:
    """Fail as the loss of a user does, with the text of a collective. Code without its source stands for C++."""
    if source:
        raise RuntimeError("the teacher is gone: Connection reset by peer")
    exec("raise RuntimeError('the teacher is gone: Connection reset by peer')")


@pytest.mark.parametrize(("processes", "source"), [("1", ""), ("2", "Python")])
def test_an_error_of_a_loss_is_not_taken_for_that_of_a_collective(
    processes: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(RuntimeError) as raised:
        loss(source)
    lost.explain(raised.value)
    assert not hasattr(raised.value, "__notes__")
