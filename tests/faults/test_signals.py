"""Requests to stop, processes that die or stall, errors in the user's code: one save, the right code, no orphan."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from accel_train.runtime.signals import SAME_REQUEST_SECONDS
from accel_train.store import commit
from tests.faults.harness import (
    EVERY,
    Trainers,
    acknowledged,
    checkpoints,
    children,
    debris,
    go_file,
    launch,
    losses,
    same_run,
    writer_patch,
)
from tests.waiting import PATIENCE_SECONDS, free_port, until

PAUSE = (*EVERY, "--pause_at", "7")
"""Step 5 is saved, and in step 7 the first rank waits to be asked to stop."""
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
Launched = subprocess.Popen[str]


def torchrun(*options: str) -> tuple[str, ...]:
    """Two processes under PyTorch's own launcher."""
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
    return (*command, *(options or ("--master_port", str(free_port()))))


def ours(processes: int, folder: Path) -> tuple[str, ...]:
    """``accel-train rehearse`` of a launch file: our launcher, on CPU processes."""
    file = folder / "machine.yaml"
    kind = "MULTI_GPU" if processes > 1 else "'NO'"
    file.write_text(f"distributed_type: {kind}\nnum_machines: 1\nnum_processes: {processes}\n")
    return (sys.executable, "-m", "accel_train.cli", "rehearse", "--config_file", str(file))


@pytest.fixture
def launched() -> Iterator[list[Launched]]:
    """Launchers to be killed with all they started, whatever happens."""
    started: list[Launched] = []
    yield started
    for process in started:
        for left in children(process.pid, ""):  # torchrun gives each worker a session of its own
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def begin(started: list[Launched], out: Path, command: tuple[str, ...]) -> Launched:
    """Launch it and wait until it pauses in step 7, the checkpoint of step 5 behind it."""
    process = launch(out, *PAUSE, command=command)
    started.append(process)

    def saved() -> bool:
        assert process.poll() is None, process.communicate()[0][-3000:]
        return acknowledged(out) == [5] and max(losses(out)) == 7

    until(saved)
    return process


