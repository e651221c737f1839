"""20 GB are read within 1 GiB of memory, everything included, and 5 GB of text are tokenised and trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data import larger_than_memory

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a program is read from /proc")
@pytest.mark.parametrize(("kind", "required"), [("parquet", 20e9), ("hdf5", 20e9), ("texts", 20e9), ("tokens", 5e9)])
def test_files_are_read_within_1_gib_of_memory(kind: str, required: float, tmp_path: Path) -> None:
    getattr(larger_than_memory, f"write_{kind}")(tmp_path)
    command = [sys.executable, "-m", "tests.data.larger_than_memory", kind, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["each_once"]
    assert found["bytes"] >= required
    assert found["peak_bytes"] < 2**30
