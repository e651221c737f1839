"""What reaches the console and what reaches each rank's file, in the process and in real ones that fail."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from accel_train.config import MachineError, UsageError
from accel_train.metrics.logs import setup_logging
from accel_train.wording import FILE_ONLY

own = logging.getLogger("accel_train.some.module")
other = logging.getLogger("httpx")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, sys.excepthook, threading.excepthook, warnings.showwarning)
    yield
    assert (list(root.handlers), root.level, sys.excepthook, threading.excepthook, warnings.showwarning) == before


def test_console_is_short_and_file_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with setup_logging(tmp_path, 0, 2) as logs:
        own.info("step 1/10")
        own.info("step 2/10", extra={FILE_ONLY: True})
        own.debug("not at all")
        other.info("GET /")
        other.warning("slow")
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[:2] == ["step 1/10", "warning: slow"]
    assert (len(lines), err) == (2, "")
    assert logs.path == tmp_path / "logs" / "rank_0.log"
    header, *rest = logs.path.read_text().splitlines()
    assert re.match(r"===== \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 rank 0 of 2, pid \d+: ", header)
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "
    expected = [
        r"INFO accel_train.some.module: step 1/10",
        r"INFO accel_train.some.module: step 2/10",
        r"INFO httpx: GET /",
        r"WARNING httpx: slow",
    ]
    for line, pattern in zip(rest, expected, strict=True):
        assert re.fullmatch(stamp + pattern, line)


def test_retries_of_the_hub_are_on_the_console_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = logging.getLogger("huggingface_hub")
    before = list(hub.handlers)
    own_console = logging.StreamHandler(sys.stderr)
    hub.addHandler(own_console)
    try:
        with setup_logging(tmp_path, 0, 1):
            logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        assert capsys.readouterr() == ("warning: Retrying in 1s\n", "")
        assert hub.handlers == [*before, own_console]
    finally:
        hub.removeHandler(own_console)


def test_other_ranks_have_no_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with setup_logging(tmp_path, 3, 4):
        own.warning("only in the file")
    assert capsys.readouterr() == ("", "")
    assert "only in the file" in (tmp_path / "logs" / "rank_3.log").read_text()


def test_twice_writes_each_message_once_and_appends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = setup_logging(tmp_path, 0, 1)
    second = setup_logging(tmp_path, 0, 1)
    own.info("once")
    first.close()  # superseded: must not take the second's handlers away
    own.info("still here")
    second.close()
    second.close()
    own.info("after the end")
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    assert (text.count("====="), text.count("once"), text.count("still here"), text.count("after")) == (2, 1, 1, 0)
    assert capsys.readouterr().out.splitlines() == ["once", "still here"]


def test_a_place_that_cannot_be_written_is_wrong_usage_and_a_full_disk_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"output_dir='.*/file'.*Not a directory.*--output_dir") as path:
        setup_logging(tmp_path / "file", 0, 1)
    assert path.value.exit_code == 2
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").symlink_to("/dev/full")
    with pytest.raises(MachineError, match="No space left"):
        setup_logging(tmp_path, 0, 1)


def test_a_disk_that_fills_up_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with setup_logging(tmp_path, 0, 1):
        handler = next(h for h in logging.getLogger().handlers if type(h).__name__ == "_RankFile")
        assert isinstance(handler, logging.FileHandler)
        handler.stream.close()
        handler.stream = open("/dev/full", "w")  # noqa: SIM115
        for _ in range(5):
            own.info("on the console all the same")
        out, err = capsys.readouterr()
        assert out.count("on the console all the same") == 5
        assert err.count("No space left") == 1
        assert "Traceback" not in err


@pytest.mark.fault("R4", injected="the reader of standard output leaves: `recipe | head`", outcome="the run goes on")
def test_a_run_goes_on_without_its_console(tmp_path: Path) -> None:
    code = (
        "import logging, sys\nfrom pathlib import Path\n"
        "from accel_train.data import progress\nfrom accel_train.metrics.logs import setup_logging\n"
        "progress.SECONDS_BETWEEN_LINES = 0.0\n"
        "with setup_logging(Path('.'), 0, 1):\n"
        "    sys.stdin.read()\n"
        "    for step in range(3):\n"
        "        logging.getLogger('accel_train').info('step %d', step)\n"
        "        with progress.Progress('evaluation', 1, True) as bar:\n"
        "            bar.update(1)\n"
    )
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    assert text.count("the console cannot be written") == 1
    assert "step 2" in text


def test_messages_go_around_a_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    with setup_logging(tmp_path, 0, 1), tqdm(total=10) as bar:
        bar.update(3)
        own.info("checkpoint saved")
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].endswith("checkpoint saved")
    assert "\r" in err
    assert err.count("3/10") >= 2


def run_process(tmp_path: Path, body: str, rank: int = 1) -> tuple[int, str, str, str]:
    code = (
        "import sys, threading, warnings\nfrom pathlib import Path\n"
        "from accel_train.config import UsageError\nfrom accel_train.metrics.logs import setup_logging\n"
        f"logs = setup_logging(Path({str(tmp_path)!r}), {rank}, 2)\n{body}\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TZ": "Asia/Tokyo"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=environ)
    return done.returncode, done.stdout, done.stderr, (tmp_path / "logs" / f"rank_{rank}.log").read_text()


def test_a_traceback_reaches_the_file_and_stderr(tmp_path: Path) -> None:
    code, out, err, log = run_process(tmp_path, "def broken():\n    raise KeyError('x')\nbroken()")
    assert code == 1
    assert out == ""
    assert err.count("Traceback") == 1
    assert "KeyError: 'x'" in err
    assert log.count("Traceback") == 1
    assert "CRITICAL" in log
    assert "in broken" in log
    assert "KeyError: 'x'" in log


def test_a_traceback_out_of_the_context_is_written_once(tmp_path: Path) -> None:
    code, _, err, log = run_process(tmp_path, "with logs:\n    raise KeyError('x')")
    assert code == 1
    assert err.count("Traceback") == 1
    assert log.count("Traceback") == 1


def test_a_failing_thread_is_in_the_file(tmp_path: Path) -> None:
    body = (
        "thread = threading.Thread(target=lambda: 1 / 0, name='writer')\nthread.start()\nthread.join()\n"
        "quiet = threading.Thread(target=sys.exit)\nquiet.start()\nquiet.join()"
    )
    code, _, err, log = run_process(tmp_path, body)
    assert code == 0
    assert "ZeroDivisionError" in err
    assert "uncaught ZeroDivisionError in thread writer" in log
    assert log.count("Traceback") == 1
    assert "SystemExit" not in log


def test_wrong_usage_and_exit_have_no_traceback(tmp_path: Path) -> None:
    code, _, err, log = run_process(tmp_path, "raise UsageError('lr=-1: above 0; raise it')")
    assert code == 1
    assert err == "error (wrong usage): lr=-1: above 0; raise it\n"
    assert "ERROR accel_train.metrics.logs: wrong usage: lr=-1: above 0; raise it" in log
    assert "Traceback" not in log
    code, _, err, log = run_process(tmp_path, "with logs:\n    raise SystemExit(75)")
    assert code == 75
    assert err == ""
    assert "SystemExit" not in log
    code, _, err, log = run_process(tmp_path, "raise SystemExit(2)")
    assert code == 2
    assert "SystemExit" not in log
    assert log.count("=====") == 3


def test_an_output_directory_on_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    for directory in (tmp_path / "runs", tmp_path / "runs" / "one"):
        with pytest.raises(UsageError, match=r"runs is a link to .*/gone, which does not exist; .*: make it, delete"):
            setup_logging(directory, 0, 1)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be opened .*make it writable or give another"):
        setup_logging(tmp_path / "file", 0, 1)


def test_an_earlier_hook_still_runs(tmp_path: Path) -> None:
    body = "logs.close()\nsys.excepthook = lambda *a: print('mine', a[0].__name__)\n"
    body += f"logs = setup_logging(Path({str(tmp_path)!r}), 1, 2)\nraise UsageError('x')"
    code, out, err, log = run_process(tmp_path, body)
    assert (code, out, err) == (1, "mine UsageError\n", "")
    assert "wrong usage: x" in log


@pytest.mark.parametrize("rank", [0, 1])
def test_warnings_reach_the_file_and_the_main_process_shows_them(tmp_path: Path, rank: int) -> None:
    _, out, err, log = run_process(tmp_path, "warnings.warn('old thing')", rank)
    header, first = log.splitlines()[:2]
    written = [datetime.fromisoformat(text) for text in (header.split()[1], first.split()[0])]
    assert abs((written[1] - written[0]).total_seconds()) < 60  # both in UTC, whatever the time zone
    line = f"{tmp_path}/script.py:6: UserWarning: old thing\n"
    assert (out, err) == (f"warning: {line}" if rank == 0 else "", "")
    assert f"WARNING py.warnings: {line}  warnings.warn('old thing')" in log