def workers(process: Launched) -> list[psutil.Process]:
    """The training processes and their writers."""
    found = children(process.pid, "trainer.py") + children(process.pid, "checkpoints.writer")
    launchers = {"torch.distributed.run", "accel_train.cli.torchrun", "accel_train.cli"}
    return [p for p in found if launchers.isdisjoint(p.cmdline())]


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end, long before a collective gives up."""
    living = psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)[1]
    return all(p.status() == psutil.STATUS_ZOMBIE for p in living)


def resumes(trainers: Trainers, out: Path, whole: Path, ranks: int) -> None:
    """The next start continues and ends as the run that nothing happened to."""
    again = trainers.run(out, *EVERY, ranks=ranks)
    assert set(again.wait()) == {0}, again.output()
    assert "resuming" in again.output()
    assert debris(out) == []
    same_run(out, whole)


# ------------------------------------------------------------------------------------------------- processes that die
@pytest.mark.fault(
    "F9", injected="SIGKILL of rank 1 in a step", outcome="rank 0 fails at once with a non-zero exit code; resumes"
)
def test_a_rank_dies(trainers: Trainers, out: Path, whole_of_two: Path) -> None:
    run = trainers.start(out, *PAUSE, "--pause_rank", "1", ranks=2)
    run.until(out / "acknowledged.txt", "5")
    run.kill(rank=1)
    assert run.wait() == [1, -9]
    assert "another process has ended" in run.output()
    resumes(trainers, out, whole_of_two, 2)


@pytest.mark.slow
@pytest.mark.fault("F9", injected="SIGKILL of rank 1 under torchrun --max-restarts", outcome="all restart and resume")
def test_an_elastic_restart_resumes(
    out: Path, whole_of_two: Path, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a store that is shared between attempts torch 2.13 meets its own stale addresses (pytorch#135712).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    meeting = ("--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0")
    process = begin(launched, out, torchrun(*meeting, "--max_restarts", "1"))
    ranks = [p for p in workers(process) if "trainer.py" in " ".join(p.cmdline())]
    assert len(ranks) == 2
    next(p for p in ranks if p.environ()["RANK"] == "1").kill()
    go_file(out).touch()  # for the second start, which passes step 7 again: the first must not go on before the kill
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert process.returncode == 0, output[-3000:]
    assert "at step 5" in output
    same_run(out, whole_of_two)


@pytest.mark.slow
@pytest.mark.fault(
    "F9", injected="SIGKILL of one worker of two hosts under torchrun --max-restarts", outcome="all restart and resume"
)
@pytest.mark.parametrize("own_store", ["0", "1"], ids=["store_of_torchrun", "store_of_process_0"])
def test_restarts_that_the_hosts_count_differently_resume(
    out: Path, whole_of_two: Path, launched: list[Launched], own_store: str
) -> None:
    """The first host sees another one come back, which is no restart of its own: TORCHELASTIC_RESTART_COUNT differs."""
    meeting = ("--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_id", "two")
    command = torchrun(*meeting, "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--max_restarts", "1")
    for _ in "ab":
        agent = launch(out, *PAUSE, command=command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=own_store)
        launched.append(agent)
    until(lambda: acknowledged(out) == [5] and max(losses(out)) == 7)

    def trainers() -> list[psutil.Process]:
        return [p for agent in launched for p in workers(agent) if "trainer.py" in " ".join(p.cmdline())]

    first = trainers()
    next(p for p in first if p.environ()["RANK"] == "1").kill()

    def counts() -> dict[str, str]:
        variables = [p.environ() for p in trainers() if p not in first]
        return {v["RANK"]: v["TORCHELASTIC_RESTART_COUNT"] for v in variables}

    until(lambda: counts() == {"0": "0", "1": "1"}, lambda: str(counts()))
    go_file(out).touch()  # for the second start, which passes step 7 again
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in launched]
    assert [process.returncode for process in launched] == [0, 0], "\n".join(o[-3000:] for o in outputs)
    assert "at step 5" in "".join(outputs)
    same_run(out, whole_of_two)


@pytest.mark.slow  # the same
@pytest.mark.fault("F10", injected="SIGKILL of the torchrun agent", outcome="workers save and exit at once; resumes")
def test_the_agent_dies(trainers: Trainers, out: Path, whole_of_two: Path, launched: list[Launched]) -> None:
    process = begin(launched, out, torchrun())
    left = workers(process)
    assert len(left) == 4
    process.kill()
    assert gone(left)
    assert checkpoints(out)[-1] == max(losses(out)) < 10, "they were to save where they were"
    resumes(trainers, out, whole_of_two, 2)


# ------------------------------------------------------------------------------------------------- requests to stop
@pytest.mark.slow  # a worker notices the death of any launcher in tests/runtime
@pytest.mark.fault("F10", injected="SIGKILL of accel-train's launcher", outcome="all save and exit; resumes")
def test_our_launcher_dies(
    trainers: Trainers, out: Path, whole_of_two: Path, launched: list[Launched], tmp_path: Path
) -> None:
    process = begin(launched, out, ours(2, tmp_path))
    left = workers(process)
    process.kill()
    assert gone(left)
    assert checkpoints(out)[-1] == max(losses(out)) < 10
    resumes(trainers, out, whole_of_two, 2)


@pytest.mark.fault(
    "F11", injected="SIGTERM or SIGUSR1 to accel-train's launcher, 2 processes", outcome="one save; exit code 75"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_to_our_launcher(
    trainers: Trainers, out: Path, whole_of_two: Path, launched: list[Launched], tmp_path: Path, number: int
) -> None:
    process = begin(launched, out, ours(2, tmp_path))
    left = workers(process)
    process.send_signal(number)
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert process.returncode == 75, output[-3000:]
    assert gone(left)
    newest = checkpoints(out)[-1]
    assert acknowledged(out)[-1] == newest == max(losses(out))
    resumes(trainers, out, whole_of_two, 2)


@pytest.mark.slow  # so are readers of data stopped every day (tests/distributed/test_preemption.py)
@pytest.mark.fault(
    "F11", injected="SIGTERM to torchrun, 2 processes", outcome="one save; torchrun exits with 1, our message says 75"
)
def test_sigterm_to_torchrun(trainers: Trainers, out: Path, whole_of_two: Path, launched: list[Launched]) -> None:
    process = begin(launched, out, torchrun())
    left = workers(process)
    process.terminate()
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert process.returncode not in (0, 75)
    assert output.count("start the same command again to resume (exit code 75)") == 1
    assert output.count("(what follows is a report of torchrun: it can be ignored, this run has stopped as it was") == 1
    assert gone(left)
    assert acknowledged(out)[-1] == checkpoints(out)[-1] == max(losses(out))
    resumes(trainers, out, whole_of_two, 2)


@pytest.mark.slow  # a launcher that dies and tells nothing is quick in tests/runtime
@pytest.mark.fault("F12", injected="SIGTERM to accelerate launch, 1 process", outcome="saved; no orphan process")
def test_sigterm_to_accelerate_launch(trainers: Trainers, out: Path, whole: Path, launched: list[Launched]) -> None:
    process = begin(launched, out, ACCELERATE)
    left = workers(process)
    assert len(left) == 2
    process.terminate()
    assert gone(left)
    assert acknowledged(out)[-1] == checkpoints(out)[-1] == max(losses(out)) < 10
    resumes(trainers, out, whole, 1)


@pytest.mark.slow  # test_launch.py signals a launcher of one, and the next one below a launcher of two
@pytest.mark.fault(
    "F12", injected="SIGTERM to accel-train's launcher, 1 process", outcome="forwarded; exit code 75; no orphan process"
)
def test_sigterm_to_our_launcher_of_one(
    trainers: Trainers, out: Path, whole: Path, launched: list[Launched], tmp_path: Path
) -> None:
    process = begin(launched, out, ours(1, tmp_path))
    left = workers(process)
    process.terminate()
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert process.returncode == 75, output[-3000:]
    assert gone(left)
    resumes(trainers, out, whole, 1)


@pytest.mark.fault("F13", injected="SIGTERM to rank 1 alone", outcome="both save the same step once and exit 75")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_one_rank_is_told(trainers: Trainers, out: Path, whole_of_two: Path, number: int) -> None:
    run = trainers.start(out, *PAUSE, "--pause_rank", "1", ranks=2)
    run.until_step(7)
    run.kill(number, rank=1)
    assert run.wait() == [75, 75]
    assert acknowledged(out) == checkpoints(out) == [5, 8], "the other hears of it one step later"
    assert max(losses(out)) == 8
    resumes(trainers, out, whole_of_two, 2)


HASHING = """
import time
from accel_train.store import retention
def hash_ahead(directory, cache):
    while True:
        time.sleep(0.01)
        yield
