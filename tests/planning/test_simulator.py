"""A simulation in a process of its own, seen from the planner that waits for it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from accel_train.planning import simulator

WAITS = """
import sys, time
from pathlib import Path
print("asking the Hub once more", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def test_a_long_simulation_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child ends only behind the planner's line."""
    go = tmp_path / "go"

    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            if "asking the Hub once more" in text:
                go.touch()
            return super().write(text)

    said = Stderr()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(simulator, "SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setattr(simulator, "_can_fork", lambda: False)
    words = [sys.executable, "-c", WAITS, str(go)]
    assert simulator.run_apart(words, os.environ, tmp_path) == ("asking the Hub once more\n", 0)
    assert " s: asking the Hub once more\n" in said.getvalue()
