"""``accel-train calibrate`` as a person starts it, on the CPU."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_train.calibration import measuring, program, report
from accel_train.calibration.flags import Options
from accel_train.config import UsageError
from accel_train.cost_model import record
from accel_train.runtime import threads
from tests import zygote
from tests.calibration.made_up import made_up
from tests.distributed.launching import ROOT, environment
from tests.waiting import PATIENCE_SECONDS

WORDS = [sys.executable, "-m", "accel_train.cli", "calibrate", "--seconds", "0.1"]


ONE = {"RANK": "0", "WORLD_SIZE": "1"}
"""Of a launcher's only process, which measures by itself."""


def calibrate(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    kept = environment(CUDA_VISIBLE_DEVICES="", **extra)
    return zygote.run([*WORDS, *words], env=kept, timeout=PATIENCE_SECONDS, apart=True)


def test_a_machine_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "my machine.json"
    done = calibrate("--output", str(file), "--precision", "bf16", **ONE)
    assert done.returncode == 0, done.stderr
    found = record.read(file)
    machine = found.machine
    assert (machine.precision, machine.processes, machine.threads, machine.device_type) == ("bf16", 1, 1, "cpu")
    assert machine.num_machines == 1
    assert all(figure.value > 0 and figure.rounds >= 5 for figure in found.figures.by_name().values())
    assert all(link.rounds == 0 for link in found.links.by_kind().values())
    assert f"written: {file}" in done.stdout
    for name in found.figures.by_name():
        assert f"\n{name} " in done.stdout


@pytest.mark.slow  # the fit has quick tests, and one process measures every day
@pytest.mark.distributed
def test_two_processes_measure_their_links(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    words = [*WORDS, "--output", str(file), "--num_processes", "2"]
    kept = environment(CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    done = subprocess.run(words, env=kept, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = record.read(file)
    assert (found.machine.num_machines, found.machine.processes, found.machine.backend) == (1, 2, "gloo")
    for link in found.links.by_kind().values():
        assert link.bytes_per_second is not None
        assert link.bytes_per_second > 0
        assert link.rounds >= 5
    assert done.stdout.count("written: ") == 1, "by one process"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0"], "seconds: 0: a number above 0"),
        (["--seconds", "nan"], "seconds: nan"),
        (["--output", "/none/there.json"], "output: /none/there.json: /none is not a directory"),
        (["--output", "/proc/c.json"], r"output: /proc/c.json: cannot be written .*; give another"),
        (["--output", ""], "output: '': empty text is refused"),
        (["--output", "here.yaml"], "output: .*a name that ends in .json"),
        (["--precision", "fp16"], "precision: fp16: a GPU is required"),
    ],
)
def test_impossible_flags_are_refused(words: list[str], message: str) -> None:
    done = calibrate(*words, **ONE)
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_flags_of_a_launch_are_refused_inside_of_one() -> None:
    done = calibrate("--num_processes", "2", **ONE)
    assert done.returncode == 2
    assert "num_processes: 2: a launcher has started this process" in done.stderr


def test_a_foreign_file_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "package.json"
    file.write_text(json.dumps({"name": "mine"}))
    done = calibrate("--output", str(file))
    assert done.returncode == 2
    assert "exists and was not written by accel-train calibrate" in done.stderr
    assert json.loads(file.read_text()) == {"name": "mine"}


def test_a_measurement_is_printed_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(measuring, "measure", lambda *_: made_up())
    monkeypatch.setattr(threads, "resolve_threads", lambda _: "threads: 1")
    monkeypatch.setattr(record, "write", fail)
    with pytest.raises(UsageError, match=r"output: .*c\.json: cannot be written \(No space left on device\)"):
        program.run(Options(tmp_path / "c.json"))
    assert report.describe(made_up()) in capsys.readouterr().out


def test_another_process_gets_the_same_options(tmp_path: Path) -> None:
    assert Options(tmp_path / "c.json", "bf16", 2.5).words() == [
        *("--output", str(tmp_path / "c.json")),
        *("--seconds", "2.5"),
        *("--precision", "bf16"),
    ]
