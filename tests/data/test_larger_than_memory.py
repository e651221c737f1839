"""20 GB are read within 1 GiB of memory, everything included."""

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
@pytest.mark.parametrize("kind", ["parquet", "hdf5", "texts"])
def test_20_gb_are_read_within_1_gib_of_memory(kind: str, tmp_path: Path) -> None:
    getattr(larger_than_memory, f"write_{kind}")(tmp_path)
    command = [sys.executable, "-m", "tests.data.larger_than_memory", kind, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["each_once"]
    assert found["bytes"] >= 20e9
    assert found["peak_bytes"] < 2**30
