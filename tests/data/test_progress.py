import re
import sys

import pytest

from accel_train.data import progress
from accel_train.data.progress import Progress


def test_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with Progress("latents", 10, True) as bar:
        bar.update(4)
        bar.update(6)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"latents: 4 of 10 samples, \d+/s, \d+ s left", lines[0])
    assert lines[1].startswith("latents: 10 of 10 samples")


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
