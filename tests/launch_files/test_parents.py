"""Processes that end with their parent, even if it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

import accel_train
from accel_train.launch_files.parents import tied_to_parent
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
WAITS = ["sh", "-c", 'read line; exec "$@"', "sh"]
"""Becomes the command behind it once a line is written to it."""
STARTS = """
import subprocess
from accel_train.launch_files.parents import tied_to_parent
child = subprocess.Popen([*{before}, *tied_to_parent({command}, {number})])
print(child.pid, flush=True)
child.wait()
"""


def parent_of_a_tied_command(before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a process that starts ``SLEEPS`` tied, with the words ``before`` it, and prints its number."""
    code = STARTS.format(command=SLEEPS, before=list(before), number=int(signal.SIGKILL))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)


def test_a_tied_command_is_itself_and_ends_with_a_killed_parent() -> None:
    with parent_of_a_tied_command() as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        until(lambda: child.cmdline() == SLEEPS)
        parent.kill()
    until(lambda: has_ended(child))


def test_a_tied_command_ends_with_a_parent_killed_before_it_began() -> None:
    with parent_of_a_tied_command(WAITS) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        parent.stdin.write("begin\n")
        parent.stdin.flush()
        until(lambda: has_ended(child))


def has_ended(process: psutil.Process) -> bool:
    try:
        # Whoever inherits it may not read its exit code.
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_tied_command_gives_its_exit_code_and_output() -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "-I", "a b"]
    done = subprocess.run(tied_to_parent(command), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "['-I', 'a b']\n", "")


def test_python_runs_between_fork_and_exec_in_the_launcher_alone() -> None:
    library = Path(str(accel_train.__file__)).parent
    found = [path.name for path in library.rglob("*.py") if "preexec_fn=" in path.read_text("utf-8")]
    assert found == ["launch.py"]