retention.hash_ahead = hash_ahead
"""


@pytest.mark.fault(
    "F16",
    injected="SIGTERM while old checkpoints are hashed for the first time",
    outcome="saves are acknowledged at their commit; the stop does not wait for hashing",
)
def test_a_stop_does_not_wait_for_the_hashing_of_old_checkpoints(
    trainers: Trainers, out: Path, whole: Path, tmp_path: Path
) -> None:
    """Here the hashing never ends."""
    trainers.stopped(out, 5)
    flags = (*EVERY, "--checkpoints.keep_last", "1")
    run = trainers.start(out, *flags, "--pause_at", "12", **writer_patch(tmp_path / "patch", HASHING))
    run.until_step(12)
    run.until(out / "acknowledged.txt", "10")
    run.kill(signal.SIGTERM)
    assert run.wait() == [75], run.output()
    assert acknowledged(out) == checkpoints(out) == [5, 10, 12]
    assert trainers.run(out, *flags).wait() == [0]
    assert checkpoints(out) == [20]
    same_run(out, whole)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])  # one is the easier case
def test_a_stop_file(trainers: Trainers, out: Path, request: pytest.FixtureRequest, ranks: int) -> None:
    run = trainers.start(out, *EVERY, "--pause_at", "3", ranks=ranks)
    run.until_step(3)
    (out / "STOP").touch()
    assert set(run.wait()) == {75}
    assert not (out / "STOP").exists(), "the next start is to train"
    assert checkpoints(out)[-1] == max(losses(out)) < 5
    resumes(trainers, out, request.getfixturevalue("whole" if ranks == 1 else "whole_of_two"), ranks)


@pytest.mark.fault(
    "F14", injected="SIGTERM during a save that is waited for", outcome="that save finishes; no second one is made"
)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sigterm_during_a_save(trainers: Trainers, out: Path, request: pytest.FixtureRequest, ranks: int) -> None:
    sync = ("--checkpoints.asynchronous", "false")
    run = trainers.start(out, *EVERY, *sync, ranks=ranks, failpoint=f"before_seal@{ranks - 1}=hold")
    run.until_held()
    run.kill(signal.SIGTERM, rank=ranks - 1)
    run.go()
    assert set(run.wait()) == {75}
    assert acknowledged(out) == checkpoints(out) == [5]
    assert max(losses(out)) == 5
    resumes(trainers, out, request.getfixturevalue("whole" if ranks == 1 else "whole_of_two"), ranks)


@pytest.mark.slow  # the second SIGINT goes the same way
@pytest.mark.fault("F15", injected="a second SIGTERM", outcome="exit at once (143); previous checkpoint intact")
def test_second_sigterm(trainers: Trainers, out: Path, whole: Path) -> None:
    twice(trainers, out, whole, signal.SIGTERM, 143)


@pytest.mark.fault("F15", injected="SIGINT twice", outcome="exit at once (130); previous checkpoint intact")
def test_second_sigint(trainers: Trainers, out: Path, whole: Path) -> None:
    twice(trainers, out, whole, signal.SIGINT, 130)


def twice(trainers: Trainers, out: Path, whole: Path, number: int, code: int) -> None:
    trainers.stopped(out, 5)
    run = trainers.start(out, *PAUSE, failpoint="before_file=hold")
    run.until_step(7)
    run.kill(number)
    run.until_held()  # it saves, and would for ever
    (writer,) = children(run.pids[0], "checkpoints.writer")
    time.sleep(SAME_REQUEST_SECONDS + 0.2)
    assert not run.poll()
    run.kill(number)
    assert run.wait() == [code]
    assert gone([writer])
    assert "the last committed checkpoint stands" in run.output()
    assert checkpoints(out) == [5]
    resumes(trainers, out, whole, 1)


@pytest.mark.fault(
    "F16", injected="SIGTERM while a slow writer writes", outcome="waits for the writer, saves, exits with 75"
)
def test_sigterm_during_an_asynchronous_save(trainers: Trainers, out: Path, whole: Path) -> None:
    run = trainers.start(out, *EVERY, "--pause_at", "6", failpoint="before_file=hold")
    run.until_held()
    run.until_step(6)
    run.kill(signal.SIGTERM)
    run.go()
    assert run.wait() == [75]
    assert acknowledged(out) == checkpoints(out) == [5, 6]
    assert max(losses(out)) == 6
    resumes(trainers, out, whole, 1)


@pytest.mark.fault(
    "F17",
    injected="SIGKILL 1 s after SIGTERM, amid the save",
    outcome="the last checkpoint stays; a warning at the next start",
)
def test_grace_too_short(trainers: Trainers, out: Path, whole: Path) -> None:
    flags = (*PAUSE, "--checkpoints.grace_seconds", "1")
    first = trainers.run(out, *flags, "--max_steps", "5", failpoint="before_file=sleep:1.5")
    assert first.wait() == [0]
    run = trainers.start(out, *flags, failpoint="before_file=hold")
    run.until_step(7)
    warning = "and checkpoints.grace_seconds is 1: after SIGTERM the scheduler may kill this run before it has saved"
    assert warning in run.output()
    run.kill(signal.SIGTERM)
    run.until_held()
    run.kill()
    assert run.wait() == [-9]
    assert checkpoints(out) == [5]
    resumes(trainers, out, whole, 1)


# ---------------------------------------------------------------------------------------------- the user's own mistakes
@pytest.mark.fault(
    "F18", injected="an exception in the user's step", outcome="exit 1 with the traceback; a save under way is finished"
)
def test_the_users_exception(trainers: Trainers, out: Path, whole: Path) -> None:
    run = trainers.run(out, *EVERY, "--raise_at", "10", failpoint="before_file#2=sleep:0.5")
    assert run.wait() == [1]
    assert "RuntimeError: the user's own mistake" in run.output()
    assert acknowledged(out) == checkpoints(out) == [5, 10], "the save that was under way is finished first"
    assert debris(out) == []
    resumes(trainers, out, whole, 1)


@pytest.mark.slow  # on rank 0 it is quick below, and on rank 1 in an evaluation (test_evaluation.py)
@pytest.mark.fault(
    "F19", injected="an exception on rank 1 alone", outcome="rank 0 stops at once; the error of rank 1 is shown"
)
def test_the_exception_of_one_rank(out: Path, launched: list[Launched], tmp_path: Path) -> None:
    flags = (*EVERY, "--checkpoints.asynchronous", "false", "--raise_at", "7", "--raise_rank", "1")
    process = launch(out, *flags, command=ours(2, tmp_path))
    launched.append(process)
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]  # the collectives would wait twice as long
    assert process.returncode == 1
    assert "the user's own mistake" in output
    assert "the user's own mistake" in (out / "logs" / "rank_1.log").read_text()
    assert "the user's own mistake" not in (out / "logs" / "rank_0.log").read_text()
    assert checkpoints(out) == [5]


@pytest.mark.fault(
    "F19", injected="an exception on rank 0 alone, while its writer writes", outcome="both exit with 1; nothing torn"
)
def test_the_exception_of_the_main_process(trainers: Trainers, out: Path, whole_of_two: Path) -> None:
    slowly = """
