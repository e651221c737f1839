"""The file of a calibration: written, read again, and refused where it is not what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_train.calibration import report
from accel_train.config import UsageError
from accel_train.cost_model import record
from accel_train.store import strict_json
from tests.calibration.made_up import made_up


def resealed(path: Path, change: Any) -> None:
    """Change the content, and seal it again as another version might."""
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(strict_json.sealed(tree)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "here it is.json"
    record.write(file, made_up())
    return file


@pytest.mark.parametrize("processes", [1, 2])
def test_what_was_written_is_read(processes: int, tmp_path: Path) -> None:
    written = made_up(processes=processes)
    record.write(tmp_path / "c.json", written)
    assert record.read(tmp_path / "c.json") == written


def test_a_changed_digit_is_damage(path: Path) -> None:
    path.write_text(path.read_text().replace("80000000000.0", "90000000000.0"))
    with pytest.raises(UsageError, match=r"device: .*it has changed since it was written.*[Mm]easure again"):
        record.read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(extra=1), "unknown key extra"),
        (lambda tree: tree["figures"]["host"].update(extra=1), "unknown key figures.host.extra"),
        (lambda tree: tree["machine"].pop("threads"), "the key machine.threads is missing"),
        (lambda tree: tree.update(links=3), "links is not a group of keys"),
        (lambda tree: tree["machine"].update(precision="fp8"), "machine.precision: 'fp8' is refused: 'fp32' or"),
        (lambda tree: tree["figures"]["copy"].update(value="fast"), "figures.copy.value: 'fast' is refused: a number"),
        (lambda tree: tree["figures"]["copy"].update(value=0), "figures.copy.value: 0: a number above 0 is required"),
        (lambda tree: tree["figures"]["copy"].update(value=[1.0]), "figures.copy.value: a list is refused"),
        (lambda tree: tree.update(format=1), "its format is 1, not 3"),
    ],
)
def test_other_keys_and_values_are_refused(path: Path, change: Any, message: str) -> None:
    resealed(path, change)
    with pytest.raises(UsageError, match=message):
        record.read(path)


def test_what_is_no_file_of_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it does not exist"):
        record.read(tmp_path / "none.json")
    torn = tmp_path / "torn.json"
    torn.write_text('{"format": 1, ')
    with pytest.raises(UsageError, match="it is not JSON"):
        record.read(torn)


def test_another_calibration_is_replaced_and_nothing_else(path: Path, tmp_path: Path) -> None:
    later = made_up(date="2026-11-27 08:00")
    record.write(path, later)
    assert record.read(path) == later
    sealed = json.dumps(strict_json.sealed({"files": {}}))
    for number, content in enumerate(("{}", sealed, "torn {")):
        other = tmp_path / f"{number}.json"
        other.write_text(content)
        with pytest.raises(UsageError, match=r"output: .*exists and was not written by accel-train calibrate"):
            record.write(other, later)
        assert other.read_text() == content


def test_the_report_has_every_figure_and_calls_noise_by_its_name() -> None:
    text = report.describe(made_up())
    for part in ("80 GFLOP/s", "10.00 us a kernel", "1 GB/s + 100 us", "500 MB/s + 200 us", "residual 5.0%"):
        assert part in text
    assert "noisy" not in text
    assert "noisy, with quartiles more than 10% apart: products, attention" in report.describe(made_up(spread=0.2))
    assert text.count("not measured") == 0
    assert report.describe(made_up(processes=1)).count("not measured: one process") == 3
