"""How a process ends: its exit code, and a stop before there is anything to save. Real processes, real signals."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_train.config import UsageError
from accel_train.runtime import exiting
from accel_train.runtime.exiting import (
    STARTED_AGAIN_VARIABLE,
    StartAgain,
    one_run,
    reported_exit_code,
    started_again,
    unfinished,
)
from accel_train.store import lock
from tests.waiting import PATIENCE_SECONDS, until

ROOT = Path(__file__).parents[2]
MAIN = """
import atexit, hashlib, os, sys, time
from pathlib import Path
from accel_train.config import MachineError, MendedError, UsageError
from accel_train.runtime.early_stop import look_for_stop_file
from accel_train.runtime.exiting import run_main

def ready():
    os.write(1, b"ready\\n")

def main(argv):
    if argv == ["mended"]:
        raise MendedError("x.safetensors: damaged and deleted")
    if argv == ["usage"]:
        raise UsageError("--x 1: must be 2; write 2")
    if argv == ["machine"]:
        raise MachineError("output_dir: no space left; free some")
    if argv == ["exit"]:
        raise SystemExit(2)
    if argv == ["words"]:
        raise SystemExit("words")
    if argv == ["python"]:
        ready()
        while True:
            time.sleep(0.1)
    if argv == ["library"]:
        ready()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes without one bytecode
    if argv[0] == "file":
        look_for_stop_file(Path(argv[1]))
        ready()
        time.sleep(3600)
    if argv[0] == "first":
        from accel_train.runtime.signals import StopRequests
        requests = StopRequests(Path(argv[1]), main=True, alone=True)
        ready()
        time.sleep(3600)
    if argv[0] == "later":
        from accel_train.runtime.signals import StopRequests
        requests = StopRequests(Path(argv[1]), main=True, alone=True)
        requests.begin()
        ready()
        while not requests.requested:
            time.sleep(0.01)
        print(requests.reason)
        return 7
    if argv == ["fork"]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            ready()
            os.write(writing, b"x")
            time.sleep(3600)
        os.read(reading, 1)
        os.kill(child, 15)
        _, status = os.waitpid(child, 0)
        time.sleep(4)  # longer than a signal of its own would leave it
        return 40 + os.WTERMSIG(status)
    if argv == ["shutdown"]:
        atexit.register(sys.stdin.readline)
        atexit.register(ready)
        return 0
    return int(argv[0])

run_main(main)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "main.py"
    path.write_text(MAIN)
    return path


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")}
    return kept | {"PYTHONPATH": str(ROOT)} | more