import os, pathlib, shutil, time
original = shutil.rmtree
def rmtree(path, **options):
    weights = next(path.glob("*.safetensors"), None)
    if weights is not None:
        weights.unlink()
        pathlib.Path(os.environ["ACCEL_TRAIN_FAILPOINTS_GO"]).touch()  # a writer that still lives renames it now
        time.sleep(1)
    original(path, **options)
shutil.rmtree = rmtree
"""
    run = trainers.run(out, *EVERY, "--raise_at", "13", ranks=2, patch=slowly, failpoint="before_rename#2=hold")
    assert run.wait() == [1, 1]
    assert checkpoints(out) == [5], "nothing torn under the final name"
    assert debris(out) == []
    resumes(trainers, out, whole_of_two, 2)


@pytest.mark.fault("F20", injected="rank 1 stalls", outcome="the others name the operation and the option in time")
def test_a_rank_stalls(trainers: Trainers, out: Path, whole_of_two: Path) -> None:
    flags = ("--checkpoints.asynchronous", "false", "--collective_timeout_seconds", "3")
    run = trainers.start(out, *EVERY, *flags, "--hang_at", "7", "--raise_rank", "1", ranks=2)
    run.until_step(7)
    assert run.processes[0].wait(PATIENCE_SECONDS) == 1
    assert "all_reduce, called at " in run.output()
    assert "give a larger --collective_timeout_seconds" in run.output()
    run.kill()
    run.wait()
    resumes(trainers, out, whole_of_two, 2)


def test_a_loader_worker_that_outlives_its_trainer_does_not_hold_the_run(trainers: Trainers, out: Path) -> None:
    """Workers are forked after the lock is taken and notice the death of their parent seconds later."""
    patch = """
import os, time
from accel_train.checkpoints import saver
original = saver.Saver.__enter__
def enter(self):
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return original(self)
saver.Saver.__enter__ = enter
"""
    run = trainers.start(out, *PAUSE, patch=patch)
    run.until_step(7)
    (worker,) = (p for p in psutil.Process(run.pids[0]).children() if "checkpoints.writer" not in " ".join(p.cmdline()))
    os.kill(run.pids[0], signal.SIGKILL)
    assert run.wait() == [-9]
    again = trainers.start(out, *EVERY)
    try:
        again.until(again.out / "losses.txt", "\n20 ")
    finally:
        worker.kill()
    assert again.wait() == [0], again.output()
    assert commit.newest_verified(out / "checkpoints")[0] is not None
