import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_train.data import progress
from accel_train.data.progress import Progress

ROOT = Path(__file__).parents[2]


def test_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with Progress("latents", 10, True) as bar:
        bar.update(4)
        bar.update(6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "latents: 4 of 10 samples"
    assert re.fullmatch(r"latents: 10 of 10 samples, \d+/s, 0 s left", lines[1])


def test_the_wait_for_the_first_samples_is_no_measure_of_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress("pictures", 1001, True) as bar:
        for seconds, count in ((20, 1), (23, 30), (26, 29), (31, 51)):
            clock[0] = seconds
            bar.update(count)
    assert capsys.readouterr().out.splitlines() == [
        "pictures: 1 of 1001 samples",
        "pictures: 60 of 1001 samples, 9.8/s, 96 s left",
        "pictures: 111 of 1001 samples, 10/s, 89 s left",
    ]


def test_the_work_goes_on_when_nobody_reads_its_lines() -> None:
    code = """
import sys
from accel_train.data import progress
from accel_train.runtime.exiting import exit_with

def main(argv):
    sys.stdin.read()
    progress.SECONDS_BETWEEN_LINES = 0.0
    with progress.Progress("latents", 2, True) as bar:
        bar.update(1)
        bar.update(1)
    print("done", file=sys.stderr)

exit_with(main)
"""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b"done\n"
    # Lines of progress are all that was lost.
    assert process.returncode == 0


def test_short_work_and_other_processes_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress("latents", 10, True) as bar:
        bar.update(10)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with Progress("latents", 10, False) as bar:
        bar.update(10)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import tqdm

    made: list[dict[str, object]] = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    real = tqdm.tqdm
    monkeypatch.setattr(tqdm, "tqdm", lambda **options: made.append(options) or real(**{**options, "delay": 0}))
    with Progress("latents", 10, True) as bar:
        bar.update(10)
    assert made[0]["total"] == 10
    assert "latents: 100%" in capsys.readouterr().out