@pytest.mark.parametrize(
    ("argument", "code", "reported", "printed"),
    [
        ("0", 0, "0 1\n0 0\n", ""),
        ("75", 75, "0 1\n0 75\n", ""),
        ("machine", 1, "0 1\n0 1\n", "error (exit code 1): output_dir: no space left; free some\n"),
        ("usage", 2, "0 1\n0 2\n", "error (wrong usage, exit code 2): --x 1: must be 2; write 2\n"),
        (
            "mended",
            75,
            "0 1\n0 76\n",
            "error (exit code 75: start the same command again): x.safetensors: damaged and deleted\n",
        ),
        ("exit", 2, "0 1\n0 2\n", ""),
        ("words", 1, "0 1\n", "words\n"),
        ("fork", 40 + signal.SIGTERM, "0 1\n0 55\n", "ready\n"),
    ],
)
def test_the_exit_code_leaves_the_process_and_reaches_the_launcher(
    argument: str, code: int, reported: str, printed: str, script: Path, tmp_path: Path
) -> None:
    file = tmp_path / "codes"
    done = subprocess.run(
        [sys.executable, str(script), argument],
        env=environment(ACCEL_TRAIN_EXIT_CODE_FILE=str(file)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (code, printed)
    assert file.read_text() == reported


def test_a_defect_that_the_next_start_mends_is_left_to_the_launcher_once(script: Path, tmp_path: Path) -> None:
    """A disk that damages whatever is written has no end."""
    file = tmp_path / "codes"
    again = environment(ACCEL_TRAIN_EXIT_CODE_FILE=str(file), **{STARTED_AGAIN_VARIABLE: "1"})
    done = subprocess.run([sys.executable, str(script), "mended"], env=again, capture_output=True, check=False)
    assert done.returncode == 75
    assert file.read_text() == "0 1\n0 75\n"


def test_output_is_written_when_one_of_several_processes_fails() -> None:
    """Several processes on CPUs leave without Python's own end, which would write it."""
    code = "import torch; from accel_train.runtime.exiting import exit_with; exit_with(lambda argv: print('last') or 3)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "RANK": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stdout) == (3, "last\n")


def test_an_error_of_one_of_several_processes_is_printed_and_does_not_wait_for_teardown() -> None:
    """gloo's teardown joins threads, which may wait for ever for a host that is gone."""
    code = (
        "import atexit, torch\n"
        "from accel_train.runtime.exiting import exit_with\n"
        "atexit.register(print, 'teardown', flush=True)\n"
        "print('last')\n"
        "exit_with(lambda argv: 1 / 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(WORLD_SIZE="2", RANK="1"), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "last\n")
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("length", [10, 1 << 20])  # less and more than a pipe holds
def test_output_that_nobody_reads_ends_without_a_traceback(length: int) -> None:
    code = f"from accel_train.runtime.exiting import exit_with; exit_with(lambda argv: print('x' * {length}))"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_finished_run_whose_lines_nobody_reads_any_more_has_not_failed(rank: str) -> None:
    code = "import sys; from accel_train.runtime.exiting import exit_with; exit_with(lambda argv: wait())"
    code = f"def wait(): print('step', flush=True); sys.stdin.read()\n{code}"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    several = environment(RANK=rank, WORLD_SIZE="2")
    with subprocess.Popen(command, cwd=ROOT, env=several, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"step\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_does_not_fit_on_its_disk_is_one_line(unbuffered: str) -> None:
    code = "import accel_train.cli as cli; cli._main = lambda argv: print('versions'); cli.main()"
    own = environment(PYTHONUNBUFFERED=unbuffered)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=own, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.stderr == "standard output: cannot be written (No space left on device)\n"
    assert done.returncode == 1


def test_another_broken_pipe_is_an_error() -> None:
    code = "from accel_train.runtime.exiting import exit_with; exit_with(lambda argv: _raise())"
    code = f"def _raise(): raise BrokenPipeError('a worker')\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("BrokenPipeError: a worker\n")


def test_a_wrong_usage_is_in_the_log_of_the_run_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exiting, "requested_output_dir", lambda: tmp_path / "run")
    exiting._log("error (wrong usage, exit code 2): no directory is made for it")
    assert not (tmp_path / "run").exists()
    log = tmp_path / "run" / "logs" / "rank_0.log"
    log.parent.mkdir(parents=True)
    log.write_text("an earlier start\n")
    exiting._log("error (wrong usage, exit code 2): --seed fast")
    first, second = log.read_text().splitlines()
    assert (first, second.partition(" ERROR ")[2]) == (
        "an earlier start",
        "accel_train.runtime.exiting: error (wrong usage, exit code 2): --seed fast",
    )
    # Another run is under way there: the log is its own.
    running = lock.acquire(tmp_path / "run")
    exiting._log("error (wrong usage, exit code 2): --seed slow")
    assert len(log.read_text().splitlines()) == 2
    running.release()
    # The directory itself may be what is refused.
    for name in ("n" * 300, "a\0b"):
        monkeypatch.setattr(exiting, "requested_output_dir", lambda name=name: tmp_path / name)
        exiting._log("error (wrong usage, exit code 2): output_dir")


def test_a_run_knows_its_recipe_by_a_path_that_holds_anywhere(tmp_path: Path) -> None:
    """Typed as a relative path, and called by another script or a notebook, whose own path says nothing."""
    text = (
        "import os, sys\n"
        "from accel_train.runtime.exiting import one_run, recipe_file\n"
        "@one_run\n"
        "def main(argv):\n"
        "    os.chdir('/')\n"
        "    print(recipe_file())\n"
        "    return 0\n"
        "if __name__ == '__main__':\n"
        "    main(sys.argv[1:])\n"
    )
    (tmp_path / "r.py").write_text(text)
    (tmp_path / "caller.py").write_text("import r\nfrom accel_train.runtime.exiting import recipe_file\nr.main([])\n")
    in_a_cell = "exec(compile(open('r.py').read(), '<cell>', 'exec'))"
    for words, expected in (
        (["r.py"], tmp_path / "r.py"),
        (["caller.py"], tmp_path / "r.py"),
        (["-c", in_a_cell], None),
    ):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == f"{expected}\n"


def test_one_run_alone_knows_that_it_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its children nor the next run of a notebook: they would not obey their own ``--overwrite``."""
    seen: list[tuple[bool, bool]] = []

    @one_run
    def main(argv: Sequence[str]) -> int:
        seen.append((started_again(), STARTED_AGAIN_VARIABLE in os.environ))
        if argv and len(seen) < 3:
            raise StartAgain("step 3 ran out of memory")
        return 0

    main(["twice"])
    assert seen == [(False, False), (True, False), (True, False)]
    main([])
    assert seen[3:] == [(False, False)]
    # As `accel-train launch` says it to new processes.
    monkeypatch.setenv(STARTED_AGAIN_VARIABLE, "1")
    main([])
    main([])
    assert seen[4:] == [(True, False), (False, False)]


@pytest.mark.parametrize("code", [None, 0.0])
def test_a_main_without_an_exit_code_runs_once_and_is_refused(code: Any) -> None:
    """Taken for a wish to start again, it could not be stopped."""
    starts: list[int] = []

    @one_run
    def main(argv: Sequence[str]) -> int:
        starts.append(len(argv))
        assert len(starts) == 1
        return code

    with pytest.raises(UsageError, match=rf"main returned {code}, .*return loop\.finish\(training\)"):
        main([])


def test_after_a_training_that_is_not_finished_main_returns_75() -> None:
    """Without ``loop.finish``, or with its code dropped after a stop."""

    @one_run
    def main(argv: Sequence[str]) -> int:
        unfinished.extend(argv[1:])
        return int(argv[0])

    with pytest.raises(UsageError, match=r"main returned 0, and the exit code of loop\.finish for runs/a is required"):
        main(["0", "runs/a"])
    assert main(["75", "runs/a"]) == 75
    # Nothing is left from the run before.
    assert main(["0"]) == 0
    assert main(["3"]) == 3


@pytest.mark.parametrize(
    ("said", "stopped", "code"),
    [
        (None, True, None),
        ("", True, None),
        ("0 1\n", True, 1),
        ("0 1\n1 1\n0 75\n1 75\n", False, 75),
        ("0 1\n1 1\n0 2\n1 75\n", False, 2),
        ("0 1\n1 1\n1 75\n", False, 1),
        ("0 1\n1 1\n1 75\n", True, 75),
        ("0 1\n1 1\n1 0\n0 75\n", True, 75),
        ("0 1\n0 3\n", False, 3),
        ("0 1\n1 1\n0 77\n", False, 75),
        ("0 1\n1 1\n0 77\n1 2\n", False, 2),
    ],
    ids=[
        "imports",
        "torn",
        "crash",
        "saved",
        "usage",
        "crash of one",
        "early on one",
        "last push",
        "other",
        "file for one",
        "usage after file",
    ],
)
def test_the_codes_of_all_ranks_become_one(said: str | None, stopped: bool, code: int | None, tmp_path: Path) -> None:
    if said is not None:
        (tmp_path / "codes").write_text(said)
    assert reported_exit_code(tmp_path / "codes", stopped=stopped) == code


@pytest.mark.fault(
    "R4", injected="a stop before the first step is done: data, compilation", outcome="ends at once with exit code 75"
)
@pytest.mark.parametrize(
    ("arguments", "number", "code", "says"),
    [
        (("python",), signal.SIGTERM, 75, "asked to stop (SIGTERM) while there is nothing to save"),
        (("python",), signal.SIGUSR1, 75, "(SIGUSR1)"),
        (("python",), signal.SIGINT, 75, "(SIGINT)"),
        (("library",), signal.SIGTERM, 75, "(SIGTERM)"),
        (("first", "."), signal.SIGTERM, 75, "(SIGTERM)"),
        (("file", "."), None, 75, "(the file STOP)"),
        (("later", "."), signal.SIGTERM, 7, "SIGTERM"),
    ],
    ids=["python", "usr1", "ctrl-c", "inside a library", "first step", "stop file", "after it"],
)
def test_a_stop_while_there_is_nothing_to_save_ends_the_process(
    arguments: tuple[str, ...], number: signal.Signals | None, code: int, says: str, script: Path, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        if number is None:
            (tmp_path / "STOP").touch()
        else:
            child.send_signal(number)
        said = child.communicate(timeout=PATIENCE_SECONDS)[0]
        assert child.returncode == code, said
        assert says in said
        assert not (tmp_path / "STOP").exists()


REPORTS = """
import os
from pathlib import Path
from accel_train.runtime import early_stop
from accel_train.runtime.exiting import EXIT_CODE_VARIABLE, run_main

early_stop.leave_when_asked = lambda: print(Path(os.environ[EXIT_CODE_VARIABLE]).exists())
run_main(lambda argv: 0)
"""


def test_a_process_that_does_not_obey_a_stop_yet_has_not_reported_a_failure(tmp_path: Path) -> None:
    """torchrun ends the others when one exits with 75, and the report of a failure would outweigh it."""
    environment = os.environ | {exiting.EXIT_CODE_VARIABLE: str(tmp_path / "codes")}
    done = subprocess.run(
        [sys.executable, "-c", REPORTS], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "False\n"
    assert reported_exit_code(tmp_path / "codes", stopped=False) == 0


@pytest.mark.fault("R4", injected="a stop while a finished process shuts down", outcome="its exit code is unchanged")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_stop_during_the_shutdown_changes_nothing(number: signal.Signals, script: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(script), "shutdown"],
        env=environment(),
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        said = child.communicate("go on\n", timeout=PATIENCE_SECONDS)[0]
        assert (child.returncode, said) == (0, "")


LAUNCHER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:]])
os._exit(0)
"""


@pytest.mark.parametrize(("launched", "code"), [(True, 75), (False, 0)])
def test_a_recipe_whose_launcher_died_during_its_imports_does_not_train_unwatched(
    launched: bool, code: int, script: Path, tmp_path: Path
) -> None:
    """The launcher leads a process group of its own; the recipe comes to ``run_main`` after its death."""
    head = "import os, time\nwhile os.path.exists(f'/proc/{os.getpgrp()}'):\n    time.sleep(0.01)\n"
    script.write_text(head + script.read_text())
    variables = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"} if launched else {}
    codes = tmp_path / "codes"
    variables["ACCEL_TRAIN_EXIT_CODE_FILE"] = str(codes)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(script), "0"], env=environment(**variables), start_new_session=True
    )
    launcher.wait()
    # One that trains first reports 1, which its end overwrites.
    reports = 1 if launched else 2
    last = until(lambda: codes.exists() and codes.read_text().count("\n") == reports and codes.read_text().split()[-1])
    assert last == str(code)


WATCHING = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""


def test_a_launcher_in_the_background_of_a_shell_that_has_ended_trains(script: Path, tmp_path: Path) -> None:
    """``ssh host 'nohup accelerate launch ... &'``: the shell leads the process group, and ends at once."""
    head = "import os, time\nwhile os.path.exists(f'/proc/{os.getpgrp()}'):\n    time.sleep(0.01)\n"
    script.write_text(head + script.read_text())
    codes = tmp_path / "codes"
    variables = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}
    variables["ACCEL_TRAIN_EXIT_CODE_FILE"] = str(codes)
    launch = shlex.join([sys.executable, "-c", WATCHING, str(script), "0"])
    subprocess.run(["sh", "-c", f"{launch} &"], env=environment(**variables), start_new_session=True, check=True)
    until(lambda: codes.exists() and codes.read_text().count("\n") == 2)
    assert codes.read_text().split()[-1] == "0"
